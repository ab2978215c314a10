"""The cost report as text: what a plan costs, kind by kind and budget by budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from tabulate import tabulate

from acm_compiler.errors import a_few_of, counted

if TYPE_CHECKING:
    from acm_compiler.planning.cost import CostReport, SiteCost
    from acm_compiler.planning.decisions import PlannedSite
    from acm_compiler.planning.plan import Plan
    from acm_compiler.site import Skip


BUDGETS = (0.25, 0.40, 0.60, 0.75, 1.00)
_CONVENTION = '1 MAC = 1 multiply-add = 2 FLOPs; papers\' "GFLOPs" are GMACs'
_SHOWN_REASONS = 6
_SAME = 5e-4
Row = Sequence[object]


def cost_table(
    report: CostReport, *, budgets: Iterable[float] = BUDGETS, per_site: bool = False, torch_macs: int | None = None
) -> str:
    """The whole report; `per_site` adds a row for every site, `torch_macs` a comparison with torch's own count."""
    parts = [_title(report.plan), _kinds_table(report)]
    if report.plan.sites:
        parts += [_budget_table(report, budgets), *_raised(report)]
    if per_site:
        parts.append(_site_table(report))
    if torch_macs is not None:
        parts.append(_check(report.plan.model.dense_macs, torch_macs))
    parts += _forms(report.plan)
    parts += [f"note: {note}" for note in report.plan.notes]
    parts += _left_dense(report.plan)
    return "\n".join(parts)


