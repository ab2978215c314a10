"""The report as one HTML page, laid out by page.html.j2 from the facts prepared here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from acm_compiler.reporting import load_facts, method, site_table, summary, time_chart
from acm_compiler.reporting.contents import Image, Report
from acm_compiler.reporting.figures import DARK, FONT, LIGHT, variables


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
            headline=summary.headline(found),
            cost_caption=summary.cost_caption(found),
            budgets=summary.budget_table(found),
            times=time_chart.time_facts(report.times) if report.times else None,
            texts=load_facts.text_facts(loads.texts, found.names) if loads.texts else None,
            images=load_facts.map_facts(loads.maps, found) if loads.maps else None,
            speech_or_object=load_facts.foreground_facts(found),
            sites=site_table.site_facts(report),
            method=method.method_facts(report),
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
