"""What recipes may already say, although this version cannot carry it out yet."""

from __future__ import annotations

from collections.abc import Iterator

from acm_compiler.recipe.datasets import kind_tag
from acm_compiler.recipe.document import Document, Path, Problem
from acm_compiler.recipe.schema import Recipe

TASKS = ("classify", "ctc", "embed", "causal_lm", "python")


def unavailable(recipe: Recipe, document: Document) -> Iterator[Problem]:
    """A problem for a task that only a later version can carry out."""
    if recipe.task is not None and kind_tag(recipe.task) not in TASKS:
        yield _later("task", recipe.task.kind, TASKS, ("task", "kind"), document)


def _later(what: str, name: str, known: tuple[str, ...], path: Path, document: Document) -> Problem:
    names = ", ".join(known).replace("python", "python:module:function")
    sentence = f"{what} {name!r} is not available in this version (available: {names})"
    return Problem(document.place_of_value(path), sentence)
