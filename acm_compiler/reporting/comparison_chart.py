"""Quality over cost of several methods on one model, charted and in numbers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acm_compiler.errors import counted
from acm_compiler.evaluation import wording
from acm_compiler.evaluation.comparison import ACM, Comparison, MethodResult, basis, cells, headers, notes
from acm_compiler.files import write_file
from acm_compiler.reporting.contents import Cell, Table
from acm_compiler.reporting.figures import (
    LIGHT,
    Theme,
    add_legend,
    as_png,
    as_svg,
    drawing,
    fix_layout,
    mark_dense,
    new_plot,
    require_matplotlib,
    series_colours,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDE = (7.2, 5.0)
_MARKERS = "osD^vP*X<>hd"
_LINES: tuple[Any, ...] = ("-", "--", "-.", ":")
_SHOWN = 6.0  # times the loss of ACMs, and of the dense model's metric a part of


def comparison_chart(found: Comparison, theme: Theme) -> Figure:
    """The metric of every method over the MACs that it executed, 95 % intervals shaded; ACMs in front."""
    figure, axes = new_plot(*_WIDE, theme)
    others = [method for method in found.methods if method.name != ACM]
    for place, (method, colour) in enumerate(zip(others, series_colours(len(others), 0.1, 0.95), strict=True)):
        line, marker = _LINES[place % len(_LINES)], _MARKERS[place % len(_MARKERS)]
        _draw(axes, method, found, colour=colour, linestyle=line, marker=marker)
    for method in found.methods:
        if method.name == ACM:
            _draw(axes, method, found, colour=theme.fixed, linestyle="-", marker="o", linewidth=2.6, zorder=6)
    dense = found.metric.dense
    assert dense is not None
    mark_dense(axes, dense, theme)
    axes.set_ylim(*_bounds(found))
    axes.set_xlabel("MACs executed, share of the dense model")
    axes.set_ylabel(f"{found.metric.name} (measured)")
    axes.xaxis.set_major_formatter(lambda x, _: wording.percent(x, 0))
    if found.metric.is_share:
        axes.yaxis.set_major_formatter(lambda y, _: f"{100 * y:.4g} %")
    add_legend(figure, theme, columns=3, size=8)
    return figure


def _draw(axes: Axes, method: MethodResult, found: Comparison, *, colour: Any, **style: Any) -> None:
    rows, dense = sorted(method.rows, key=lambda row: row.cost.share), found.metric.dense
    assert dense is not None
    x = [row.cost.share for row in rows]
    low, high = [dense + row.difference.low for row in rows], [dense + row.difference.high for row in rows]
    axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.plot(
        x, [row.metric for row in rows], color=colour, label=short(method), markersize=5, **({"linewidth": 1.5} | style)
    )


def short(method: MethodResult) -> str:
    """A method's title without what it does."""
    return method.title.partition(":")[0]


def _bounds(found: Comparison) -> tuple[float, float]:
    """The part of the metric worth looking at: from the best to several times what ACMs lose, or what there is."""
    sign, dense = -1 if found.metric.lower_is_better else 1, found.metric.dense
    assert dense is not None
    values = [sign * row.metric for method in found.methods for row in method.rows]
    ours = [sign * row.metric for method in found.methods if method.name == ACM for row in method.rows]
    best = max(*values, sign * dense)
    lost = max(best - min(ours, default=best), 0.03 * abs(best))
    worst = max(min(values), best - _SHOWN * lost)
    pad = max(0.05 * (best - worst), 1e-6)
    low, high = sorted((sign * (worst - pad), sign * (best + pad)))
    return low, high


def write_chart(directory: Path, found: Comparison) -> None:
    """Write `compare.png` and `compare.svg`. PackageMissing without matplotlib, StorageError."""
    require_matplotlib()
    with drawing():
        figure = comparison_chart(found, LIGHT)
        fix_layout(figure)
        write_file(directory / "compare.png", as_png(figure, LIGHT.surface))
        write_file(directory / "compare.svg", as_svg(figure, LIGHT.surface))


def comparison_facts(found: Comparison) -> dict[str, Any]:
    """The numbers of the chart, and what they were measured with."""
    groups: list[list[list[Cell]]] = [
        [list(cells(found, method, row)) for method, row in found.at(budget)] for budget in found.budgets
    ]
    words = [
        f"Measured {found.date}: {wording.versions_text(found.versions)}, {counted(found.threads, 'thread')}.",
        f"{basis(found)}.",
    ]
    words += [f"{note}." for note in notes(found)]
    return {"caption": " ".join(words), "table": Table("methods by budget", headers(found), groups, wide=True)}


def comparison_alt(found: Comparison) -> str:
    """The chart in words."""
    points = "; ".join(
        f"{short(method)} {wording.score(row.metric, found.metric)} at {wording.percent(row.cost.share)}"
        for method in found.methods
        for row in method.rows
        if math.isfinite(row.metric)
    )
    return f"{found.metric.name} over MACs of the dense model. {points}."
