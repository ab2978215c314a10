"""Models, GGUF files, tokenizers and functions that recipes name, looked for without importing what holds them."""

from __future__ import annotations

import re
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from acm_compiler.errors import DataError, ModelSourceError, UsageError, did_you_mean
from acm_compiler.recipe.load import PREFIX, installed_path, unset_in
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
            "this is not a GGUF file",
            where=str(path),
            found="an empty file" if not start else f"a file that begins with {start!r}",
            expected=repr(_MAGIC),
            fix="download it again; where it is stored by Git LFS, git lfs pull fetches it",
        )


def _has_file(model: ModelConfig) -> bool:
    """True where `gguf_file` finds the file."""
    try:
        gguf_file(model)
    except UsageError:
        return False
    return True


def _has_place(model: ModelConfig) -> bool:
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


# each is a `ShippedModel` of acm_compiler/shipped, under its name in capitals
SHIPPED = ("digits_vit", "llama_docs", "modernbert_packages", "wav2vec2_digits")
REGISTRIES = ("torchvision", "timm")


def is_known(model: ModelConfig) -> bool:
    """True if a quick look finds the model that `model` names, its weights included, without loading the registry.

    Models of other sources count as found: they are files, functions and places that a recipe may be far from. A GGUF
    file is looked for where its folder or package is here.
    """
    if model.gguf:
        return bool(unset_in(model)) or _has_file(model)
    if model.source == "shipped":
        return model.name in SHIPPED
    if model.source not in REGISTRIES:
        return True
    name, dot, _ = model.name.partition(".")
    builder = re.compile(rf"^@register_model\b(?:.*\n)(?:@.*\n)*def {re.escape(name)}\(", re.MULTILINE)
    found = next((text for text in _sources(model.source) if builder.search(text)), None)
    if found is None or dot:
        return False
    return model.weights in (None, "default") or f"\n    {model.weights} = Weights(" in found


def is_defined(reference: str) -> bool:
    """True if a quick look finds the definition of `python:package.module:function` in its module's file.

    False is no answer: a module may import the function, or make it in another way.
    """
    module, _, name = reference.removeprefix("python:").partition(":")
    parts = module.split(".")
    spec = PathFinder.find_spec(parts[0])
    for i in range(2, len(parts) + 1):  # importlib.util.find_spec would import the packages around the module
        places = spec.submodule_search_locations if spec is not None else None
        spec = PathFinder.find_spec(".".join(parts[:i]), places) if places else None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return False
    definition = re.compile(rf"^(async def|def|class) {re.escape(name)}\b", re.MULTILINE)
    return definition.search(Path(spec.origin).read_text(encoding="utf-8", errors="replace")) is not None


def is_installed(model: ModelConfig) -> bool:
    """True if the package that knows the names of such models is installed; for GGUF files, their folder and reader."""
    if model.gguf:
        return _has_place(model)
    return model.source not in REGISTRIES or find_spec(model.source) is not None


@cache
def _sources(package: str) -> tuple[str, ...]:
    """The text of the package's files that define models."""
    spec = find_spec(package)
    places = spec.submodule_search_locations if spec is not None else None
    files = sorted(Path(places[0], "models").rglob("*.py")) if places else []
    return tuple(file.read_text(encoding="utf-8") for file in files)
