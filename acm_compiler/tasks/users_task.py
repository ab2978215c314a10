"""A user's own object as a `Task`: what it leaves out is filled in; what it raises is told with the user's lines."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

from acm_compiler.tasks.base import Task, names_share
from acm_compiler.user_code import is_users, users_code

NEEDED = ("metric", "inputs", "mask", "score", "answer")
_OWN = ("metric", "loss", "score", "answer")


def as_task(given: Any, name: str | None = None) -> Task:
    """`given`, if it is a task of this package; else a task that is all as it is, with the defaults of `Task`.

    name: what built it, named in FunctionFailed where one of its methods raises; None leaves errors as they are.
    """
    return UsersTask(given, name) if is_users(given) else given


def missing_parts(given: Any, needed: Iterable[str]) -> list[str]:
    """The parts of a task that an object lacks; a subclass of `Task` has its inputs and its mask."""
    if isinstance(given, UsersTask):
        return missing_parts(given._given, needed)
    if isinstance(given, Task):
        return [part for part in needed if part in _OWN and getattr(type(given), part) is getattr(Task, part)]
    return [part for part in needed if not hasattr(given, part)]


class UsersTask(Task):
    """A user's object first, the defaults of `Task` where it has nothing of a name."""

    def __init__(self, given: Any, name: str | None) -> None:
        self._given, self._name = given, name

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(self._given, name):
            return object.__getattribute__(self, name)
        found = getattr(self._given, name)
        return functools.partial(_call, self._name and f"{self._name}: {name}", found) if callable(found) else found

    @property
    def is_share(self) -> bool:
        """As the name of the metric says."""
        return names_share(self.metric)

    @property
    def needs_dense(self) -> bool:
        """True if it remembers something of the dense model."""
        return hasattr(self._given, "remember")


def _call(name: str | None, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with nullcontext() if name is None else users_code(name, "the task raised"):
        return method(*args, **kwargs)
