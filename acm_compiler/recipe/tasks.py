"""Task and expectation of a recipe: training loss, metric, and the dense metric that the model must reach first."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from acm_compiler.recipe.datasets import kind_tag
from acm_compiler.recipe.fields import Count, NotNegative, PathLike, PythonKind, Section, Whole


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


class ExpectConfig(Section):
    """The task's metric of the model before conversion: about `metric`, or between bounds. Else no run starts."""

    metric: float | None = None
    """About what it reaches, such as 0.81 (accuracies and error rates are shares)."""
    within: NotNegative | None = None
    """How far from `metric` it may be; the chance of which examples are drawn included."""
    at_least: float | None = None
    """The smallest metric that will do; in place of metric and within."""
    at_most: float | None = None
    """The largest metric that will do."""
    examples: Count = 512
    """How many examples of data.eval, drawn at random, it is measured on."""

    @model_validator(mode="after")
    def _one_way(self) -> ExpectConfig:
        about, bounds = (self.metric, self.within), (self.at_least, self.at_most)
        if None in about and about != (None, None):
            missing, given = ("within", "metric") if self.within is None else ("metric", "within")
            raise PydanticCustomError("acm", "{given} needs {missing}", {"given": given, "missing": missing})
        if (about == (None, None)) == (bounds == (None, None)):
            raise PydanticCustomError("acm", "either metric and within, or at_least, at_most or both must be given")
        if self.at_least is not None and self.at_most is not None and self.at_least > self.at_most:
            raise PydanticCustomError("acm", "at_least is above at_most", {"key": "at_least"})
        return self

    @property
    def range(self) -> tuple[float, float]:
        """The smallest and the largest metric that will do."""
        if self.metric is not None and self.within is not None:
            return self.metric - self.within, self.metric + self.within
        low, high = self.at_least, self.at_most
        return float("-inf") if low is None else low, float("inf") if high is None else high

    def __str__(self) -> str:
        """As a message says it."""
        if self.metric is not None:
            return f"{self.metric:g} within {self.within:g}"
        parts = (("at least", self.at_least), ("at most", self.at_most))
        return ", ".join(f"{word} {bound:g}" for word, bound in parts if bound is not None)
