"""Sections of the page with loads: maps over images, clips with their waveforms, texts with shaded tokens."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from acm_compiler.evaluation.load_maps import LoadMaps
from acm_compiler.evaluation.loads import Text, TextLoads
from acm_compiler.reporting.contents import Markup, Report, image, tag
from acm_compiler.reporting.figures import load_scale
from acm_compiler.reporting.load_pictures import is_small, load_colours, picture_png
from acm_compiler.reporting.sections import foreground_part

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


_SEQUENCE_STOPS = 9
_HEADING = "Where the learners run"


def clips_section(report: Report, picture: Markup) -> Markup:
    """The chart of load over time, and whether it follows what is said."""
    return tag(
        "section",
        tag("h2", _HEADING),
        tag(
            "p",
            "Each line is the share of learners (k / N) that a clip's frames ran, the mean over the sites, over its "
            "waveform.",
        ),
        tag("figure", tag("div", picture, class_="card")),
        foreground_part(report),
    )


def texts_section(report: Report, loads: TextLoads) -> Markup:
    """Texts whose tokens are shaded by load, at each budget."""
    low, high = _ends(loads)
    budgets = list(loads.texts[0].loads) if loads.texts else []
    parts = [
        tag("h3", f"Budget {report.evaluation.names[budget]}")
        + "".join(tag("p", *_shaded(text, budget, low, high), class_=_kind(text)) for text in loads.texts)
        for budget in budgets
    ]
    return tag(
        "section",
        tag("h2", _HEADING),
        tag(
            "p",
            "Each token is shaded by the share of learners that it ran (k / N), the mean over the sites. All shades "
            "are on one scale; point at a token for its number.",
        ),
        tag("div", _sequence_scale(low, high), *(Markup(part) for part in parts), class_="card"),
        foreground_part(report),
    )


def _ends(loads: TextLoads) -> tuple[float, float]:
    every: list[Tensor] = [load for text in loads.texts for load in text.loads.values() if len(load)]
    if not every:
        return 0.0, 1.0
    return min(float(load.min()) for load in every), max(float(load.max()) for load in every)


def _kind(text: Text) -> str:
    """Tokens stand apart, unless they say where words begin: then parts of a word stand together."""
    return "load words" if any(piece[:1].isspace() for piece in text.pieces) else "load"


def _shaded(text: Text, budget: float, low: float, high: float) -> list[str]:
    """The pieces on grounds of their loads, with blanks between words, so that text copied from here has them, too."""
    whole_words = _kind(text) == "load words"
    spans: list[str] = []
    for piece, load in zip(text.pieces, text.loads[budget].tolist(), strict=True):
        share = (load - low) / max(high - low, 1e-6)
        style = _on(load_scale()(share))
        if spans and (piece[:1].isspace() or not whole_words):
            spans.append(" ")
        spans.append(tag("span", piece.strip() or "·", style=style, title=f"{load:.2f}"))
    return spans


def _on(colour: tuple[float, float, float, float]) -> str:
    """A ground of that colour, and of black and white the one that stands out more from it (WCAG's contrast)."""
    from matplotlib.colors import to_hex

    red, green, blue = ((c / 12.92) if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour[:3])
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    ink = "#000" if (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05) else "#fff"
    return f"background:{to_hex(colour)};color:{ink}"


def _sequence_scale(low: float, high: float) -> Markup:
    from matplotlib.colors import to_hex

    stops = ",".join(to_hex(load_scale()(i / (_SEQUENCE_STOPS - 1))) for i in range(_SEQUENCE_STOPS))
    bar = tag("i", style=f"background:linear-gradient(90deg,{stops})")
    return tag("div", f"k / N = {low:.2f}", bar, f"{high:.2f}", class_="scale")
