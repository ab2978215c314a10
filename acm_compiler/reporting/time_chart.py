"""The chart of time over budget: the compiled model's time beside its MACs, both over the dense model's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from acm_compiler.evaluation import wording
from acm_compiler.evaluation.times import OURS, Row, Times
from acm_compiler.reporting.figures import Theme, dress, load_scale, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SIZE = (7.2, 3.9)
_MARKERS = "osD^vP*X"


def time_chart(times: Times, theme: Theme) -> Figure:
    """One line per batch size with the quartiles of its rounds, and a dashed one for the MACs."""
    figure = new_figure(*_SIZE)
    axes = figure.add_subplot()
    dress(axes, theme)
    axes.grid(axis="y", color=theme.line, linewidth=0.8)
    axes.axhline(1, color=theme.muted, linewidth=1, linestyle=(0, (1, 2.5)), label="dense model, compiled by Inductor")
    batches = sorted({row.batch for row in times.rows})
    for place, batch in enumerate(batches):
        rows = times.of(OURS, batch)
        x, y = _budgets(rows), [row.ratio for row in rows]
        colour = load_scale()(0.15 + 0.7 * place / max(1, len(batches) - 1))
        marker = _MARKERS[place % len(_MARKERS)]
        axes.vlines(x, [r.ratio_q1 for r in rows], [r.ratio_q3 for r in rows], color=colour, alpha=0.35, linewidth=5)
        axes.plot(x, y, marker=marker, color=colour, linewidth=2, markersize=6, label=f"time, batch {batch}")
    macs = times.of(OURS, batches[-1])
    axes.plot(
        _budgets(macs), [row.mac_ratio for row in macs], "--", color=theme.fixed, label=f"MACs, batch {batches[-1]}"
    )
    axes.set_xlabel("budget (share of the learners' MACs)")
    axes.set_ylabel("over the dense model")
    # a round that something else disturbed must not flatten the lines: bars may be cut
    axes.set_ylim(0, 1.15 * max(1.0, *(row.ratio for row in times.rows if row.contender == OURS)))
    axes.yaxis.set_major_formatter(lambda y, _: wording.percent(y, 0))
    figure.legend(loc="outside upper left", ncols=3, frameon=False, labelcolor=theme.ink, fontsize=9)
    return figure


def _budgets(rows: list[Row]) -> list[float]:
    return [row.budget for row in rows if row.budget is not None]
