"""Task and expectation of a recipe: training loss, metric, and the dense metric that the model must reach first.

Which tasks fit which data and which models: what cannot work is refused before anything is loaded.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from acm_compiler.errors import UnexpectedMetric, UsageError
from acm_compiler.recipe.datasets import (
    ClutteredDigitsData,
    CommonVoiceData,
    DataConfig,
    DataSection,
    PictureData,
    SpokenDigitsData,
    TextData,
    TextRowsData,
    kind_tag,
)
from acm_compiler.recipe.fields import Count, NotNegative, PathLike, PythonKind, Section, Whole, refusal


class ClassifyTask(Section):
    """One class per example: cross entropy, accuracy."""

    kind: Literal["classify"]
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of a label's weight that is spread over all classes, in the loss of training."""


class CtcTask(Section):
    """Text from audio without alignment: CTC loss, word or character error rate."""

    kind: Literal["ctc"]
    unit: Literal["word", "character"] = "word"
    """Unit in which errors are counted."""


class EmbedTask(Section):
    """Sentence vectors: distance to the dense model's vectors."""

    kind: Literal["embed"]


class CausalLMTask(Section):
    """The next token: cross entropy, perplexity."""

    kind: Literal["causal_lm"]


class MaskedLMTask(Section):
    """Hidden tokens: cross entropy, perplexity."""

    kind: Literal["masked_lm"]
    share: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Share of a text's tokens that are hidden."""
    seed: Whole = 0
    """Seed of the choice of tokens; the same in every epoch and for every model."""


class PythonTask(Section):
    """A task that a function of the user's builds."""

    kind: PythonKind
    args: Annotated[dict[str, Any], PathLike()] = Field(default_factory=dict)
    """Keyword arguments of the function."""


TaskConfig = Annotated[
    Annotated[ClassifyTask, Tag("classify")]
    | Annotated[CtcTask, Tag("ctc")]
    | Annotated[EmbedTask, Tag("embed")]
    | Annotated[CausalLMTask, Tag("causal_lm")]
    | Annotated[MaskedLMTask, Tag("masked_lm")]
    | Annotated[PythonTask, Tag("python")],
    Discriminator(kind_tag),
]


class ExpectConfig(Section):
    """The task's metric of the model before conversion: about `metric`, or between bounds. Else no run starts."""

    metric: float | None = None
    """About what it reaches, such as 0.81 (accuracies and error rates are shares)."""
    within: NotNegative | None = None
    """Largest distance from `metric`, the chance of which examples are drawn included."""
    at_least: float | None = None
    """The smallest metric that will do; in place of metric and within."""
    at_most: float | None = None
    """The largest metric that will do."""
    examples: Count = 512
    """Number of examples of data.eval, drawn at random, that it is measured on."""

    @model_validator(mode="after")
    def _one_way(self) -> ExpectConfig:
        about, bounds = (self.metric, self.within), (self.at_least, self.at_most)
        if None in about and about != (None, None):
            missing, given = ("within", "metric") if self.within is None else ("metric", "within")
            raise refusal(f"{given} needs {missing}")
        if (about == (None, None)) == (bounds == (None, None)):
            raise refusal("either metric and within, or at_least, at_most or both must be given")
        if self.at_least is not None and self.at_most is not None and self.at_least > self.at_most:
            raise refusal(f"at_least must be at most at_most, {self.at_most:g}, got {self.at_least:g}", "at_least")
        return self

    @property
    def range(self) -> tuple[float, float]:
        """The smallest and the largest metric that will do."""
        if self.metric is not None and self.within is not None:
            return self.metric - self.within, self.metric + self.within
        low, high = self.at_least, self.at_most
        return float("-inf") if low is None else low, float("inf") if high is None else high

    def refuse_other(self, found: float, *, metric: str, where: str) -> None:
        """Refuse a model of another metric than this, which the recipe says at `where`. UnexpectedMetric."""
        low, high = self.range
        if not low <= found <= high:  # nan is none of them
            raise UnexpectedMetric(
                f"the model to convert does not reach the {metric} that the recipe expects",
                where=where,
                found=f"{found:.4g}",
                expected=self,
                fix="check weights, data and task (vocabulary, letters, rates, classes); if this is as it should be, "
                "correct `expect:`, or leave it out with --set expect=null",
            )

    def __str__(self) -> str:
        """The text in messages."""
        if self.metric is not None:
            return f"{self.metric:g} within {self.within:g}"
        parts = (("at least", self.at_least), ("at most", self.at_most))
        return ", ".join(f"{word} {bound:g}" for word, bound in parts if bound is not None)


