"""Which tasks fit which data and which models: what cannot work is refused before anything is loaded."""

from __future__ import annotations

from pydantic_core import PydanticCustomError

from acm_compiler.recipe.datasets import (
    ClutteredDigitsData,
    CommonVoiceData,
    DataConfig,
    DataSection,
    ImageFolderData,
    SpokenDigitsData,
    TextData,
    TextRowsData,
)
from acm_compiler.recipe.tasks import PythonTask, TaskConfig

_LANGUAGE = ("causal_lm", "masked_lm", "embed")
# the transformers class that a task's model is built by; classify has one for each kind of example
_AUTO_CLASSES = {
    "ctc": ("AutoModelForCTC",),
    "causal_lm": ("AutoModelForCausalLM",),
    "masked_lm": ("AutoModelForMaskedLM",),
    "embed": ("AutoModel",),
}
AUDIO_RATES = {"common_voice": 16_000, "spoken_digits": 8_000}  # samples per second, whatever a file has
PICTURES, TEXTS = "AutoModelForImageClassification", "AutoModelForSequenceClassification"
_OTHER_CLASSIFIERS = (
    "AutoModelForAudioClassification",
    "AutoModelForVideoClassification",
    "AutoModelForMultipleChoice",
)


def refuse_unfit(task: TaskConfig, data: DataSection, *, auto_class: str | None, input_rate: int | None) -> None:
    """Refuse a task that its data or its model cannot serve; functions of the user's are not judged.

    input_rate: samples per second of the model's audio, None where its input is none. Raises pydantic's error, with
    the key of the section in question.
    """
    if isinstance(task, PythonTask):
        return
    for name, config in (("train", data.train), ("eval", data.eval)):
        content, fitting = _tasks_of(config)
        if content and task.kind not in fitting:
            hint = _classes_hint(config) if task.kind == "classify" else ""
            raise PydanticCustomError(
                "acm",
                "task {task} does not fit data.{name}: {kind} gives {content}, for task {fitting}{hint}",
                {
                    "key": "task",
                    "task": task.kind,
                    "name": name,
                    "kind": config.kind,
                    "content": content,
                    "fitting": " or ".join(fitting),
                    "hint": hint,
                },
            )
    _refuse_other_rate(data, input_rate)
    fit = fitting_classes(task.kind, data.train)
    if auto_class is not None and auto_class not in fit:
        raise PydanticCustomError(
            "acm",
            "a model of {found} does not fit task {task}, which needs {fit}",
            {"key": "model", "found": auto_class, "task": task.kind, "fit": " or ".join(fit)},
        )


def fitting_classes(task: str, data: DataConfig | None = None) -> tuple[str, ...]:
    """The transformers classes whose models can serve a task on this data."""
    if task in _AUTO_CLASSES:
        return _AUTO_CLASSES[task]
    if isinstance(data, (ImageFolderData, ClutteredDigitsData)):
        return (PICTURES,)
    return (TEXTS,) if isinstance(data, (TextData, TextRowsData)) else (PICTURES, TEXTS, *_OTHER_CLASSIFIERS)


def _refuse_other_rate(data: DataSection, input_rate: int | None) -> None:
    """A model hears audio of another rate than its own faster or slower than it was said."""
    for name, config in (("train", data.train), ("eval", data.eval)):
        rate = AUDIO_RATES.get(config.kind)
        if rate is not None and input_rate is not None and rate != input_rate:
            raise PydanticCustomError(
                "acm",
                "input.sample_rate is {wanted}, but data.{name}, {kind}, gives {rate} samples per second; "
                "correct it, or give the audio of such a model by a python: data set",
                {"key": "input", "wanted": input_rate, "name": name, "kind": config.kind, "rate": rate},
            )


def _tasks_of(data: DataConfig) -> tuple[str, tuple[str, ...]]:
    """What a kind of data holds, and the tasks for that; nothing where a function of the user's decides."""
    if isinstance(data, (CommonVoiceData, SpokenDigitsData)):
        return "audio with transcripts", ("ctc",)
    if isinstance(data, (ImageFolderData, ClutteredDigitsData)):
        return "pictures with classes", ("classify",)
    if isinstance(data, (TextData, TextRowsData)):
        labelled = data.classes if isinstance(data, TextData) else data.label
        return ("texts with classes", (*_LANGUAGE, "classify")) if labelled else ("texts", _LANGUAGE)
    return "", ()


def _classes_hint(data: DataConfig) -> str:
    """How texts get classes."""
    if isinstance(data, TextData):
        return "; `classes:` names the folders or packages to tell apart"
    return "; `label:` names the rows' key of the class" if isinstance(data, TextRowsData) else ""
