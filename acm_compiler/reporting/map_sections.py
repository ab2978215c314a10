"""The page's load maps, and whether they follow what is in the pictures."""

from __future__ import annotations

from collections.abc import Mapping

from acm_compiler.evaluation.load_maps import LoadMaps
from acm_compiler.reporting.contents import Report
from acm_compiler.reporting.load_pictures import is_small, load_colours, picture_png
from acm_compiler.reporting.markup import Markup, image, tag
from acm_compiler.reporting.section_foreground import foreground_part
from acm_compiler.reporting.theme import load_scale

_STOPS = 9


def maps_section(report: Report) -> Markup:
    """Pictures beside their load maps at several budgets; a sentence instead where there are none."""
    maps = report.loads.maps
    if maps is None:
        return tag("section", tag("h2", "Where the learners run"), tag("p", _reason(report)), foreground_part(report))
    return tag(
        "section",
        tag("h2", "Where the learners run"),
        tag(
            "p",
            "Beside each picture, its patches in the colour of the mean share of learners that they ran (k / N), over "
            f"{_which(maps)}. All maps share one scale.",
        ),
        tag(
            "figure",
            tag("div", _grid(maps, report.evaluation.names), _scale(maps), class_="card"),
            tag("figcaption", _caption(report)),
        ),
        foreground_part(report),
    )


def _reason(report: Report) -> str:
    return f"There are no load maps in this report: {report.loads.missing or 'the model does not take pictures'}."


def _which(maps: LoadMaps) -> str:
    if maps.sites == maps.of_sites:
        return f"all {maps.sites} sites"
    return f"the {maps.sites} of {maps.of_sites} sites whose tokens have a place in the picture"


def _caption(report: Report) -> str:
    shown = list(report.loads.maps.loads) if report.loads.maps else []
    left_out = [b.asked for b in report.evaluation.budgets if b.asked not in shown and b.asked >= 1]
    return "At budget 1 every patch runs all learners, so it has no map." if left_out else ""


def _grid(maps: LoadMaps, names: Mapping[float, str]) -> Markup:
    head = tag("tr", tag("th", "picture", scope="col"), *(tag("th", names[b], scope="col") for b in maps.loads))
    rows = []
    for example in range(len(maps.pictures)):
        picture = maps.pictures[example]
        squares = "squares" if is_small(picture) else None
        cells = [tag("td", image(picture_png(picture), "png", f"example {example + 1}", class_=squares))]
        for budget, load in maps.loads.items():
            low, high = float(load[example].min()), float(load[example].max())
            alt = f"load map of example {example + 1} at budget {names[budget]}: k / N from {low:.2f} to {high:.2f}"
            cells.append(
                tag("td", image(picture_png(load_colours(maps, budget, example)), "png", alt, class_="squares"))
            )
        rows.append(tag("tr", *cells))
    return tag("table", tag("thead", head), tag("tbody", *rows), class_="maps")


def _scale(maps: LoadMaps) -> Markup:
    from matplotlib.colors import to_hex

    stops = ",".join(to_hex(load_scale()(i / (_STOPS - 1))) for i in range(_STOPS))
    low, high = maps.scale
    bar = tag("i", style=f"background:linear-gradient(90deg,{stops})")
    return tag("div", f"k / N = {low:.2f}", bar, f"{high:.2f}", class_="scale")
