"""`acm.report`: an evaluation as one HTML page, laid out by page.html.j2, and its charts by themselves."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from torch import nn

from acm_compiler.calibration.recalibrate import known_damages
from acm_compiler.data.batch import size_of
from acm_compiler.errors import StorageError, UsageError, counted
from acm_compiler.evaluation.loads import Loads, find_loads
from acm_compiler.evaluation.results import Evaluation
from acm_compiler.files import folder_at, storing, write_file
from acm_compiler.passes.rewrite.conversion import conversion
from acm_compiler.reporting.charts import clip_chart, cost_chart, k_chart
from acm_compiler.reporting.comparison_chart import comparison_alt, comparison_chart, comparison_facts
from acm_compiler.reporting.contents import Image, Report, data_uri
from acm_compiler.reporting.figures import (
    DARK,
    FONT,
    LIGHT,
    Theme,
    as_png,
    as_svg,
    drawing,
    fix_layout,
    require_matplotlib,
    variables,
)
from acm_compiler.reporting.load_facts import foreground_facts, load_chart, map_facts, text_facts
from acm_compiler.reporting.page_facts import budget_table, cost_alt, cost_caption, headline, method_facts, site_facts
from acm_compiler.reporting.time_chart import time_alt, time_chart, time_facts
from acm_compiler.tasks import Task, batch_for, task_for

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def page(report: Report, pictures: Mapping[str, Image]) -> str:
    """The whole page around the charts by name; what users wrote is escaped."""
    found, loads = report.evaluation, report.loads
    return (
        environment()
        .get_template("page.html.j2")
        .render(
            report=report,
            found=found,
            metric=found.metric.name,
            font=Markup(FONT),
            light=variables(LIGHT),
            dark=variables(DARK),
            pictures=pictures,
            headline=headline(found),
            cost_caption=cost_caption(found),
            budgets=budget_table(found),
            times=time_facts(report.times) if report.times else None,
            comparison=comparison_facts(report.comparison) if report.comparison else None,
            texts=text_facts(loads.texts, found.names) if loads.texts is not None else None,
            images=map_facts(loads.maps, found) if loads.maps else None,
            speech_or_object=foreground_facts(found),
            sites=site_facts(report),
            method=method_facts(report),
        )
    )


def environment() -> Environment:
    """The page's templates, which escape whatever is not `Markup`."""
    return Environment(
        loader=PackageLoader("acm_compiler.reporting", ""),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_keep_units,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _keep_units(value: Any) -> Any:
    """A number keeps its unit on its line; `Markup` stays as it is."""
    return value.replace(" %", "\u00a0%") if isinstance(value, str) and not isinstance(value, Markup) else value


Draw = Callable[[Theme], "Figure"]
_PHONE, _DARK = "(max-width:600px)", "(prefers-color-scheme:dark)"


def write_report(directory: Path, report: Report) -> Path:
    """Write `index.html` and the charts (PNG and SVG) into `directory`; returns the page's path.

    PackageMissing without matplotlib, StorageError where nothing can be written or another page is there.
    """
    require_matplotlib()
    _refuse_others(directory / "index.html")
    files: dict[str, bytes] = {}
    with drawing():
        for name, draw in _charts(report).items():
            figure = draw(LIGHT)
            fix_layout(figure)
            files[f"{name}.png"] = as_png(figure, LIGHT.surface)
            files[f"{name}.svg"] = as_svg(figure, LIGHT.surface)
        files["index.html"] = page(report, _pictures(report, files)).encode()
    with storing(directory):
        directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_file(directory / name, content)
    return directory / "index.html"


def _refuse_others(page: Path) -> None:
    """StorageError where a page that no report wrote would be written over."""
    if page.is_file() and b"acm_compiler" not in page.read_bytes():
        raise StorageError("this page was not written by a report", where=str(page), fix="choose another folder")


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
    if report.comparison is not None:
        charts["methods_over_cost"] = partial(comparison_chart, report.comparison)
    return charts


def _pictures(report: Report, files: dict[str, bytes]) -> dict[str, Image]:
    """The page's charts in several versions, of which a browser shows the one for its width and colours."""
    found, times, clips = report.evaluation, report.times, report.loads.clips
    alts = {"accuracy_over_cost": cost_alt(found)}
    if clips is not None:
        alts["load_over_time"] = f"load over time of {counted(len(clips.clips), 'clip')}"
    if times is not None:
        alts["time_over_budget"] = time_alt(times)
    if report.comparison is not None:
        alts["methods_over_cost"] = comparison_alt(report.comparison)
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


_NO_EXAMPLES = "acm.report was given no examples"


def report(
    model: nn.Module,
    evaluation: Evaluation,
    directory: str | os.PathLike[str],
    *,
    examples: Any = None,
    task: Task | str | Mapping[str, Any] | None = None,
    title: str | None = None,
    description: str = "",
) -> Path:
    """Write `index.html`, one page that holds all it needs, and its charts (PNG and SVG) into `directory`.

    evaluation: what `acm.evaluate` found for this model.
    examples: a batch as `acm.evaluate` takes them, to show where the learners run: maps for images, and loads along
    clips or texts. task: what says how the model is called with them, as for `acm.evaluate`; None: by names.
    title: None for the name of the model's class.
    Returns the page's path. Raises PackageMissing without matplotlib, StorageError where nothing can be written.
    """
    owner = conversion(model)
    if not isinstance(evaluation, Evaluation):
        raise UsageError(
            "evaluation must be what acm.evaluate returned",
            found=f"the class {evaluation.__name__}" if isinstance(evaluation, type) else type(evaluation).__name__,
            expected="an Evaluation",
            fix="evaluation = acm.evaluate(model, batches, task=…)",
        )
    loads = Loads(missing=_NO_EXAMPLES)
    if examples is not None:
        unscored = None if task is not None else lambda _, batch: torch.zeros(size_of(batch))
        judge = task_for(task, unscored, model=model)
        loads = find_loads(model, evaluation, lambda: batch_for(judge, examples), judge)
    return write_report(
        folder_at(directory),
        Report(
            title=title or owner.plan.model.cls.rpartition(".")[2],
            description=description,
            evaluation=evaluation,
            plan=owner.plan,
            damages=known_damages(model),
            loads=loads,
        ),
    )
