"""`${VAR}` in the path-like values of a recipe."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel

from acm_compiler.recipe.document import KeyPath
from acm_compiler.recipe.fields import PathLike

Model = TypeVar("Model", bound=BaseModel)
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)\}")
_OPENED = re.compile(r"\$\{")


def texts(value: Any, path: KeyPath = (), *, is_path: bool = False) -> Iterator[tuple[KeyPath, str, bool]]:
    """Every text in a section: where it stands, what it says, whether variables may be used in it."""
    if isinstance(value, str):
        yield path, value, is_path
    elif isinstance(value, BaseModel):
        for name, field in type(value).model_fields.items():
            marked = any(isinstance(item, PathLike) for item in field.metadata)
            yield from texts(getattr(value, name), (*path, name), is_path=marked)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from texts(item, (*path, key), is_path=is_path)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from texts(item, (*path, index), is_path=is_path)


def fault(text: str, *, is_path: bool) -> str | None:
    """What is wrong with the variables that `text` names, whether or not they are set."""
    if not is_path and _VARIABLE.search(text):
        return f"{text!r}: ${{VAR}} may be used in paths only"
    if is_path and len(_OPENED.findall(text)) != len(_VARIABLE.findall(text)):
        return f"{text!r}: a variable is written ${{NAME}}"
    return None


def unset_names(text: str, environment: Mapping[str, str]) -> list[str]:
    """The variables in `text` that have no value."""
    return [name for name in _VARIABLE.findall(text) if not environment.get(name)]


def expand(value: Any, environment: Mapping[str, str], *, is_path: bool = False) -> Any:
    """`value` with every variable and leading `~/` of its path-like texts replaced; all variables must be set."""
    if isinstance(value, str):
        return _expand_text(value, environment) if is_path else value
    if isinstance(value, BaseModel):
        return _expand_section(value, environment)
    if isinstance(value, dict):
        return {key: expand(item, environment, is_path=is_path) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(expand(item, environment, is_path=is_path) for item in value)
    return value


def _expand_text(text: str, environment: Mapping[str, str]) -> str:
    text = _VARIABLE.sub(lambda match: environment[match[1]], text)
    return os.path.expanduser(text) if text.startswith("~/") else text


def _expand_section(section: Model, environment: Mapping[str, str]) -> Model:
    changed = {}
    for name, field in type(section).model_fields.items():
        marked = any(isinstance(item, PathLike) for item in field.metadata)
        changed[name] = expand(getattr(section, name), environment, is_path=marked)
    return section.model_copy(update=changed)
