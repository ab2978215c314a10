"""GGUF files, found without opening more of them than their first bytes."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from acm_compiler.errors import ModelSourceError, UsageError, did_you_mean
from acm_compiler.recipe.load import installed_path
from acm_compiler.recipe.models import ModelConfig

SUFFIX = ".gguf"
_MAGIC = b"GGUF"


def gguf_file(model: ModelConfig) -> Path:
    """The GGUF file that `model` names. UsageError where it is not here, or is of another format."""
    folder = _folder(model.name)
    path = folder / str(model.gguf)
    if not path.is_file():
        files = sorted(str(found.relative_to(folder)) for found in folder.rglob(f"*{SUFFIX}"))
        raise ModelSourceError(
            f"there is no file {model.gguf!r}{did_you_mean(str(model.gguf), files)}",
            where=str(folder),
            expected=", ".join(files) or "a GGUF file in that folder",
        )
    check_magic(path)
    return path


def check_magic(path: Path) -> None:
    """ModelSourceError where the first bytes are not those of a GGUF file."""
    with path.open("rb") as file:
        start = file.read(len(_MAGIC))
    if start != _MAGIC:
        raise ModelSourceError(
            "this is no GGUF file",
            where=str(path),
            found="an empty file" if not start else f"a file that begins with {start!r}",
            expected=repr(_MAGIC),
            fix="download it again; where it is stored by Git LFS, git lfs pull fetches it",
        )


def is_found(model: ModelConfig) -> bool:
    """True where `gguf_file` finds the file."""
    try:
        gguf_file(model)
    except UsageError:
        return False
    return True


def is_here(model: ModelConfig) -> bool:
    """True where the folder or package is on this machine, and transformers' reader of GGUF is installed."""
    try:
        _folder(model.name)
    except UsageError:
        return False
    return find_spec("gguf") is not None


def _folder(name: str) -> Path:
    """The folder `name`, or that of the installed Python package `name`."""
    if Path(name).is_dir():
        return Path(name)
    if name.startswith("package:") or name.isidentifier():
        return Path(installed_path(name if ":" in name else f"package:{name}"))
    raise ModelSourceError(
        f"there is no folder {name!r}, and no Python package has such a name",
        fix="download the file, and give its folder; GGUF files are not fetched from the hub",
    )
