"""The page's answer to whether the load follows what is in a picture or a clip."""

from __future__ import annotations

from acm_compiler.evaluation import wording
from acm_compiler.evaluation.results import Evaluation, Places
from acm_compiler.reporting.contents import Report
from acm_compiler.reporting.markup import Child, Markup, table, tag

# of a place: what it is part of, what it shows, and what else there is
_WORDS: dict[Places, tuple[str, str, str]] = {
    "patches": ("picture", "object", "background"),
    "frames": ("clip", "speech", "silence"),
}


def foreground_part(report: Report) -> Markup | None:
    """Mean k on the object or speech, and off it, at every budget, with the shuffled control; None if not known."""
    rows = _rows(report.evaluation)
    if not rows:
        return None
    places = next(b.foreground.of for b in report.evaluation.budgets if b.foreground is not None)
    whole, what, other = _WORDS[places]
    text = (
        f"Mean k over {places} that hold {'a part of the object' if places == 'patches' else what}, against "
        f"{'the ' if places == 'patches' else ''}{other}. As a control, the same k are shuffled over the {places} of "
        f"each {whole}: then the ratio must be 1. ± is one standard error."
    )
    on = f"k on the {what}" if places == "patches" else f"k on {what}"
    headers = ["budget", on, f"k on {other}", "ratio", "ratio when shuffled"]
    return tag(
        "div",
        tag("h3", f"{what.capitalize()} against {other}"),
        tag("p", text),
        table(headers, rows, label=f"k on {what} and on {other}"),
    )


def _rows(found: Evaluation) -> list[list[Child]]:
    return [
        [
            found.names[b.asked],
            f"{b.foreground.on:.2f}",
            f"{b.foreground.off:.2f}",
            wording.ratio(b.foreground.ratio, b.foreground.ratio_error),
            wording.ratio(b.foreground.shuffled, b.foreground.shuffled_error),
        ]
        for b in found.budgets
        if b.foreground is not None and b.reached < 1
    ]
