"""GGUF files and tokenizers, found without opening more of them than their first bytes."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from acm_compiler.errors import DataError, ModelSourceError, UsageError, did_you_mean
from acm_compiler.recipe.load import PREFIX, installed_path
from acm_compiler.recipe.models import ModelConfig

SUFFIX = ".gguf"
_MAGIC = b"GGUF"


def gguf_file(model: ModelConfig) -> Path:
    """The GGUF file that `model` names. UsageError where it is not here, or is of another format."""
    folder = _folder(model.name)
    path = folder / str(model.gguf)
    if not path.is_file():
        files = _files_in(folder)
        raise ModelSourceError(
            f"there is no file {model.gguf!r}{did_you_mean(str(model.gguf), files)}",
            where=str(folder),
            expected=", ".join(files) or "a GGUF file in that folder",
        )
    _check_magic(path)
    return path


def tokenizer_file(where: str) -> Path:
    """The tokenizer.json or GGUF file that a recipe's `tokenizer` names.

    DataError where there is none, ModelSourceError for a GGUF file of another format.
    """
    path = Path(installed_path(where))
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        beside = _files_in(path.parent) if path.suffix == SUFFIX else []
        raise DataError(
            f"no tokenizer{did_you_mean(path.name, beside)}",
            where="data.tokenizer",
            found=str(path),
            expected="a tokenizer.json or a GGUF file",
        )
    if path.suffix == SUFFIX:
        _check_magic(path)
    return path


def place_is_here(where: str) -> bool:
    """True where the folder or package that would hold the file `where` is on this machine."""
    if where.startswith(PREFIX):
        return find_spec(where.removeprefix(PREFIX).partition("/")[0]) is not None
    return Path(where).parent.is_dir()


def _files_in(folder: Path) -> list[str]:
    return sorted(str(found.relative_to(folder)) for found in folder.rglob(f"*{SUFFIX}"))


def _check_magic(path: Path) -> None:
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
    if name.startswith(PREFIX) or name.isidentifier():
        return Path(installed_path(name if ":" in name else f"{PREFIX}{name}"))
    raise ModelSourceError(
        f"there is no folder {name!r}, and no Python package has such a name",
        fix="download the file, and give its folder; GGUF files are not fetched from the hub",
    )
