"""Results of an evaluation: one model at several budgets, beside the dense model and beside a fixed k.

Everything here is frozen plain data that survives a JSON round trip; it is what `acmc eval --json` prints, what a
run keeps as `eval.json`, and all that a report needs to know. Shares are shares of learner MACs unless they are
called model shares. Two evaluations of one model on the same examples can be joined.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from acm_compiler.errors import StorageError
from acm_compiler.evaluation.wording import budget_names, evaluation_table
from acm_compiler.files import parse_json, read_result, storing, write_file
from acm_compiler.recipe.messages import checked_json
from acm_compiler.recipe.tasks import names_share

SCHEMA = 1
FILE = "eval.json"
_WHAT, _AGAIN = "an evaluation", "measure again: acmc eval DIR"
DenseFrom = Literal["original", "regions", "recorded"]
Places = Literal["patches", "frames"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean and its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricResult:
    """The metric and what the dense model reaches, None where it could not be run.

    `dense_from`: "original" the model before conversion, "regions" the dense regions inside today's trunk,
    "recorded" a number measured earlier, on the same examples or not. `likeness` names what `Result.likeness` is.
    `is_share`: it reads best in percent.
    """

    name: str
    dense: float | None
    dense_error: float | None = None
    dense_from: DenseFrom | None = None
    lower_is_better: bool = False
    likeness: str | None = None
    is_share: bool | None = None

    def __post_init__(self) -> None:
        """Evaluations written before metrics said whether they are shares have it from the name."""
        if self.is_share is None:
            object.__setattr__(self, "is_share", names_share(self.name))


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteUse:
    """Usage of one site: its share of its own learner MACs, and the number of tokens that ran k = 0, 1, ..., N.

    `foreground_ratio` is mean k on foreground over mean k on background tokens, where the data tells them apart.
    """

    name: str
    share: float
    tokens_by_k: tuple[int, ...]
    foreground_ratio: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForegroundUse:
    """Mean k on foreground over mean k on background, and the same after shuffling k over the places of an example.

    Every example counts alike, so that the shuffled ratio is 1 but for noise. `error`s are bootstrap standard errors.
    `of`: the places are patches of images, or frames of clips. In means of k every site counts alike; `macs` is the
    ratio of the learner MACs spent there, in which a site counts for what its learners cost, as it does in budgets.
    """

    on: float
    off: float
    ratio: float
    ratio_error: float
    shuffled: float
    shuffled_error: float
    examples: int
    of: Places = "patches"
    macs: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The model in one setting.

    reached: mean over examples of their MAC-weighted shares; pooled: share over all tokens together. MACs are of the
    whole model, per example: modelled by counting what ran, learners and gates included; `model_share` is their sum
    over the dense model's. `difference` is metric minus dense metric, paired over examples. `likeness`: how alike the
    dense model answers, 1 where it is the same.
    """

    reached: float
    pooled: float
    metric: float
    metric_error: float
    difference: Interval | None = None
    likeness: float | None = None
    model_share: float
    macs_mean: float
    macs_p5: float
    macs_p95: float
    per_site: tuple[SiteUse, ...] = ()
    foreground: ForegroundUse | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetResult(Result):
    """The gates at one budget: `asked` is the share of learner MACs asked for, `expected` the one that the table gives.

    `asked_as`: how it was asked for, such as "60%", where that was not a share.
    `over_fixed` is metric minus that of every token the same k at the share reached, paired over examples; None where
    no fixed k were run, or none enclose that share.
    """

    asked: float
    asked_as: str | None = None
    expected: float | None = None
    over_fixed: Interval | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedResult(Result):
    """The gates overruled: every token ran `k` learners, or its site's nearest bound."""

    k: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """All results on one data set; n examples from `groups` independent sources.

    `masked`: a padding mask was known, and padding counts nowhere. `dense_macs`: the dense model's on these examples,
    the mean. `subject` is equal for the same saved model on the same data set and task, None where that is not known.
    `left_out`: names of excluded examples, which count nowhere, by fault.
    """

    schema: int = SCHEMA
    metric: MetricResult
    budgets: tuple[BudgetResult, ...]
    fixed: tuple[FixedResult, ...] = ()
    n: int
    groups: int
    masked: bool
    model: str
    dense_macs: float
    date: str
    left_out: dict[str, tuple[str, ...]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    subject: str | None = None

    @property
    def names(self) -> dict[float, str]:
        """Name of each budget, by the share asked for; no two alike."""
        return budget_names(budget.asked for budget in self.budgets)

    def __str__(self) -> str:
        """The table that `acmc eval` prints."""
        return evaluation_table(self)

    def as_json(self) -> dict[str, Any]:
        """Plain data: metric, budgets, fixed k, and what they were measured on and with."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        """The same as text: what `eval.json` holds."""
        return json.dumps(self.as_json(), indent=1)

    @staticmethod
    def from_json(text: str) -> Evaluation:
        """The evaluation that `to_json` wrote; StorageError when it is something else or of another schema."""
        return _read_kept(Evaluation, text, what=_WHAT, again=_AGAIN)


Kept = TypeVar("Kept")


def load_kept(kind: type[Kept], path: Path, *, what: str, again: str) -> Kept | None:
    """The results that were measured and kept in `path`, None when there is no such file.

    StorageError, which begins with `what` they are, when they cannot be read. again: how they are measured again.
    """
    text = read_result(path, f"{what} that cannot be read", fix=f"check its permissions, or {again}")
    return None if text is None else _read_kept(kind, text, what=what, again=again, where=str(path))


def _read_kept(kind: Any, text: str, *, what: str, again: str, where: str | None = None) -> Any:
    """The results in `text`, a JSON document whose schema is the default of the kind's own field."""
    schema = kind.__dataclass_fields__["schema"].default
    try:
        document = parse_json(text)
    except ValueError:
        document = None
    found = document.get("schema") if isinstance(document, dict) else None
    if found != schema:
        expected = f"schema {schema}"
        what = f"{what} that cannot be read"
        raise StorageError(what, where=where, found=f"schema {found}", expected=expected, fix=again)
    return checked_json(kind, text, what=f"{what} with a wrong entry", where=where, fix=again)


def save_evaluation(directory: Path, evaluation: Evaluation, name: str = FILE) -> Path:
    """Write the file `name` into the directory, whole or not at all; returns its path. StorageError."""
    path = directory / name
    with storing(directory):
        directory.mkdir(parents=True, exist_ok=True)
    write_file(path, evaluation.to_json())
    return path


def load_evaluation(directory: Path, name: str = FILE) -> Evaluation | None:
    """The evaluation in the directory's file `name`, None when there is none; StorageError when it cannot be read."""
    return load_kept(Evaluation, directory / name, what=_WHAT, again=_AGAIN)


_SAME_DENSE = 1e-3  # other batch sizes round otherwise, and a prediction in a thousand may tip over
_SAME_MACS = 1e-2  # and what is done for padding cannot be told to the last MAC
_SAME_BUDGET = 6  # decimals


def joined(before: Evaluation, found: Evaluation) -> Evaluation | None:
    """`found` with the budgets and the k that only `before` holds; None where the two did not measure the same.

    Date and versions are those of `found`. What both hold is taken from `found`, unless it lacks today's dense model:
    the rows from before then say how far from it they are.
    """
    same_macs = math.isclose(before.dense_macs, found.dense_macs, rel_tol=_SAME_MACS)
    if _facts(before) != _facts(found) or not (same_macs and _same_dense(before.metric, found.metric)):
        return None
    compared = found.metric.dense_from not in (None, "recorded")
    first, last = (before, found) if compared else (found, before)
    budgets = {round(row.asked, _SAME_BUDGET): row for row in (*first.budgets, *last.budgets)}
    fixed = {row.k: row for row in (*first.fixed, *last.fixed)}
    return replace(
        found,
        metric=last.metric,
        budgets=tuple(row for _, row in sorted(budgets.items())),
        fixed=tuple(row for _, row in sorted(fixed.items())),
    )


def _facts(evaluation: Evaluation) -> tuple[object, ...]:
    e = evaluation
    measured_on = (e.n, e.groups, e.masked, e.left_out)
    return (e.subject, *measured_on, e.model, e.metric.name, e.metric.lower_is_better)


def _same_dense(before: MetricResult, found: MetricResult) -> bool:
    """True unless the dense model, where both have it, has another metric, as it has on other examples."""
    if before.dense is None or found.dense is None:
        return True
    return math.isclose(before.dense, found.dense, rel_tol=_SAME_DENSE, abs_tol=1e-9)
