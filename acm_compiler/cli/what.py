"""WHAT of `acmc plan WHAT`: a recipe or a model reference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acm_compiler.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from acm_compiler.recipe import ModelConfig, Recipe


def read_what(text: str, overrides: Sequence[str] = (), **settings: Any) -> Recipe | ModelConfig:
    """The recipe, or the model, that `text` names; `settings` are keys of a model that is named without a recipe.

    UsageError when it is neither, or for settings beside a recipe.
    """
    from acm_compiler.recipe import load_recipe, shipped_recipes
    from acm_compiler.sources.build import FORMS, parse_reference

    if text.endswith((".yaml", ".yml")) or text in shipped_recipes():
        if settings:
            raise UsageError(
                f"{', '.join(settings)} is for models", where=text, fix=f"use --set model.{next(iter(settings))}=…"
            )
        return load_recipe(text, overrides)
    if overrides:
        raise UsageError("--set changes recipes, and this is none", where=text)
    if ":" not in text and not Path(text).is_dir():
        hint = did_you_mean(text, shipped_recipes())
        expected = f"a recipe ({', '.join(shipped_recipes())}, FILE.yaml), {FORMS}"
        raise UsageError(f"{text!r} is neither a recipe nor a model reference{hint}", expected=expected)
    return parse_reference(text, **settings)
