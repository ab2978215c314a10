"""What a model is for: the loss it is trained with and the metric it is judged by."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from acm_compiler.recipe.datasets import kind_tag
from acm_compiler.recipe.fields import PathLike, PythonKind, Section, Whole


class ClassifyTask(Section):
    """One class per example: cross entropy, accuracy."""

    kind: Literal["classify"]
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of a label's weight that is spread over all classes, in the loss of training."""


class CtcTask(Section):
    """Text from audio without alignment: CTC loss, word or character error rate."""

    kind: Literal["ctc"]
    unit: Literal["word", "character"] = "word"
    """What errors are counted in."""


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
    """Of a text's tokens, how many are hidden."""
    seed: Whole = 0
    """Which ones; the same in every epoch and for every model."""


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
