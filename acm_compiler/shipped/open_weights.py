"""Weights of the small models that come with this package, kept beside it as 8, 16 or 32 bit numbers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from acm_compiler.errors import StorageError

FOLDER = Path(__file__).parent / "weights"
# beside a matrix of 8 bit integers: what one of them is worth in each row
_SCALE = ".scale"


def load_shipped(model: nn.Module, path: Path, *, script: str) -> nn.Module:
    """`model` with the trained weights of `path`, in place and in its own precision; `script` is what made them.

    StorageError when they are missing or do not fit.
    """
    from safetensors.torch import load_file

    name = path.stem
    if not path.is_file():
        raise StorageError(
            f"the weights of {name} are missing",
            where=str(path),
            fix=f"reinstall acm_compiler, or train them: python -m scripts.train_shipped.{script} --out PATH",
        )
    try:
        _fill(model, unpacked(load_file(path)))
    except RuntimeError as error:
        raise StorageError(f"these are not the weights of {name}", where=str(path), found=error) from error
    return model


def packed(model: nn.Module) -> dict[str, Tensor]:
    """The weights of `model` in 8 bits where they are matrices, row by row, and in 16 bits else; shared ones once."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in _distinct(model).items():
        if tensor.dim() < 2 or not tensor.is_floating_point():
            tensors[name] = tensor.half() if tensor.is_floating_point() else tensor
            continue
        rows = tensor.float().flatten(1)
        scale = (rows.abs().amax(1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
        integers = (rows / scale[:, None]).round().clamp(-127, 127).to(torch.int8)
        tensors |= {name: integers.view_as(tensor), f"{name}{_SCALE}": scale}
    return tensors


def unpacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Floating tensors from those of `packed`; others as they are."""
    found = {}
    for name, tensor in tensors.items():
        if f"{name}{_SCALE}" in tensors:
            rows = tensor.float().flatten(1) * tensors[f"{name}{_SCALE}"][:, None]
            found[name] = rows.view_as(tensor)
        elif not name.endswith(_SCALE):
            found[name] = tensor
    return found


def round_as_packed(model: nn.Module) -> nn.Module:
    """`model`, in place, with the weights that are read back once they are packed."""
    _fill(model, unpacked(packed(model)))
    return model


def _distinct(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of `model` by name; of names for the same one the first."""
    by_place = {tensor.data_ptr(): (name, tensor) for name, tensor in reversed(model.state_dict().items())}
    return dict(by_place.values())


def _fill(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Write `tensors` into the model; RuntimeError unless they are all of its weights and nothing else."""
    state = model.state_dict()
    found = model.load_state_dict(tensors, strict=False)
    filled = {tensor.data_ptr() for name, tensor in state.items() if name in tensors}
    missing = [name for name in found.missing_keys if state[name].data_ptr() not in filled]
    if missing or found.unexpected_keys:
        raise RuntimeError(f"missing: {', '.join(missing)}; unknown: {', '.join(found.unexpected_keys)}")
