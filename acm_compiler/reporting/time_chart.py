"""Time over budget, charted and in numbers: the compiled model's beside its MACs, both over the dense model's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from acm_compiler.errors import counted
from acm_compiler.evaluation import wording
from acm_compiler.evaluation.times import BASE, OURS, Row, Times
from acm_compiler.reporting.contents import Cell, Table
from acm_compiler.reporting.figures import Theme, add_legend, new_plot, series_colours

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SIZE = (7.2, 3.9)
_MARKERS = "osD^vP*X"


def time_chart(times: Times, theme: Theme) -> Figure:
    """One line per batch size with the quartiles of its rounds, and a dashed one for the MACs."""
    figure, axes = new_plot(*_SIZE, theme)
    axes.axhline(1, color=theme.muted, linewidth=1, linestyle=(0, (1, 2.5)), label="dense model, compiled by Inductor")
    batches = sorted({row.batch for row in times.rows})
    for place, (batch, colour) in enumerate(zip(batches, series_colours(len(batches)), strict=True)):
        rows = times.of(OURS, batch)
        x, y = _budgets(rows), [row.ratio for row in rows]
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
    add_legend(figure, theme, columns=3)
    return figure


def _budgets(rows: list[Row]) -> list[float]:
    return [row.budget for row in rows if row.budget is not None]


def time_facts(times: Times) -> dict[str, Any]:
    """The numbers of the chart, and what they were measured with."""
    names = times.names
    rows: list[list[Cell]] = []
    for batch in sorted({row.batch for row in times.rows}):
        dense, ours = times.of(BASE, batch), {row.budget: row for row in times.of(OURS, batch)}
        timed = [ours.get(budget) for budget in names]
        cells = [f"{row.time_ms:.3g} ms ({wording.percent(row.ratio, 0)})" if row else "" for row in timed]
        rows.append([str(batch), f"{dense[0].time_ms:.3g} ms" if dense else "", *cells])
    headers = ["batch", "dense, Inductor", *(f"budget {name}" for name in names.values())]
    return {"caption": _caption(times), "table": Table("time by batch size and budget", headers, [rows], wide=True)}


def _caption(times: Times) -> str:
    machine = f"{times.device}, {counted(times.threads, 'thread')}, {times.clock}"
    return (
        f"Measured {times.date}: {machine}; {wording.versions_text(times.versions)}. "
        f"Bars: quartiles over rounds. {_break_even(times)} "
        "bench.json has all contenders."
    )


def _break_even(times: Times) -> str:
    if times.break_even_budget is None:
        return ""
    where = "at none of these batch sizes"
    if times.break_even_batch is not None:
        where = f"from batch {times.break_even_batch} on"
    return f"At budget {times.names[times.break_even_budget]} it is faster than the dense model {where}."


def time_alt(times: Times) -> str:
    """The chart in words."""
    points = "; ".join(
        f"batch {row.batch}, budget {times.names[row.budget]}: {wording.percent(row.ratio, 0)} of the dense model's "
        f"time, {wording.percent(row.mac_ratio, 0)} of its MACs"
        for row in times.rows
        if row.contender == OURS and row.budget is not None
    )
    return f"time of the compiled model over budget. {points}."
