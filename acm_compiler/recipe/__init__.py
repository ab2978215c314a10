"""Recipes: what a user decides about one conversion, read from YAML and checked with places.

`schema` holds every key and every default; `load_recipe` is the way in.
"""

from acm_compiler.recipe.load import (
    expand_paths,
    how_to_set,
    load_recipe,
    shipped_recipe,
    shipped_recipes,
    unset_variables,
)
from acm_compiler.recipe.models import InputConfig, ModelConfig
from acm_compiler.recipe.resolved import decisions, differences, recipe_hash, resolved_yaml
from acm_compiler.recipe.schema import Recipe

__all__ = [
    "InputConfig",
    "ModelConfig",
    "Recipe",
    "decisions",
    "differences",
    "expand_paths",
    "how_to_set",
    "load_recipe",
    "recipe_hash",
    "resolved_yaml",
    "shipped_recipe",
    "shipped_recipes",
    "unset_variables",
]