def names_share(metric: str) -> bool:
    """True for the name of a metric that is a share: an accuracy, an error rate."""
    return metric.endswith(("accuracy", "error rate"))


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
            gives = f"{config.kind} gives {content}, for task {' or '.join(fitting)}{hint}"
            raise refusal(f"task {task.kind} does not fit data.{name}: {gives}", "task")
    _refuse_other_rate(data, input_rate)
    fit = fitting_classes(task.kind, data.train)
    if auto_class is not None and auto_class not in fit:
        what = f"a model of {auto_class} does not fit task {task.kind}, which needs {' or '.join(fit)}"
        raise refusal(what, "model")


def fitting_classes(task: str, data: DataConfig | None = None) -> tuple[str, ...]:
    """The transformers classes whose models can serve a task on this data."""
    if task in _AUTO_CLASSES:
        return _AUTO_CLASSES[task]
    if isinstance(data, (PictureData, ClutteredDigitsData)):
        return (PICTURES,)
    return (TEXTS,) if isinstance(data, (TextData, TextRowsData)) else (PICTURES, TEXTS, *_OTHER_CLASSIFIERS)


# XLM's and Flaubert's …WithLMHeadModel may be either
_HEADS = {
    r"ForCausalLM|(?<!With)LMHeadModel": ("causal_lm", "writes the next token, and sees only what came before"),
    r"ForMaskedLM": ("masked_lm", "guesses hidden tokens, and sees what comes after them"),
    r"ForCTC": ("ctc", "writes down audio"),
    r"For(Sequence|Image|Audio|Video)Classification": ("classify", "predicts one class per example"),
}


def refuse_other_head(task: str, name: str, *, auto_class: str) -> None:
    """Refuse a model whose class, called `name`, says that it is for another task. UsageError.

    auto_class: the transformers class that fits.
    """
    for pattern, (fits, what) in _HEADS.items():
        if re.search(rf"({pattern})$", name) and task != fits:
            raise UsageError(
                f"the model is not for task {task}",
                where=name,
                found=f"a model that {what}: task {fits}",
                fix=f"use task {fits}, or another model (for hf: auto_class {auto_class})",
            )


def _refuse_other_rate(data: DataSection, input_rate: int | None) -> None:
    """A model hears audio of another rate than its own faster or slower than it was said."""
    for name, config in (("train", data.train), ("eval", data.eval)):
        rate = AUDIO_RATES.get(config.kind)
        if rate is not None and input_rate is not None and rate != input_rate:
            what = f"input.sample_rate is {input_rate}, but data.{name}, {config.kind}, gives {rate} samples per second"
            fix = "correct it, or give the audio of such a model by a python: data set"
            raise refusal(f"{what}; {fix}", "input")


def _tasks_of(data: DataConfig) -> tuple[str, tuple[str, ...]]:
    """Content of a kind of data, and the tasks for that; nothing where a function of the user's decides."""
    if isinstance(data, (CommonVoiceData, SpokenDigitsData)):
        return "audio with transcripts", ("ctc",)
    if isinstance(data, (PictureData, ClutteredDigitsData)):
        return "images with classes", ("classify",)
    if isinstance(data, (TextData, TextRowsData)):
        labelled = data.classes if isinstance(data, TextData) else data.label
        return ("texts with classes", (*_LANGUAGE, "classify")) if labelled else ("texts", _LANGUAGE)
    return "", ()


def _classes_hint(data: DataConfig) -> str:
    """Hint how texts get classes."""
    if isinstance(data, TextData):
        return "; `classes:` names the folders or packages to tell apart"
    return "; `label:` names the rows' key of the class" if isinstance(data, TextRowsData) else ""
