"""Functions of the user's, named in a recipe as `python:package.module:function`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

from acm_compiler.errors import UsageError, did_you_mean

PREFIX = "python:"


def find_function(reference: str) -> Callable[..., Any]:
    """The callable that `python:package.module:function` names (dots after the second colon reach inside).

    UsageError says which part is missing; a module's own ImportErrors of other modules are left as they are.
    """
    module_name, _, path = reference.removeprefix(PREFIX).partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise
        raise UsageError(
            f"there is no module {error.name!r}",
            where=reference,
            fix="install its package, or run from (or add to PYTHONPATH) the folder that holds it",
        ) from error
    try:
        function = reduce(getattr, path.split("."), module)
    except AttributeError as error:
        hint = did_you_mean(path, vars(module))
        raise UsageError(f"module {module_name} has no {path!r}{hint}", where=reference) from error
    if not callable(function):
        raise UsageError(
            "this is not a function", where=reference, found=type(function).__name__, expected="a callable"
        )
    return function


def call_function(reference: str, arguments: Mapping[str, Any]) -> Any:
    """What the function returns for these keyword arguments. UsageError when it does not take them."""
    function = find_function(reference)
    try:
        takes = inspect.signature(function)
    except ValueError:  # some built-in classes do not say
        return function(**arguments)
    try:
        takes.bind(**arguments)
    except TypeError as error:
        raise UsageError(
            "the function does not take the recipe's args", where=reference, found=error, expected=f"args for {takes}"
        ) from error
    return function(**arguments)
