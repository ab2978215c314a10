"""Weights from a file of the user's."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from acm_compiler.errors import ModelSourceError, a_few_of
from acm_compiler.recipe.models import ModelConfig

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
    tensors = _read(Path(path))
    try:
        result = model.load_state_dict(tensors, strict=False)
    except RuntimeError as error:
        lines = str(error).splitlines()
        raise ModelSourceError("weights of other shapes", where=path, found=lines[-1].strip()) from error
    missing = _untied(model, result.missing_keys, given=tensors)
    if missing or result.unexpected_keys:
        raise ModelSourceError(
            "these weights belong to another model",
            where=path,
            found=f"missing: {a_few_of(missing) or 'none'}; unknown: {a_few_of(result.unexpected_keys) or 'none'}",
        )


def _untied(model: nn.Module, missing: Iterable[str], *, given: Iterable[str]) -> list[str]:
    """The missing names that share no weight with a given one: files keep tied weights once."""
    own = dict(model.named_parameters(remove_duplicate=False))
    filled = {id(own[name]) for name in given if name in own}
    return [name for name in missing if name not in own or id(own[name]) not in filled]


def _read(path: Path) -> Mapping[str, Any]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file as load_safetensors

    if not path.is_file():
        raise ModelSourceError("no such weights file", where=str(path))
    try:
        if path.suffix == ".safetensors":
            return load_safetensors(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        raise ModelSourceError("not a file of weights", where=str(path), found=str(error).splitlines()[0]) from error
    if not isinstance(state, Mapping):
        raise ModelSourceError("not a state_dict", where=str(path), found=type(state).__name__)
    return state


def unloadable(config: ModelConfig, found: str) -> ModelSourceError:
    """The refusal of a model whose own weights cannot be had, for the reason `found`."""
    return ModelSourceError(
        f"the weights of {config.source}:{config.name} cannot be loaded",
        found=found,
        fix="set weights: FILE, or weights: null for a random start",
    )
