"""A built model with its example inputs and record, and the call of a builder with the recipe's `args`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from acm_compiler.errors import ModelSourceError
from acm_compiler.recipe.models import ModelConfig

Device = Literal["cpu", "meta"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A model as its source built it.

    `example` is a function that makes the example inputs the source knows of, `facts` what it adds to the record.
    """

    model: nn.Module
    example: Callable[[nn.Module], Any] | None = None
    facts: dict[str, Any] = field(default_factory=dict)


def build_on(device: Device, build: Callable[[], nn.Module]) -> nn.Module:
    """The model that `build` makes, on `device`; on meta no weight is ever drawn where the model allows it."""
    if device == "cpu":
        return build()
    try:
        with torch.device("meta"):
            model = build()
    except RuntimeError:  # its constructor reads the values of a tensor (NotImplementedError is one, too)
        model = build()
    _drop_values(model)  # also after the first way: torch.Tensor(n) in a constructor ignores the device context
    return model


def _drop_values(model: nn.Module) -> None:
    """Move `model` to meta in place; unlike `Module.to`, keep tied weights tied."""
    moved: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not parameter.is_meta:
                bare = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
                module._parameters[name] = cast(nn.Parameter, moved.setdefault(parameter, bare))
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = moved.setdefault(buffer, buffer.to("meta"))


# these load files or fetch from the network; `weights:` is the one place that says where weights come from
_RESERVED = ("weights", "weights_backbone", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path")


def call_builder(builder: Callable[..., Any], config: ModelConfig, **defaults: Any) -> Any:
    """Call `builder` with `config.args` and `defaults`; ModelSourceError when it does not take the args."""
    refuse_reserved(config)
    try:
        return builder(**defaults | config.args)
    except (TypeError, ValueError, AssertionError) as error:
        if not config.args:
            raise
        given = ", ".join(f"{key}={value!r}" for key, value in config.args.items())
        what = f"{config.source}:{config.name} cannot be built with args {given}"
        raise ModelSourceError(what, found=str(error) or type(error).__name__) from error


def check_arguments(function: Callable[..., Any], config: ModelConfig) -> None:
    """ModelSourceError when `function` cannot be called with `config.args`."""
    try:
        takes = signature(function)
    except ValueError:  # some built-in classes do not say
        return
    try:
        takes.bind(**config.args)
    except TypeError as error:
        what = f"{config.name} cannot be called with the recipe's args"
        raise ModelSourceError(what, found=str(error), expected=str(takes)) from error


def refuse_reserved(config: ModelConfig) -> None:
    """ModelSourceError when `args` would load weights behind the recipe's back."""
    for key in _RESERVED:
        if key in config.args:
            raise ModelSourceError(f"{key!r} does not belong into args", fix="say it by the key weights")


def expect_module(value: Any, where: str) -> nn.Module:
    """`value`, which must be a module."""
    if isinstance(value, nn.Module):
        return value
    raise ModelSourceError(
        "the function returned no model",
        where=where,
        found=type(value).__name__,
        expected="a torch.nn.Module, or a tuple (module, example_inputs)",
    )
