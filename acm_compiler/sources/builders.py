"""Parts that the builders of all sources share: what they give, calls with `args` of recipes, weights of users."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from acm_compiler.errors import ModelSourceError, a_few_of
from acm_compiler.recipe.models import ModelConfig
from acm_compiler.sources.user_code import Attempt, first_line

Device = Literal["cpu", "meta"]
# what libraries raise for arguments, configs and files that do not fit
FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A model as its source built it.

    `example` is a function that makes the example inputs the source knows of, `facts` what it adds to the record.
    """

    model: nn.Module
    example: Callable[[nn.Module], Any] | None = None
    facts: dict[str, Any] = field(default_factory=dict)


def in_one_line(error: BaseException) -> str:
    """The message of what a library raised, of many lines perhaps, or as much of it as a line holds."""
    return " ".join(str(error).split())[:200]


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
        fix = "leave out of args what the builder does not take, or give it other values"
        raise ModelSourceError(what, found=str(error) or type(error).__name__, fix=fix) from error


def refuse_reserved(config: ModelConfig) -> None:
    """ModelSourceError when `args` would load weights behind the recipe's back."""
    for key in _RESERVED:
        if key in config.args:
            raise ModelSourceError(f"{key!r} does not belong in args", fix="use the key weights instead")


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


_FITTING = "give a file that this model's state_dict was saved to, or args that build the file's model"
SUFFIXES = (".safetensors", ".pt", ".pth")


def is_file(weights: str | None) -> bool:
    """True if `weights` means a file and not a name that a source knows."""
    return weights is not None and (weights.endswith(SUFFIXES) or os.sep in weights)


def load_own_file(model: nn.Module, config: ModelConfig) -> None:
    """Fill `model` from the file that `config.weights` names, if it names one."""
    if is_file(config.weights):
        load_file(model, str(config.weights))


def refuse_names(config: ModelConfig) -> None:
    """ModelSourceError when `config.weights` is a name, for a source that knows none."""
    if config.weights not in (None, "default") and not is_file(config.weights):
        raise ModelSourceError(
            f"{config.source} models have no weights named {config.weights!r}",
            expected="default, a file (.safetensors, .pt, .pth), or null for a random start",
        )


def load_file(model: nn.Module, path: str) -> None:
    """Fill `model`, in place, with the tensors in `path`; every name and shape must fit.

    ModelSourceError when the file is missing, is no weights file, or does not fit. Pickled code is never run.
    """
    fill(model, _read(Path(path)), where=path, fix=_FITTING)


def fill(model: nn.Module, tensors: Mapping[str, Any], *, where: str, fix: str) -> None:
    """Write `tensors` into the model, in place. ModelSourceError unless they are its weights, all and nothing else."""
    try:
        result = model.load_state_dict(tensors, strict=False)
    except RuntimeError as error:
        lines = str(error).splitlines()
        raise ModelSourceError("weights of other shapes", where=where, found=lines[-1].strip(), fix=fix) from error
    missing = _untied(model, result.missing_keys, given=tensors)
    if missing or result.unexpected_keys:
        raise ModelSourceError(
            "these weights belong to another model",
            where=where,
            found=f"missing: {a_few_of(missing) or 'none'}; unknown: {a_few_of(result.unexpected_keys) or 'none'}",
            fix=fix,
        )


def _untied(model: nn.Module, missing: Iterable[str], *, given: Iterable[str]) -> list[str]:
    """The missing names that share no weight with a given one: files keep tied weights once."""
    own = dict(model.named_parameters(remove_duplicate=False))
    filled = {id(own[name]) for name in given if name in own}
    return [name for name in missing if name not in own or id(own[name]) not in filled]


def _read(path: Path) -> Mapping[str, Any]:
    from safetensors.torch import load_file as load_safetensors

    if not path.is_file():
        raise ModelSourceError("no such weights file", where=str(path), expected="a .safetensors or .pt file")
    reading = Attempt()  # bytes that are no pickle may raise anything
    with reading:
        if path.suffix == ".safetensors":
            return load_safetensors(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    if (error := reading.error) is not None:
        raise ModelSourceError(
            "not a file of weights", where=str(path), found=first_line(error), expected="a state dict"
        ) from error
    if not isinstance(state, Mapping):
        fix = "save model.state_dict() in place of the model"
        raise ModelSourceError("not a state dict", where=str(path), found=type(state).__name__, fix=fix)
    return state


def unloadable(config: ModelConfig, found: str) -> ModelSourceError:
    """The refusal of a model whose own weights cannot be had, for the reason `found`."""
    return ModelSourceError(
        f"the weights of {config.source}:{config.name} cannot be loaded",
        found=found,
        fix="set weights: FILE, or weights: null for a random start",
    )
