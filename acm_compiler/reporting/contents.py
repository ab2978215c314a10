"""Facts of a report, and the pieces that the page's template lays out."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import NamedTuple

from acm_compiler.evaluation.comparison import Comparison
from acm_compiler.evaluation.loads import Loads
from acm_compiler.evaluation.results import Evaluation
from acm_compiler.evaluation.times import Times
from acm_compiler.planning.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The facts of one report.

    damages: the expected damage by site and k (`acm.sensitivity`), empty where the model was not calibrated.
    times: what `acmc bench` measured, if it did. comparison: what `acmc compare` found, if it did.
    """

    title: str
    description: str = ""
    evaluation: Evaluation
    plan: Plan
    damages: dict[str, dict[int, float]] = field(default_factory=dict)
    loads: Loads = field(default_factory=Loads)
    times: Times | None = None
    comparison: Comparison | None = None


class Bar(NamedTuple):
    """A stacked bar: its parts as (width, colour), the same in words, and a number below."""

    parts: list[tuple[str, str]]
    words: str
    share: str


Cell = str | Bar


class Table(NamedTuple):
    """A table that scrolls sideways in a box; the first cell of a row names it.

    Groups of rows are set apart by a line; `label` says to those who cannot see it what the box holds.
    """

    label: str
    headers: list[str]
    groups: list[list[list[Cell]]]
    wide: bool = False


class Image(NamedTuple):
    """An image as a data URI, others for a screen of certain `sources` (by media query), and its words."""

    source: str
    alt: str
    sources: dict[str, str] = {}  # noqa: RUF012 - never changed
    squares: bool = False


def data_uri(content: bytes, kind: str) -> str:
    """The content of an image as an address that needs no request; `kind` is png or svg+xml."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
