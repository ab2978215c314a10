"""`--set schedule[0].lr=1e-4`: change a recipe's document before it is checked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from acm_compiler.errors import RecipeError, did_you_mean
from acm_compiler.recipe.document import Document, KeyPath, Place, Problem, read_value, show_path, show_value

_PART = re.compile(r"(?:^|\.)([A-Za-z_][\w-]*)|\[(\d+)\]")
# a phase has one length: setting either key takes the place of the other
_REPLACES = {"steps": "epochs", "epochs": "steps"}


class _Unreachable(Exception):
    """The path of an override leads nowhere; the message says where it ends."""


def apply_overrides(document: Document, overrides: Sequence[str]) -> list[Problem]:
    """Write every `path=value` into `document`, in order; the problems of those that cannot be written."""
    problems = []
    for text in overrides:
        place = Place(source=f"--set {text}")
        try:
            path, value = parse_override(text)
            _write(document, path, value, place)
        except _Unreachable as error:
            problems.append(Problem(place, str(error)))
        except RecipeError as error:
            problems.extend(Problem(place, what) for what in error.problems)
    return problems


def parse_override(text: str) -> tuple[KeyPath, Any]:
    """The path and the value of `path=value`; the value is read as YAML."""
    left, equals, right = text.partition("=")
    if not equals:
        raise _Unreachable("expected key.path=value, such as schedule[0].lr=1e-4")
    return _parse_path(left.strip()), read_value(right)


def _parse_path(text: str) -> KeyPath:
    path: list[str | int] = []
    end = 0
    for match in _PART.finditer(text):
        if match.start() != end:
            break
        path.append(match[1] if match[1] is not None else int(match[2]))
        end = match.end()
    if end != len(text) or not path or isinstance(path[0], int):
        raise _Unreachable(f"{text!r} is not a path of keys, such as schedule[0].lr")
    return tuple(path)


def _write(document: Document, path: KeyPath, value: Any, place: Place) -> None:
    inner: Any = document.data
    for depth, part in enumerate(path[:-1]):
        here, after = path[: depth + 1], path[depth + 1]
        if isinstance(part, str) and isinstance(inner, dict) and inner.get(part) is None:
            if isinstance(after, int):
                raise _Unreachable(_no_list(inner, here))
            inner[part] = {}
            _claim(document, here, place)
        inner = _step(inner, part, here)
    _step(inner, path[-1], path, last=True)
    inner[path[-1]] = value
    _claim(document, path, place)
    _drop_other_length(document, inner, path)


def _step(inner: Any, part: str | int, here: KeyPath, *, last: bool = False) -> Any:
    """The value of `inner` at `part`; _Unreachable when it has no such place."""
    if isinstance(part, int):
        if not isinstance(inner, list):
            raise _Unreachable(f"{show_path(here[:-1])} is {show_value(inner)}, which has no entry [{part}]")
        if part >= len(inner):
            raise _Unreachable(f"{show_path(here[:-1])} has {len(inner)} entries, the last is [{len(inner) - 1}]")
        return inner[part]
    if not isinstance(inner, dict):
        raise _Unreachable(f"{show_path(here[:-1])} is {show_value(inner)}, which has no key {part!r}")
    return None if last else inner[part]


def _no_list(inner: dict[str, Any], here: KeyPath) -> str:
    name = str(here[-1])
    hint = did_you_mean(name, inner)
    remedy = "" if hint else f"; set it as a whole: {show_path(here)}=[...]"
    return f"the recipe has no list {show_path(here)}{hint}{remedy}"


def _claim(document: Document, path: KeyPath, place: Place) -> None:
    document.forget(path)
    document.keys[path] = document.values[path] = place


def _drop_other_length(document: Document, inner: Any, path: KeyPath) -> None:
    other = _REPLACES.get(str(path[-1]))
    if path[0] != "schedule" or len(path) != 3 or other is None or other not in inner:
        return
    if document.values[(*path[:-1], other)].line is not None:
        del inner[other]
        document.forget((*path[:-1], other))
