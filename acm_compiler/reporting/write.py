"""A report's files: the page, and its charts by themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from acm_compiler.evaluation import wording
from acm_compiler.evaluation.loads import ClipLoads
from acm_compiler.evaluation.results import Evaluation
from acm_compiler.evaluation.times import Times
from acm_compiler.files import storing, write_file
from acm_compiler.reporting.charts import clip_chart, cost_chart, k_chart
from acm_compiler.reporting.contents import Markup, Report, data_uri, image, tag
from acm_compiler.reporting.figures import DARK, LIGHT, as_png, as_svg, drawing, require_matplotlib, settle
from acm_compiler.reporting.load_pictures import load_chart
from acm_compiler.reporting.page import page
from acm_compiler.reporting.section_times import time_alt
from acm_compiler.reporting.time_chart import time_chart

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PHONE, _DARK = "(max-width:600px)", "(prefers-color-scheme:dark)"


def write_report(directory: Path, report: Report) -> Path:
    """Write `index.html` and the charts (PNG and SVG) into `directory`; returns the page's path.

    PackageMissing without matplotlib, StorageError where nothing can be written.
    """
    require_matplotlib()
    found, maps, clips = report.evaluation, report.loads.maps, report.loads.clips
    with drawing():
        files = _both("accuracy_over_cost", lambda: cost_chart(found, LIGHT))
        if found.budgets:
            files |= _both("learners_per_site", lambda: k_chart(found, LIGHT))
        if maps is not None:
            files |= _both("load_maps", lambda: load_chart(maps, LIGHT, found.names))
        if clips is not None:
            files |= _both("load_over_time", lambda: clip_chart(clips, LIGHT, found.names))
        if report.times is not None:
            times = report.times
            files |= _both("time_over_budget", lambda: time_chart(times, LIGHT))
        picture = _cost_picture(found, files["accuracy_over_cost.svg"])
        over_time = None if clips is None else _clip_picture(clips, found.names, files["load_over_time.svg"])
        timed = None if report.times is None else _time_picture(report.times, files["time_over_budget.svg"])
        files["index.html"] = page(report, picture, clip_picture=over_time, time_picture=timed).encode()
    with storing(directory):
        directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_file(directory / name, content)
    return directory / "index.html"


def _both(name: str, draw: Callable[[], Figure]) -> dict[str, bytes]:
    figure = draw()
    settle(figure)
    return {f"{name}.png": as_png(figure, LIGHT.surface), f"{name}.svg": as_svg(figure)}


def _cost_picture(found: Evaluation, wide_light: bytes) -> Markup:
    """The chart in four versions, of which a browser shows the one for its width and colours."""
    sources = [
        tag("source", media=media, srcset=data_uri(as_svg(cost_chart(found, theme, narrow=narrow)), "svg+xml"))
        for media, theme, narrow in (
            (f"{_PHONE} and {_DARK}", DARK, True),
            (_DARK, DARK, False),
            (_PHONE, LIGHT, True),
        )
    ]
    return tag("picture", *sources, image(wide_light, "svg+xml", _cost_alt(found)))


def _clip_picture(clips: ClipLoads, names: Mapping[float, str], light: bytes) -> Markup:
    dark = tag("source", media=_DARK, srcset=data_uri(as_svg(clip_chart(clips, DARK, names)), "svg+xml"))
    return tag("picture", dark, image(light, "svg+xml", f"load over time of {wording.count(len(clips.clips), 'clip')}"))


def _time_picture(times: Times, light: bytes) -> Markup:
    dark = tag("source", media=_DARK, srcset=data_uri(as_svg(time_chart(times, DARK)), "svg+xml"))
    return tag("picture", dark, image(light, "svg+xml", time_alt(times)))


def _cost_alt(found: Evaluation) -> str:
    name = found.metric.name
    points = "; ".join(
        f"budget {asked}: {wording.percent(b.model_share)} of the dense MACs, {wording.score(b.metric, name)}"
        for asked, b in zip(found.names.values(), found.budgets, strict=True)
    )
    return (
        f"{name} over the share of the dense model's MACs. {points}. Dense: {wording.score(found.metric.dense, name)}."
    )
