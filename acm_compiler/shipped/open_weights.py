"""Weights of the small models that come with this package, kept beside it as 8, 16 or 32 bit numbers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from acm_compiler.errors import StorageError

FOLDER = Path(__file__).parent / "weights"
# beside a matrix of 8 bit integers: what one of them is worth in each row
SCALE = ".scale"


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
        fill(model, unpacked(load_file(path)))
    except RuntimeError as error:
        raise StorageError(f"these are not the weights of {name}", where=str(path), found=error) from error
    return model


def unpacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Floating tensors from integers and what these are worth; others as they are."""
    found = {}
    for name, tensor in tensors.items():
        if f"{name}{SCALE}" in tensors:
            rows = tensor.float().flatten(1) * tensors[f"{name}{SCALE}"][:, None]
            found[name] = rows.view_as(tensor)
        elif not name.endswith(SCALE):
            found[name] = tensor
    return found


def fill(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Write `tensors` into the model; RuntimeError unless they are all of its weights and nothing else."""
    state = model.state_dict()
    found = model.load_state_dict(tensors, strict=False)
    filled = {tensor.data_ptr() for name, tensor in state.items() if name in tensors}
    missing = [name for name in found.missing_keys if state[name].data_ptr() not in filled]
    if missing or found.unexpected_keys:
        raise RuntimeError(f"missing: {', '.join(missing)}; unknown: {', '.join(found.unexpected_keys)}")
