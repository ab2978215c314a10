"""`shipped:NAME`: trained models that come with this package."""

from __future__ import annotations

import importlib
from typing import Any

from acm_compiler.errors import ModelSourceError, did_you_mean
from acm_compiler.recipe.lookup import SHIPPED
from acm_compiler.recipe.models import ModelConfig
from acm_compiler.sources.built import Device, Found, build_on, call_builder, load_own_file, refuse_names


def check(config: ModelConfig) -> None:
    """ModelSourceError for a name that no shipped model has."""
    if config.name not in SHIPPED:
        raise ModelSourceError(
            f"no model {config.name!r} is shipped{did_you_mean(config.name, SHIPPED)}", expected=", ".join(SHIPPED)
        )


def build(config: ModelConfig, *, weights: bool, device: Device) -> Found:
    """The shipped model `config.name`."""
    check(config)
    refuse_names(config)
    shipped: Any = getattr(importlib.import_module("acm_compiler.shipped.models"), config.name.upper())
    model = build_on(device, lambda: call_builder(shipped.build_model, config))
    if weights and config.weights == "default":
        shipped.load_weights(model)
    elif weights:
        load_own_file(model, config)
    return Found(model=model, example=lambda _: shipped.example_input())
