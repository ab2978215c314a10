"""JSON that others wrote, checked as values by a schema of types: the first thing that does not fit is named."""

from __future__ import annotations

import functools
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from acm_compiler.errors import StorageError
from acm_compiler.recipe.document import show_path, show_value
from acm_compiler.recipe.messages import expectation

_KEYS = {
    "missing": "a key is missing",
    "missing_argument": "a key is missing",
    "missing_keyword_only_argument": "a key is missing",
    "extra_forbidden": "an unknown key",
    "unexpected_keyword_argument": "an unknown key",
}


def checked_json(schema: Any, text: str, *, what: str, where: str | None = None, fix: str | None = None) -> Any:
    """`text` as a value of type `schema`; StorageError that begins with `what` and names the first fault."""
    try:
        return _adapter(schema).validate_json(text, strict=True)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False)[0], what=what, where=where, fix=fix) from None


def wrong_entry(
    path: str, found: object, expected: str, *, what: str, where: str | None = None, fix: str | None = None
) -> StorageError:
    """The refusal of the entry at `path` of a JSON document."""
    return StorageError(f"{what}: {path}", where=where, found=show_value(found), expected=expected, fix=fix)


def _refusal(detail: ErrorDetails, *, what: str, where: str | None, fix: str | None) -> StorageError:
    kind, path = detail["type"], show_path(detail["loc"]) if detail["loc"] else "the document"
    if kind in _KEYS:
        return StorageError(f"{what}: {_KEYS[kind]}", where=where, found=path, fix=fix)
    return wrong_entry(path, detail["input"], expectation(detail) or detail["msg"], what=what, where=where, fix=fix)


@functools.cache
def _adapter(schema: Any) -> TypeAdapter:
    return TypeAdapter(schema)
