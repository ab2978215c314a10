"""Other inputs for a model of the zoo: other values, another shape, another type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from acm_compiler.passes.capture.graph import tensors
from acm_compiler.sources.inputs import call_model
from acm_compiler.sources.user_code import Attempt
from tests.zoo.entry import Inputs
from tests.zoo.makers import VOCABULARY


def _mapped(inputs: Any, change: Callable[[str, Tensor], Tensor], name: str = "") -> Any:
    if isinstance(inputs, Tensor):
        return change(name, inputs)
    if isinstance(inputs, dict):
        return {key: _mapped(value, change, key) for key, value in inputs.items()}
    if isinstance(inputs, tuple):
        return tuple(_mapped(value, change, name) for value in inputs)
    return inputs


def varied(inputs: Inputs, *, seed: int) -> Inputs:
    """Inputs of the same shapes with other numbers, and with words in another order; masks and places stay."""
    generator = torch.Generator().manual_seed(seed)

    def change(name: str, tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():  # whole numbers are places or masks
            return torch.where(tensor == tensor.round(), tensor, torch.randn(tensor.shape, generator=generator))
        if name not in ("input_ids", "decoder_input_ids"):
            return tensor
        words = (tensor >= 5) & (tensor < VOCABULARY)  # special ones keep their place
        changed = tensor.clone()
        changed[words] = tensor[words][torch.randperm(int(words.sum()), generator=generator)]
        return changed

    return _mapped(inputs, change)


def cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """Inputs whose numbers have the type `dtype`."""
    return _mapped(inputs, lambda _, tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def other_shape(model: nn.Module, inputs: Inputs) -> Inputs:
    """Three examples, two words fewer, or both, whatever `model` takes; raises what it raises else."""
    batch = next(tensor.shape[0] for tensor in tensors(inputs) if tensor.dim())

    def three(_: str, tensor: Tensor) -> Tensor:
        return tensor[torch.arange(3) % batch] if tensor.dim() and tensor.shape[0] == batch else tensor

    def shorter(name: str, tensor: Tensor) -> Tensor:
        is_text = tensor.dim() == 2 and not tensor.is_floating_point()
        return tensor[:, :-2] if is_text and tensor.shape[1] > 4 else tensor

    larger = varied(_mapped(inputs, three), seed=7)
    others = [_mapped(larger, shorter), larger, _mapped(varied(inputs, seed=7), shorter)]
    for other in others[:-1]:
        attempt = Attempt()
        with attempt:
            call_model(model, other)
        if attempt.error is None:
            return other
    call_model(model, others[-1])
    return others[-1]
