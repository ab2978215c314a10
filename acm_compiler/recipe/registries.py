"""The names that models have in registries, looked up without importing what they belong to."""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from acm_compiler.recipe import gguf
from acm_compiler.recipe.load import unset_in
from acm_compiler.recipe.models import ModelConfig

# each is a `ShippedModel` of acm_compiler/shipped/models.py, under its name in capitals
SHIPPED = ("digits_vit", "llama_docs", "modernbert_packages", "wav2vec2_digits")
REGISTRIES = ("torchvision", "timm")


def is_known(model: ModelConfig) -> bool:
    """True if a quick look finds the model that `model` names, its weights included, without loading the registry.

    Models of other sources count as found: they are files, functions and places that a recipe may be far from. A GGUF
    file is looked for where its folder or package is here.
    """
    if model.gguf:
        return bool(unset_in(model)) or gguf.is_found(model)
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


def is_installed(model: ModelConfig) -> bool:
    """True if the package that knows the names of such models is installed; for GGUF files, their folder and reader."""
    if model.gguf:
        return gguf.is_here(model)
    return model.source not in REGISTRIES or find_spec(model.source) is not None


@cache
def _sources(package: str) -> tuple[str, ...]:
    """The text of the package's files that define models."""
    spec = find_spec(package)
    places = spec.submodule_search_locations if spec is not None else None
    files = sorted(Path(places[0], "models").rglob("*.py")) if places else []
    return tuple(file.read_text(encoding="utf-8") for file in files)
