"""Sentences for what pydantic finds wrong: in recipes with line, column and the nearest right word, and in JSON."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from acm_compiler.errors import StorageError, did_you_mean, nearest
from acm_compiler.recipe.document import Document, KeyPath, Problem, show_path, show_value


def find_problems(error: ValidationError, document: Document, schema: type[BaseModel]) -> list[Problem]:
    """One problem per fault, in the order of the file."""
    expected: dict[KeyPath, list[str]] = {}
    problems: list[Problem] = []
    details = [(_path_in(document.data, detail), detail) for detail in error.errors(include_url=False)]
    for path, detail in details:
        wish = expectation(detail)
        if wish is not None:
            expected.setdefault(path, []).append(wish)
        else:
            problems.append(_structural(detail, path, document, schema))
    for path, wishes in expected.items():
        others = [o for o, detail in details if o[: len(path)] == path and (o != path or expectation(detail) is None)]
        if others:
            continue  # a mapping was right there, and what is wrong with it is named
        found = show_value(_value_at(document.data, path))
        what = f"wrong value for {show_path(path)} (found {found}, expected {either(wishes)})"
        problems.append(Problem(document.place_of_value(path), what))
    return sorted(problems, key=lambda problem: problem.place.order())


def _path_in(data: Any, detail: ErrorDetails) -> KeyPath:
    """The document's path of an error: pydantic's location without the names of union members in it."""
    path: list[str | int] = []
    for part in detail["loc"]:
        if _holds(data, part):
            data = data[part]
            path.append(part)
    if detail["type"] == "missing":
        path.append(detail["loc"][-1])
    return tuple(path)


def _holds(data: Any, part: str | int) -> bool:
    if isinstance(data, list):
        return isinstance(part, int) and part < len(data)
    return isinstance(data, dict) and part in data


def _value_at(data: Any, path: KeyPath) -> Any:
    for part in path:
        data = data[part]
    return data


def _structural(detail: ErrorDetails, path: KeyPath, document: Document, schema: type[BaseModel]) -> Problem:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "missing":
        what = f"missing key {path[-1]!r} in {show_path(path[:-1])}"
        return Problem(document.place_of_value(path[:-1]), what)
    if kind == "extra_forbidden":
        return _unknown_key(path, _keys_of(schema, detail["loc"][:-1]), document)
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return _unknown_kind(kind, path, context, document)
    where = (*path, context["key"]) if "key" in context else path
    what = detail["msg"] if not path else f"{show_path(path)}: {detail['msg']}"
    return Problem(document.place_of_key(where), what)


def _unknown_key(path: KeyPath, known: list[str], document: Document) -> Problem:
    name = str(path[-1])
    hint = did_you_mean(name, known) or f" (known: {', '.join(known)})"
    return Problem(document.place_of_key(path), f"unknown key {name!r} in {show_path(path[:-1])}{hint}")


def _unknown_kind(kind: str, path: KeyPath, context: Mapping[str, Any], document: Document) -> Problem:
    """A section whose `phase` or `kind` is missing or names nothing."""
    key = "phase" if path[:1] == ("schedule",) else "kind"
    section = _value_at(document.data, path)
    if kind == "union_tag_invalid":
        known = [word.strip("'") for word in context["expected_tags"].split(", ")]
        known = ["python:module:function" if word == "python" else word for word in known]
        found = section[key]
        hint = did_you_mean(str(found), known)
        what = f"unknown {key} {found!r} in {show_path(path)}{hint}; known: {', '.join(known)}"
        return Problem(document.place_of_value((*path, key)), what)
    if isinstance(section, dict) and key not in section:
        typo = nearest(key, section, count=1)
        if typo:
            return _unknown_key((*path, typo[0]), [key], document)
        return Problem(document.place_of_value(path), f"missing key {key!r} in {show_path(path)}")
    found = section[key] if isinstance(section, dict) else section
    wish = "text" if isinstance(section, dict) else f"a mapping with the key {key!r}"
    where = (*path, key) if isinstance(section, dict) else path
    what = f"wrong value for {show_path(where)} (found {show_value(found)}, expected {wish})"
    return Problem(document.place_of_value(where), what)


def _keys_of(schema: type[BaseModel], location: tuple[str | int, ...]) -> list[str]:
    """The keys that the section at pydantic's `location` knows; a part of it may name a union's member."""
    sections = [schema]
    for part in location:
        if isinstance(part, int):
            continue
        fields = [section.model_fields[part] for section in sections if part in section.model_fields]
        if fields:
            sections = [inner for field in fields for inner in _sections_in(field.annotation)]
        else:
            sections = [section for section in sections if _is_member(section, part)]
    return [key for section in sections for key in section.model_fields]


def _sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _sections_in(part)


def _is_member(section: type[BaseModel], name: str) -> bool:
    """True if pydantic calls this member of a union so: by its tag, or class, as in `function-after[f(), Class]`."""
    if name.rstrip("]").endswith(section.__name__):
        return True
    tags = [section.model_fields[key].annotation for key in ("phase", "kind") if key in section.model_fields]
    return any(name in (get_args(tag) or ("python",)) for tag in tags)


_TYPES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a smaller whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "string_unicode": "text",
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
            sentences[f"{name}{_SHORT.get(detail['type'], detail['msg'].removeprefix('Value error, '))}"] = None
        else:
            wishes.setdefault((name, show_value(detail["input"])), []).append(wish)
    return [*(f"{name}found {found}, expected {either(wish)}" for (name, found), wish in wishes.items()), *sentences]


def either(wishes: list[str]) -> str:
    """The expectations of the members of a union for one value, each once."""
    return " or ".join(dict.fromkeys(wishes))


_PLAIN = ("int", "float", "str", "bool")
_SHORT = {"missing": "missing", "extra_forbidden": "unknown key"}


def _name(detail: ErrorDetails) -> str:
    # neither positions in a repeated option's list nor pydantic's names of a union's members were typed
    parts = (part for part in detail["loc"] if isinstance(part, str) and part.isidentifier() and part not in _PLAIN)
    name = ".".join(parts)
    return f"{name}: " if name else ""


def expectation(detail: ErrorDetails) -> str | None:
    """Expected value; None when the fault is one of keys or kinds."""
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
