"""The page's account of time: what `acmc bench` measured, beside the MACs."""

from __future__ import annotations

from acm_compiler.evaluation import wording
from acm_compiler.evaluation.times import BASE, OURS, Row, Times
from acm_compiler.reporting.contents import Child, Markup, table, tag


def times_section(times: Times, picture: Markup) -> Markup:
    """The chart of time over budget, its numbers, and what they were measured with."""
    return tag(
        "section",
        tag("h2", "Time over budget"),
        tag(
            "p",
            "The compiled model's time over that of the dense model compiled by Inductor, measured in turns in one "
            "process, beside the MACs that the learners, the gates and what stays dense took.",
        ),
        tag("figure", tag("div", picture, class_="card"), tag("figcaption", _caption(times))),
        _table(times),
    )


def _caption(times: Times) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in times.versions.items())
    machine = f"{times.device}, {wording.count(times.threads, 'thread')}, {times.clock}"
    return (
        f"Measured {times.date}: {machine}; {versions}. Bars: quartiles over rounds. {_break_even(times)} "
        "bench.json has all contenders."
    )


def _break_even(times: Times) -> str:
    if times.break_even_budget is None:
        return ""
    where = "at none of these batch sizes"
    if times.break_even_batch is not None:
        where = f"from batch {times.break_even_batch} on"
    return f"At budget {times.names[times.break_even_budget]} it is faster than the dense model {where}."


def _table(times: Times) -> Markup:
    names = times.names
    rows: list[list[Child]] = []
    for batch in sorted({row.batch for row in times.rows}):
        dense, ours = times.of(BASE, batch), {row.budget: row for row in times.of(OURS, batch)}
        cells = [_time(ours[budget]) if budget in ours else "" for budget in names]
        rows.append([str(batch), *(f"{row.time_ms:.3g} ms" for row in dense[:1]), *cells])
    headers = ["batch", "dense, Inductor", *(f"budget {name}" for name in names.values())]
    return table(headers, rows, label="time by batch size and budget", class_="wide")


def _time(row: Row) -> str:
    return f"{row.time_ms:.3g} ms ({wording.percent(row.ratio, 0)})"


def time_alt(times: Times) -> str:
    """The chart in words."""
    points = "; ".join(
        f"batch {row.batch}, budget {times.names[row.budget]}: {wording.percent(row.ratio, 0)} of the dense model's "
        f"time, {wording.percent(row.mac_ratio, 0)} of its MACs"
        for row in times.rows
        if row.contender == OURS and row.budget is not None
    )
    return f"time of the compiled model over budget. {points}."
