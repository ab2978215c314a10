"""What the model to convert must reach before anything is done with it."""

from __future__ import annotations

from pydantic import model_validator
from pydantic_core import PydanticCustomError

from acm_compiler.recipe.fields import Count, NotNegative, Section


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
