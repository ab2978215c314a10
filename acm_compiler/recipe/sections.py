"""Single sections of a recipe, given outside of one: `--data`, `--task`, and what Python calls take in their place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from acm_compiler.errors import RecipeError, UsageError, did_you_mean
from acm_compiler.recipe.datasets import DataConfig
from acm_compiler.recipe.document import read_value
from acm_compiler.recipe.load import expand, unset_in
from acm_compiler.recipe.messages import wrong_values
from acm_compiler.recipe.tasks import TaskConfig

_EXAMPLES = {"data": "python:my_module:my_data, or '{kind: imagefolder, root: PATH}'", "task": "classify"}


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
        raise UsageError(f"the variable {name} is not set", where=where)
    return expand(found)


def _known_kinds(error: ValidationError) -> list[str] | None:
    """The kinds there are, where the error is that there is no such one."""
    tags = [detail["ctx"]["expected_tags"] for detail in error.errors() if detail["type"] == "union_tag_invalid"]
    return [tag.strip().strip("'") for tag in tags[0].split(",") if "python" not in tag] if tags else None
