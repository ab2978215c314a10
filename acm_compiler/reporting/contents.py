"""Contents of a report, and HTML by construction: whatever is not `Markup` is escaped."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from html import escape

from acm_compiler.evaluation import wording
from acm_compiler.evaluation.find_loads import Loads
from acm_compiler.evaluation.results import BudgetResult, Evaluation
from acm_compiler.evaluation.times import Times
from acm_compiler.planning.plan import Plan

CLOSE = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The facts of one report.

    damages: the expected damage by site and k (`acm.sensitivity`), empty where the model was not calibrated.
    times: what `acmc bench` measured, if it did.
    """

    title: str
    description: str = ""
    evaluation: Evaluation
    plan: Plan
    damages: dict[str, dict[int, float]] = field(default_factory=dict)
    loads: Loads = field(default_factory=Loads)
    times: Times | None = None


def headline_budget(found: Evaluation) -> BudgetResult | None:
    """The cheapest budget close to the dense model, else the best one; None where no budget was measured."""
    close = [b for b in found.budgets if is_close(b, found)]
    if close:
        return min(close, key=lambda b: b.model_share)
    sign = -1 if found.metric.lower_is_better else 1
    return max(found.budgets, key=lambda b: sign * b.metric, default=None)


def is_close(budget: BudgetResult, found: Evaluation) -> bool:
    """Whether the metric is at most three points worse than the dense model's (3 % of it for what is no share)."""
    dense = found.metric.dense
    if dense is None:
        return False
    worse = budget.metric - dense if found.metric.lower_is_better else dense - budget.metric
    return worse <= CLOSE * (1 if wording.is_share(found.metric.name) else abs(dense))


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Child = str | None
_VOID = frozenset({"img", "meta", "source", "br", "hr"})


def tag(name: str, /, *children: Child, **attributes: str | int | None) -> Markup:
    """One element. Children and attribute values are escaped unless they are `Markup`; None is left out.

    A trailing underscore of an attribute's name is dropped (`class_`), others become hyphens (`aria_label`).
    """
    parts = [name]
    for key, value in attributes.items():
        if value is not None:
            parts.append(f'{key.rstrip("_").replace("_", "-")}="{escape(str(value))}"')
    head = f"<{' '.join(parts)}>"
    return Markup(head) if name in _VOID else Markup(f"{head}{join(*children)}</{name}>")


def join(*children: Child) -> Markup:
    """The children one after the other, those that are not `Markup` escaped."""
    return Markup("".join(child if isinstance(child, Markup) else _text(child) for child in children if child))


def _text(text: str) -> str:
    return escape(text).replace(" %", "\u00a0%")  # a number keeps its unit on its line


def table(headers: list[str], *groups: list[list[Child]], label: str, class_: str = "") -> Markup:
    """A table inside a box of its own that scrolls sideways; the first cell of a row names it.

    Groups of rows are set apart by a line; `label` says to those who cannot see it what the box holds.
    """
    head = tag("tr", *(tag("th", header, scope="col") for header in headers))
    bodies = [tag("tbody", *(_row(row) for row in rows)) for rows in groups if rows]
    whole = tag("table", tag("thead", head), *bodies)
    return tag("div", whole, class_=f"scroll {class_}".strip(), tabindex=0, role="region", aria_label=label)


def _row(cells: list[Child]) -> Markup:
    return tag("tr", tag("th", cells[0], scope="row"), *(tag("td", cell) for cell in cells[1:]))


def image(content: bytes, kind: str, alt: str, **attributes: str | int | None) -> Markup:
    """A picture embedded in the page; `kind` is png or svg+xml."""
    return tag("img", src=data_uri(content, kind), alt=alt, **attributes)


def data_uri(content: bytes, kind: str) -> str:
    """The content as an address that needs no request."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
