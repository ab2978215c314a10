"""What pydantic wanted of a value, in our words."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from acm_compiler.errors import nearest
from acm_compiler.recipe.document import show_value

_TYPES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "string_too_short": "some text",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}
_BOUNDS = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}


def wrong_values(error: ValidationError) -> list[str]:
    """`learners: found 0, expected at least 1` for every value that does not fit, outside of recipe files."""
    wishes: dict[tuple[str, str], list[str]] = {}
    sentences: dict[str, None] = {}
    for detail in error.errors(include_url=False):
        name, wish = _name(detail), expectation(detail)
        if wish is None:
            sentences[f"{name}{'missing' if detail['type'] == 'missing' else detail['msg']}"] = None
        else:
            wishes.setdefault((name, show_value(detail["input"])), []).append(wish)
    return [*(f"{name}found {found}, expected {either(wish)}" for (name, found), wish in wishes.items()), *sentences]


def either(wishes: list[str]) -> str:
    """What the members of a union wanted of one value, each wish once."""
    return " or ".join(dict.fromkeys(wishes))


def _name(detail: ErrorDetails) -> str:
    # neither positions in a repeated option's list nor pydantic's names of a union's members were typed
    name = ".".join(part for part in detail["loc"] if isinstance(part, str) and part.isidentifier())
    return f"{name}: " if name else ""


def expectation(detail: ErrorDetails) -> str | None:
    """What the value should have been; None when the fault is one of keys or kinds."""
    kind, context = detail["type"], detail.get("ctx", {})
    if kind in _BOUNDS:
        bound, word = _BOUNDS[kind]
        return f"{word} {context[bound]:g}"
    if kind == "literal_error":
        return f"{context['expected']}{_hint(detail['input'], context['expected'])}"
    if kind == "too_short":
        return f"at least {context['min_length']}"
    if kind == "string_pattern_mismatch":
        return "python:module:function"
    if kind == "expected":
        return str(context["what"])
    return _TYPES.get(kind)


def _hint(found: Any, expected: str) -> str:
    known = [word.strip("'") for word in expected.replace(" or ", ", ").split(", ")]
    alike = nearest(found, known, count=1) if isinstance(found, str) else []
    return f"; did you mean {alike[0]!r}?" if alike else ""
