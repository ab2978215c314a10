"""A report's files: the page, and its charts by themselves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from acm_compiler.evaluation import wording
from acm_compiler.files import storing, write_file
from acm_compiler.reporting.charts import clip_chart, cost_chart, k_chart
from acm_compiler.reporting.contents import Image, Report, data_uri
from acm_compiler.reporting.figures import DARK, LIGHT, Theme, as_png, as_svg, drawing, require_matplotlib, settle
from acm_compiler.reporting.load_pictures import load_chart
from acm_compiler.reporting.page import page
from acm_compiler.reporting.summary import cost_alt
from acm_compiler.reporting.time_chart import time_alt, time_chart

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Draw = Callable[[Theme], "Figure"]
_PHONE, _DARK = "(max-width:600px)", "(prefers-color-scheme:dark)"


def write_report(directory: Path, report: Report) -> Path:
    """Write `index.html` and the charts (PNG and SVG) into `directory`; returns the page's path.

    PackageMissing without matplotlib, StorageError where nothing can be written.
    """
    require_matplotlib()
    files: dict[str, bytes] = {}
    with drawing():
        for name, draw in _charts(report).items():
            figure = draw(LIGHT)
            settle(figure)
            files |= {f"{name}.png": as_png(figure, LIGHT.surface), f"{name}.svg": as_svg(figure)}
        files["index.html"] = page(report, _pictures(report, files)).encode()
    with storing(directory):
        directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_file(directory / name, content)
    return directory / "index.html"


def _charts(report: Report) -> dict[str, Draw]:
    """The charts by the names of their files."""
    found, loads = report.evaluation, report.loads
    charts: dict[str, Draw] = {"accuracy_over_cost": partial(cost_chart, found)}
    if found.budgets:
        charts["learners_per_site"] = partial(k_chart, found)
    if loads.maps is not None:
        charts["load_maps"] = partial(load_chart, loads.maps, names=found.names)
    if loads.clips is not None:
        charts["load_over_time"] = partial(clip_chart, loads.clips, names=found.names)
    if report.times is not None:
        charts["time_over_budget"] = partial(time_chart, report.times)
    return charts


def _pictures(report: Report, files: dict[str, bytes]) -> dict[str, Image]:
    """The page's charts in several versions, of which a browser shows the one for its width and colours."""
    found, times, clips = report.evaluation, report.times, report.loads.clips
    alts = {"accuracy_over_cost": cost_alt(found)}
    if clips is not None:
        alts["load_over_time"] = f"load over time of {wording.count(len(clips.clips), 'clip')}"
    if times is not None:
        alts["time_over_budget"] = time_alt(times)
    charts = _charts(report)
    sources = {name: {_DARK: _svg(charts[name](DARK))} for name in alts}
    sources["accuracy_over_cost"] = {
        f"{_PHONE} and {_DARK}": _svg(cost_chart(found, DARK, narrow=True)),
        **sources["accuracy_over_cost"],
        _PHONE: _svg(cost_chart(found, LIGHT, narrow=True)),
    }
    return {name: Image(data_uri(files[f"{name}.svg"], "svg+xml"), alt, sources[name]) for name, alt in alts.items()}


def _svg(figure: Figure) -> str:
    return data_uri(as_svg(figure), "svg+xml")
