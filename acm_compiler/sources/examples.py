"""Example inputs: what one call of a model looks like."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from acm_compiler.errors import UsageError
from acm_compiler.recipe.models import InputConfig
from acm_compiler.sources.hf_inputs import is_hf, named, token_inputs
from acm_compiler.sources.inputs import Inputs

_SPEC = re.compile(r"(\d+(?:x\d+)*)(?::(float|int))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """The shape of one plain tensor, batch axis included, as `--input 1x3x224x224` or `1x128:int` say it."""

    shape: tuple[int, ...]
    whole_numbers: bool | None = None


def parse_input(text: str) -> InputSpec:
    """The tensor that `text` describes; UsageError when it does not."""
    match = _SPEC.fullmatch(text)
    sizes = tuple(int(size) for size in match[1].split("x")) if match else ()
    if match is None or 0 in sizes:
        raise UsageError(f"{text!r} is no shape", expected="sizes such as 1x3x224x224, or 1x128:int for token ids")
    return InputSpec(shape=sizes, whole_numbers=None if match[2] is None else match[2] == "int")


def make_inputs(model: nn.Module, spec: InputConfig | InputSpec) -> Inputs:
    """Example inputs for `model` as `spec` says: by name for a transformers model, else one tensor."""
    if isinstance(spec, InputSpec):
        return _one_tensor(model, _plain(model, spec))
    if spec.image is not None:
        return _one_tensor(model, torch.zeros(1, *spec.image))
    if spec.audio_seconds is not None:
        return _one_tensor(model, torch.zeros(1, round(spec.audio_seconds * spec.sample_rate)))
    if spec.shape is not None:
        return _one_tensor(model, torch.zeros(1, *spec.shape))
    assert spec.tokens is not None  # the schema asks for exactly one kind
    return token_inputs(model, spec.tokens) if is_hf(model) else torch.ones(1, spec.tokens, dtype=torch.int64)


def fit_to(model: nn.Module, inputs: Any) -> Any:
    """`inputs` on the device of `model`, numbers in its precision."""
    parameter = next(model.parameters(), None)
    if isinstance(inputs, Tensor):
        if parameter is None:
            return inputs
        dtype = parameter.dtype if inputs.is_floating_point() and parameter.is_floating_point() else inputs.dtype
        return inputs.to(device=parameter.device, dtype=dtype)
    if isinstance(inputs, Mapping):
        return {key: fit_to(model, value) for key, value in inputs.items()}
    if isinstance(inputs, (tuple, list)):
        return tuple(fit_to(model, value) for value in inputs)
    return inputs


def _plain(model: nn.Module, spec: InputSpec) -> Tensor:
    whole = spec.whole_numbers
    if whole is None:
        whole = is_hf(model) and model.main_input_name == "input_ids"
    return torch.ones(spec.shape, dtype=torch.int64) if whole else torch.zeros(spec.shape)


def _one_tensor(model: nn.Module, tensor: Tensor) -> Inputs:
    if not is_hf(model):
        return tensor
    is_text = model.main_input_name == "input_ids"
    return named(model, tensor, answer=tensor.shape[1]) if is_text else named(model, tensor)
