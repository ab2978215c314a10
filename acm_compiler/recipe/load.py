"""Load a recipe: read, override, check, and say everything that is wrong with it at once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path as FilePath

from pydantic import ValidationError

from acm_compiler.errors import RecipeError
from acm_compiler.recipe.document import Document, Problem, show_path
from acm_compiler.recipe.messages import find_problems
from acm_compiler.recipe.overrides import apply_overrides
from acm_compiler.recipe.reader import read_file
from acm_compiler.recipe.schema import VERSION, Origin, Recipe
from acm_compiler.recipe.shipped import shipped_recipe, shipped_recipes
from acm_compiler.recipe.variables import expand, fault, texts, unset_names

_FREE_TEXT = ("description", "resolved")


def load_recipe(path_or_name: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in a file or shipped under a name, with `overrides` such as `schedule[0].lr=1e-4`.

    Variables in paths stay as they are (`expand_paths`). RecipeError lists every fault with its place.
    """
    document = _read(os.fspath(path_or_name))
    problems = apply_overrides(document, overrides)
    recipe, faults = _check(document)
    problems += faults
    if problems or recipe is None:
        raise RecipeError(_in_order(problems))
    recipe._origin = Origin(document=document, overrides=tuple(overrides))
    return recipe


def expand_paths(recipe: Recipe, environment: Mapping[str, str] | None = None) -> Recipe:
    """`recipe` with every `${VAR}` and `~/` in its paths replaced; RecipeError for those that are not set."""
    problems = unset_variables(recipe, environment)
    if problems:
        raise RecipeError(_in_order(problems), fix=how_to_set(recipe, environment))
    return expand(recipe, os.environ if environment is None else environment)


def unset_variables(recipe: Recipe, environment: Mapping[str, str] | None = None) -> list[Problem]:
    """One entry per variable that a path needs and the environment lacks, with the place of that path."""
    known = os.environ if environment is None else environment
    document = recipe.origin.document
    return [
        Problem(document.place_of_value(path), f"${{{name}}} is not set ({show_path(path)} = {text!r})")
        for path, text, is_path in texts(recipe)
        if is_path
        for name in unset_names(text, known)
    ]


def how_to_set(recipe: Recipe, environment: Mapping[str, str] | None = None) -> str:
    """The remedy for variables that a recipe's paths need and the environment lacks."""
    known = os.environ if environment is None else environment
    names = [name for _, text, is_path in texts(recipe) if is_path for name in unset_names(text, known)]
    setting = " ".join(f"{name}=…" for name in dict.fromkeys(names))
    return f"set it in the environment, as the recipe's comments say (acmc recipes show): export {setting}"


def _read(path_or_name: str) -> Document:
    looks_like_file = path_or_name.endswith((".yaml", ".yml")) or os.sep in path_or_name
    if not looks_like_file and (path_or_name in shipped_recipes() or not os.path.exists(path_or_name)):
        file = shipped_recipe(path_or_name)
        return read_file(file, source=file.name)
    return read_file(FilePath(path_or_name), source=path_or_name)


def _check(document: Document) -> tuple[Recipe | None, list[Problem]]:
    version = document.data.get("acm")
    if isinstance(version, int) and version > VERSION:
        what = f"recipe format {version} is newer than this acm_compiler, which reads format {VERSION}"
        return None, [Problem(document.place_of_value(("acm",)), what)]
    try:
        recipe = Recipe.model_validate(document.data)
    except ValidationError as error:
        return None, find_problems(error, document, Recipe)
    return recipe, list(_variable_faults(recipe, document))


def _variable_faults(recipe: Recipe, document: Document) -> Iterator[Problem]:
    for path, text, is_path in texts(recipe):
        what = fault(text, is_path=is_path)
        if what is not None and path[0] not in _FREE_TEXT:
            yield Problem(document.place_of_value(path), f"{show_path(path)}: {what}")


def _in_order(problems: Sequence[Problem]) -> list[str]:
    ordered = sorted(problems, key=lambda problem: problem.place.order())
    return list(dict.fromkeys(str(problem) for problem in ordered))
