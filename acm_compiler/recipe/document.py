"""A recipe's raw text as data, with the place of every key and value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A spot in a file, lines and columns counted from 1; or, without a line, the `--set` option of that text."""

    source: str
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}:{self.column}"

    def order(self) -> tuple[bool, int, int, str]:
        """Sorts problems: the file from top to bottom, then the options."""
        return self.line is None, self.line or 0, self.column or 0, self.source


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault of a recipe."""

    place: Place
    what: str

    def __str__(self) -> str:
        return f"{self.place}: {self.what}"


@dataclass(slots=True, kw_only=True)
class Document:
    """What a recipe says before anything is checked: nested dicts and lists, `places` by path."""

    source: str
    data: dict[str, Any]
    keys: dict[KeyPath, Place] = field(default_factory=dict)
    values: dict[KeyPath, Place] = field(default_factory=dict)

    def place_of_value(self, path: KeyPath) -> Place:
        """Where the value at `path` stands, or the nearest thing around it."""
        return self._nearest(self.values, path)

    def place_of_key(self, path: KeyPath) -> Place:
        """Where the key that ends `path` stands, or the nearest thing around it."""
        return self.keys[path] if path in self.keys else self.place_of_value(path)

    def _nearest(self, places: dict[KeyPath, Place], path: KeyPath) -> Place:
        for length in range(len(path), -1, -1):
            if path[:length] in places:
                return places[path[:length]]
        return Place(source=self.source, line=1, column=1)

    def forget(self, path: KeyPath) -> None:
        """Drop the places at and below `path`, whose text has been replaced."""
        for places in (self.keys, self.values):
            for known in [known for known in places if known[: len(path)] == path]:
                del places[known]


def show_path(path: KeyPath) -> str:
    """`schedule[0].lr`; `the recipe` for the empty path."""
    return "".join(_parts(path)).removeprefix(".") or "the recipe"


def _parts(path: KeyPath) -> Iterator[str]:
    for part in path:
        yield f"[{part}]" if isinstance(part, int) else f".{part}"


def show_value(value: Any) -> str:
    """`value` as a recipe writes it, in a few words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
