"""The recipes that come with the package."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from acm_compiler.errors import RecipeError, StorageError, did_you_mean

_PACKAGE = Path(__file__).resolve().parents[1]


def recipes_folder() -> Path:
    """The folder of the shipped recipes: inside an installed package, beside the package in a checkout."""
    for folder in (_PACKAGE / "recipes", _PACKAGE.parent / "recipes"):
        if any(folder.glob("*.yaml")):
            return folder
    raise StorageError("the shipped recipes are missing", where=str(_PACKAGE / "recipes"), fix="reinstall acm_compiler")


@lru_cache(maxsize=1)
def shipped_recipes() -> dict[str, Path]:
    """Name -> file of every shipped recipe, in alphabetical order."""
    return {path.stem: path for path in sorted(recipes_folder().glob("*.yaml"))}


def shipped_recipe(name: str) -> Path:
    """The file of the shipped recipe `name`; RecipeError with the nearest name when there is none."""
    known = shipped_recipes()
    if name not in known:
        hint = did_you_mean(name, known)
        raise RecipeError([f"no recipe {name!r}{hint}; shipped: {', '.join(known)}, or give a YAML file"])
    return known[name]
