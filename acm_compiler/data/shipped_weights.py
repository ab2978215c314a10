"""Weights of the small models that come with this package, kept beside it as 16 or 32 bit numbers."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from acm_compiler.errors import StorageError

FOLDER = Path(__file__).parent / "weights"


def load_shipped(model: nn.Module, path: Path, *, script: str) -> nn.Module:
    """`model` with the trained weights of `path`, in place and in its own precision; `script` is what made them.

    StorageError when they are missing or do not fit.
    """
    from safetensors.torch import load_model

    name = path.stem
    if not path.is_file():
        raise StorageError(
            f"the weights of {name} are missing",
            where=str(path),
            fix=f"reinstall acm_compiler, or train them: python -m acm_compiler.data.{script} --out PATH",
        )
    try:
        load_model(model, path)
    except RuntimeError as error:
        raise StorageError(f"these are not the weights of {name}", where=str(path), found=error) from error
    return model
