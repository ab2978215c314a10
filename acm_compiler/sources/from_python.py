"""Functions of the user's, named as `python:package.module:function`: found, called, and asked for a model."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

from acm_compiler.errors import UsageError, did_you_mean
from acm_compiler.recipe.models import ModelConfig
from acm_compiler.sources.builders import Device, Found, expect_module, load_own_file, refuse_names
from acm_compiler.sources.user_code import Attempt, failed, users_code

PREFIX = "python:"


def find_function(reference: str) -> Callable[..., Any]:
    """The callable that `python:package.module:function` names (dots after the second colon reach inside).

    UsageError says which part is missing, FunctionFailed what the module itself raises when it is imported.
    """
    module_name, _, path = reference.removeprefix(PREFIX).partition(":")
    attempt = Attempt()
    with attempt:
        module = importlib.import_module(module_name)
    error = attempt.error
    if isinstance(error, ModuleNotFoundError) and (module_name + ".").startswith(f"{error.name}."):
        raise UsageError(
            f"there is no module {error.name!r}",
            where=reference,
            fix="name it as Python imports it, package.module without .py"
            if module_name.endswith(".py")
            else "install its package, or run from (or add to PYTHONPATH) the folder that holds it",
        ) from error
    if error is not None:
        raise failed(reference, f"importing {module_name} raised", error)
    try:
        function = reduce(getattr, path.split("."), module)
    except AttributeError as error:
        hint = did_you_mean(path, vars(module))
        raise UsageError(
            f"module {module_name} has no {path!r}{hint}", where=reference, expected="package.module:function"
        ) from error
    if not callable(function):
        raise UsageError(
            "this is not a function", where=reference, found=type(function).__name__, expected="a callable"
        )
    return function


def call_function(reference: str, arguments: Mapping[str, Any]) -> Any:
    """Call the function with these keyword arguments. UsageError when it does not take them."""
    return run_function(reference, check_call(reference, arguments), arguments)


def check_call(reference: str, arguments: Mapping[str, Any]) -> Callable[..., Any]:
    """The function, which is not called. UsageError when it does not take these keyword arguments."""
    function = find_function(reference)
    try:
        takes = inspect.signature(function)
    except ValueError:  # some built-in classes do not say
        return function
    try:
        takes.bind(**arguments)
    except TypeError as error:
        raise UsageError(
            "the function does not take the recipe's args", where=reference, found=error, expected=f"args for {takes}"
        ) from error
    return function


def run_function(reference: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call `function`, named by `reference`; FunctionFailed, with the user's own frames, where it raises."""
    with users_code(reference, "the function raised"):
        return function(**arguments)


def build(config: ModelConfig, *, weights: bool, device: Device) -> Found:
    """Call the function, whose model stays on the device that it chose: it may need values."""
    refuse_names(config)
    function = check_call(config.name, config.args)
    returned = run_function(config.name, function, config.args)
    model, example = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
    model = expect_module(model, config.name)
    if weights:
        load_own_file(model, config)
    return Found(model=model, example=None if example is None else lambda _: example)
