"""Two recipes side by side: which keys say something else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from acm_compiler.recipe.document import KeyPath, show_path

_ABSENT = object()


def differences(before: Any, after: Any) -> list[str]:
    """`schedule[0].lr: 0.001 -> 0.01` for every value that differs between two recipes as plain data."""
    return [f"{show_path(path)}: {_shown(old)} -> {_shown(new)}" for path, old, new in _pairs(before, after, ())]


def _pairs(before: Any, after: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any, Any]]:
    """The smallest parts that differ, with their paths."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys([*before, *after]):
            yield from _pairs(before.get(key, _ABSENT), after.get(key, _ABSENT), (*path, key))
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for i, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from _pairs(old, new, (*path, i))
    elif before != after:
        yield path, before, after


def _shown(value: Any) -> str:
    """A value in a few words; a phase, a data set or a task by its kind."""
    if value is _ABSENT:
        return "nothing"
    if isinstance(value, dict):
        return str(value.get("phase") or value.get("kind") or "a section")
    if isinstance(value, list):
        return f"[{', '.join(_shown(part) for part in value)}]"
    return "null" if value is None else str(value)
