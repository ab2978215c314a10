"""Inputs of a model: calls with them (a tensor, a tuple of arguments, a mapping of keyword arguments), and examples."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from acm_compiler.errors import UsageError

if TYPE_CHECKING:
    from acm_compiler.recipe.models import InputConfig


class ForwardEnded(BaseException):
    """Ends a forward at the last call that is of interest; a model's own `except Exception` lets it through."""


Inputs = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]
Example = tuple[Inputs, Tensor | None]
"""Inputs of one call, and the mask of its real tokens where one is known."""


def split_inputs(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`(args, kwargs)` of the call that `inputs` stand for."""
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    raise UsageError(
        "inputs must be a tensor, a tuple of arguments, or a mapping of keyword arguments",
        found=type(inputs).__name__,
    )


def refuse_labels(inputs: Inputs, *, planned: str) -> None:
    """Refuse a batch that passes what looks like labels as one more argument of the model. UsageError.

    planned: the shapes of the plan's example inputs, by commas. Labels are a tensor with one number per example, beyond
    as many arguments as the example had.
    """
    args, _ = split_inputs(inputs)
    known = len(planned.split(", "))
    batch = next((len(arg) for arg in args if isinstance(arg, Tensor) and arg.dim()), None)
    for place, arg in enumerate(args[known:], start=known + 1):
        if isinstance(arg, Tensor) and tuple(arg.shape) in ((batch,), (batch, 1)):
            raise UsageError(
                "a batch holds what looks like labels, which would go to the model as one more argument",
                found=f"argument {place} of {len(args)}: {str(arg.dtype).removeprefix('torch.')} {list(arg.shape)}",
                expected=f"what the plan's example had: {planned}",
                fix="leave labels out: (x for x, label in loader); or name what the model takes: {'x': x, 'other': y}",
            )


def call_model(model: nn.Module, inputs: Inputs) -> Any:
    """The model's output for `inputs`."""
    args, kwargs = split_inputs(inputs)
    return model(*args, **kwargs)


def by_name(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The same call of `module`, its positional arguments under the names that its forward gives them.

    What goes to a *args stays positional, and so does all of a call that the forward cannot take.
    """
    if not args:
        return args, kwargs
    try:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return args, kwargs
    rest: tuple[Any, ...] = ()
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            rest = value
        else:
            named |= value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    return rest, named


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Inside, the model is in train or eval mode; every module's own mode comes back."""
    before = [(module, module.training) for module in model.modules()]
    try:
        model.train(training)
        yield
    finally:
        for module, mode in before:
            module.training = mode


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
        raise UsageError(f"{text!r} is not a shape", expected="sizes such as 1x3x224x224, or 1x128:int for token ids")
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


TOKENS = 128
AUDIO_SECONDS = 10
DECODER_TOKENS = 32


def is_hf(model: nn.Module) -> bool:
    """True if `model` takes its inputs by transformers' names."""
    return isinstance(getattr(model, "main_input_name", None), str) and hasattr(model, "config")


def default_inputs(model: nn.Module) -> dict[str, Tensor] | None:
    """One example of a common size as keyword arguments; None for models that take something else."""
    config: Any = model.config
    name = model.main_input_name
    if name == "input_ids":
        longest = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or TOKENS
        return token_inputs(model, min(TOKENS, longest))
    if name == "pixel_values":
        return pixel_inputs(model)
    if name == "input_values":
        return named(model, torch.zeros(1, AUDIO_SECONDS * getattr(config, "sampling_rate", 16_000)))
    if name == "input_features" and hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):
        return named(model, torch.zeros(1, config.num_mel_bins, 2 * config.max_source_positions))
    return None


def token_inputs(model: nn.Module, tokens: int) -> dict[str, Tensor]:
    """A text of that many tokens, for encoder-decoders also as long a target."""
    return named(model, torch.ones(1, tokens, dtype=torch.int64), answer=tokens)


def pixel_inputs(model: nn.Module) -> dict[str, Tensor] | None:
    """An image of the size in the config (or in its vision part), a clip where it has frames."""
    config: Any = getattr(model.config, "vision_config", model.config)
    size = getattr(config, "image_size", None)
    if size is None:
        return None
    height, width = (size, size) if isinstance(size, int) else (size[0], size[-1])
    frames = [config.num_frames] if hasattr(config, "num_frames") else []
    return named(model, torch.zeros(1, *frames, getattr(config, "num_channels", 3), height, width))


def named(model: nn.Module, tensor: Tensor, *, answer: int = DECODER_TOKENS) -> dict[str, Tensor]:
    """`tensor` under the name of the model's main input, with a decoder's tokens where there is a decoder."""
    inputs = {str(model.main_input_name): tensor}
    if getattr(model.config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = torch.ones(1, answer, dtype=torch.int64)
    return inputs
