"""What a source hands back, and how it puts a model on a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

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