def _title(plan: Plan) -> str:
    source = plan.model.source
    name = f"{source['source']}:{source['name']}" if source else plan.model.cls
    tokens = max((site.tokens // plan.model.batch for site in plan.sites), default=0)
    example = f"{plan.model.inputs} -> {counted(tokens, 'token')}" if tokens else plan.model.inputs
    each = "MACs of one example; " if plan.model.batch > 1 else ""
    return f"{plan.model.cls.rpartition('.')[2]} ({name}), {example}      {each}{_CONVENTION}"


def _kinds_table(report: CostReport) -> str:
    plan, dense = report.plan, report.plan.model.dense_macs
    unit, scale = _per_example(plan)
    rows: list[Row] = []
    for kind, pairs in _by_kind(report):
        macs = sum(cost.dense_macs for _, cost in pairs)
        rows.append(
            [
                kind,
                len(pairs),
                _shapes(site for site, _ in pairs),
                f"{millions(sum(c.dense_params for _, c in pairs))} -> {millions(sum(c.acm_params for _, c in pairs))}",
                f"{macs / scale:.2f}",
                f"{sum(cost.learner_macs for _, cost in pairs) / scale:.2f}",
                f"{sum(cost.gate_macs for _, cost in pairs) / scale:.2f}",
                f"{macs / dense:.1%}",
            ]
        )
    kept = report.fixed_macs
    rows.append(["kept", "-", "", "", f"{kept / scale:.2f}", "-", "-", f"{kept / dense:.1%}" if dense else "-"])
    total_params = f"{millions(plan.model.dense_params)} -> {millions(report.acm_params)}"
    learners, gates = f"{report.learner_macs / scale:.2f}", f"{report.gate_macs / scale:.2f}"
    rows.append(["total", "", "", total_params, f"{dense / scale:.2f}", learners, gates, ""])
    headers = [
        "kind",
        "sites",
        "learners",
        "params dense -> acm",
        f"{unit} dense",
        "learners k=N",
        "gates",
        "share of model",
    ]
    return tabulate(rows, headers=headers, disable_numparse=True, colalign=("left", "right") + ("right",) * 6)


def _by_kind(report: CostReport) -> list[tuple[str, list[tuple[PlannedSite, SiteCost]]]]:
    order = ("mlp", "gated_mlp", "linear")
    pairs = sorted(zip(report.plan.sites, report.sites, strict=True), key=lambda pair: order.index(pair[0].kind))
    return [(kind, list(group)) for kind, group in groupby(pairs, key=lambda pair: pair[0].kind)]


def _shapes(sites: Iterable[PlannedSite]) -> str:
    shapes = sorted({(site.learners, site.width) for site in sites})
    shown = ", ".join(f"{n} x {width}" for n, width in shapes[:2])
    return shown if len(shapes) <= 2 else f"{shown}, and {len(shapes) - 2} more"


def _forms(plan: Plan) -> list[str]:
    """A line on the forms of the learners, once calibration has decided them."""
    fitted = [site for site in plan.sites if site.init == "auto"]
    if not any(site.kind == "linear" and site.form != "auto" for site in fitted):
        return []
    counts = Counter(f"{site.kind} {site.form if site.kind == 'linear' else site.second_layer}" for site in fitted)
    return ["forms: " + " · ".join(f"{form} x{count}" for form, count in counts.items())]


def _budget_table(report: CostReport, budgets: Iterable[float]) -> str:
    dense, batch = report.plan.model.dense_macs, report.plan.model.batch
    least = report.budget_min
    shown = [least, *(b for b in budgets if least < b <= 1)]
    unit, scale = unit_of(dense / batch)
    head = ["budget (share of learner MACs)", f"{least:.3f} (min)", *(f"{b:.2f}" for b in shown[1:])]
    macs = [f"model {unit} per example", *(f"{report.macs(b) / batch / scale:.2f}" for b in shown)]
    share = ["share of the dense model", *(f"{report.model_share(b):.0%}" for b in shown)]
    return tabulate([head, macs, share], tablefmt="plain", disable_numparse=True)


def _raised(report: CostReport) -> list[str]:
    """A line on what calibrate may make of the smallest budget, where one learner everywhere is above that."""
    least, one = report.budget_min, report.least_share(1)
    if one - least < _SAME:
        return []
    line = f"budgets below {one:.3f} let tokens run no learner"
    if all(site.init == "auto" for site in report.plan.sites):
        line += (
            f": calibrate keeps them within reach where they are asked for, else it may raise the lowest to {one:.3f}"
        )
    return [line]


def _site_table(report: CostReport) -> str:
    unit, scale = _per_example(report.plan)
    rows = [
        [
            site.name,
            site.kind + (f" ({site.role})" if site.role else ""),
            f"{site.learners} x {site.width}",
            f"{site.k_min}..{site.learners}",
            site.gate_width,
            f"{site.calls} x {site.tokens}",
            f"{cost.dense_macs / scale:.3f}",
            millions(cost.acm_params),
        ]
        for site, cost in zip(report.plan.sites, report.sites, strict=True)
    ]
    headers = ["site", "kind", "learners", "k", "gate", "calls x tokens", f"{unit} dense", "params"]
    return tabulate(rows, headers=headers, disable_numparse=True)


def _check(dense_macs: int, torch_macs: int) -> str:
    if torch_macs == dense_macs:
        return "check: torch's FlopCounterMode on the dense model agrees to the last MAC"
    difference = (dense_macs - torch_macs) / torch_macs if torch_macs else 1.0
    return f"check: torch's FlopCounterMode on the dense model finds {torch_macs:,} MACs ({difference:+.2%} here)"


def _left_dense(plan: Plan) -> list[str]:
    """Lines on what is not counted, and on what stays dense, with the reasons."""
    counted = ", ".join(f"{name} x{count}" for name, count in plan.model.not_counted.items())
    lines = [f"not counted: {counted or 'nothing'}"]
    if plan.kept:
        lines.append("kept dense: " + " · ".join(_by_reason(plan.kept)))
    kept = {entry.name for entry in plan.kept}
    return lines + [f"skipped: {text}" for text in _by_reason(skip for skip in plan.skipped if skip.name not in kept)]


def _by_reason(entries: Iterable[Skip]) -> list[str]:
    """A text for each of the first reasons, and one on how many more there are."""
    names: dict[str, list[str]] = {}
    for entry in entries:
        names.setdefault(entry.reason, []).append(entry.name)
    texts = [f"{a_few_of(found, 1)} ({reason})" for reason, found in names.items()]
    hidden = len(texts) - _SHOWN_REASONS
    return texts[:_SHOWN_REASONS] + ([f"{counted(hidden, 'more reason')}, see --json"] if hidden > 0 else [])


def _per_example(plan: Plan) -> tuple[str, float]:
    """The unit in which one example's MACs read best, and what the whole batch's are divided by for it."""
    unit, scale = unit_of(plan.model.dense_macs / plan.model.batch)
    return unit, scale * plan.model.batch


def unit_of(macs: float) -> tuple[str, float]:
    """The unit in which `macs` reads best, and its size."""
    for unit, scale in (("TMACs", 1e12), ("GMACs", 1e9), ("MMACs", 1e6)):
        if macs >= scale:
            return unit, scale
    return "kMACs", 1e3


def millions(params: int) -> str:
    """Parameters for people: 86.57 M."""
    return f"{params / 1e6:.2f} M" if params < 1e9 else f"{params / 1e9:.2f} B"
