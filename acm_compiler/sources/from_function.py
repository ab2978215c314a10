"""`python:package.module:function`: a function that returns a model, or a model and example inputs."""

from __future__ import annotations

from acm_compiler.recipe.models import ModelConfig
from acm_compiler.sources.built import Device, Found, check_arguments, expect_module
from acm_compiler.sources.from_python import find_function, run_function
from acm_compiler.sources.weights import load_own_file, refuse_names


def build(config: ModelConfig, *, weights: bool, device: Device) -> Found:
    """Call the function, whose model stays on the device that it chose: it may need values."""
    refuse_names(config)
    function = find_function(config.name)
    check_arguments(function, config)
    returned = run_function(config.name, function, config.args)
    model, example = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
    model = expect_module(model, config.name)
    if weights:
        load_own_file(model, config)
    return Found(model=model, example=None if example is None else lambda _: example)
