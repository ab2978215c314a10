"""Two evaluations of one model on the same examples as one: every budget that either has measured."""

from __future__ import annotations

import math
from dataclasses import replace

from acm_compiler.evaluation.results import Evaluation, MetricResult

_SAME_DENSE = 1e-3  # other batch sizes round otherwise, and an answer in a thousand may tip over
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
    """Whether the dense model, where both have it, answered as well: else the examples were others."""
    if before.dense is None or found.dense is None:
        return True
    return math.isclose(before.dense, found.dense, rel_tol=_SAME_DENSE, abs_tol=1e-9)
