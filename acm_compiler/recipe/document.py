"""YAML text as plain data that knows the line and column of every key and value."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from acm_compiler.errors import RecipeError

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A spot in a file, lines and columns counted from 1; or, without a line, the `--set` option of that text."""

    source: str
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}:{self.column}"

    def order(self) -> tuple[bool, int, int, str]:
        """Sorts problems: the file from top to bottom, then the options."""
        return self.line is None, self.line or 0, self.column or 0, self.source


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault of a recipe."""

    place: Place
    what: str

    def __str__(self) -> str:
        return f"{self.place}: {self.what}"


@dataclass(slots=True, kw_only=True)
class Document:
    """A recipe as read, before anything is checked: nested dicts and lists, `places` by path."""

    source: str
    data: dict[str, Any]
    keys: dict[KeyPath, Place] = field(default_factory=dict)
    values: dict[KeyPath, Place] = field(default_factory=dict)

    def place_of_value(self, path: KeyPath) -> Place:
        """Place of the value at `path`, or of the nearest thing around it."""
        return self._nearest(self.values, path)

    def place_of_key(self, path: KeyPath) -> Place:
        """Place of the key that ends `path`, or of the nearest thing around it."""
        return self.keys[path] if path in self.keys else self.place_of_value(path)

    def _nearest(self, places: dict[KeyPath, Place], path: KeyPath) -> Place:
        for length in range(len(path), -1, -1):
            if path[:length] in places:
                return places[path[:length]]
        return Place(source=self.source, line=1, column=1)

    def forget(self, path: KeyPath) -> None:
        """Drop the places at and below `path`, whose text has been replaced."""
        for places in (self.keys, self.values):
            for known in [known for known in places if known[: len(path)] == path]:
                del places[known]


def show_path(path: KeyPath) -> str:
    """`schedule[0].lr`; `the recipe` for the empty path."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return "".join(parts).removeprefix(".") or "the recipe"


ABSENT = object()
"""Value of a key that one of two documents lacks."""


def differing(
    before: Any, after: Any, path: KeyPath = (), *, same: Callable[[Any, Any], bool] = operator.eq
) -> Iterator[tuple[KeyPath, Any, Any]]:
    """The smallest parts in which two documents of plain data differ, with their paths."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys([*before, *after]):
            yield from differing(before.get(key, ABSENT), after.get(key, ABSENT), (*path, key), same=same)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for i, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from differing(old, new, (*path, i), same=same)
    elif not same(before, after):
        yield path, before, after


def show_value(value: Any) -> str:
    """`value` as a recipe writes it, in a few words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


_TAG = "tag:yaml.org,2002:"
_SCALARS = frozenset(_TAG + name for name in ("str", "int", "float", "bool", "null"))
_CONTAINERS = frozenset(_TAG + name for name in ("map", "seq"))
_MERGE = _TAG + "merge"
# dates have no meaning in a recipe: `name: 2024-01-31` is text
_AS_TEXT = frozenset((_TAG + "timestamp",))
_MOST_VALUES = 20_000
_DEEPEST = 50


class _Composer(Composer):
    """Refuses what nests too deeply at its place; Python itself would give up without one, a little later."""

    _depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """One value with all that is inside it."""
        self._depth += 1
        if self._depth > _DEEPEST:
            mark = self.parser.peek_event().start_mark
            raise MarkedYAMLError(problem=f"nested more than {_DEEPEST} deep", problem_mark=mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


_UNREADABLE: dict[type[OSError], str] = {
    FileNotFoundError: "no such file",
    IsADirectoryError: "this is a folder, expected a YAML file",
}


def read_file(path: Path, *, source: str) -> Document:
    """The document in `path`; messages call it `source`. RecipeError when it cannot be read as one mapping."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError([f"{source}: must be UTF-8 text, got another byte at {error.start}"]) from error
    except OSError as error:
        what = _UNREADABLE.get(type(error), f"cannot be read ({error.strerror})")
        raise RecipeError([f"{source}: {what}"]) from error
    return read_text(text, source=source)


def read_text(text: str, *, source: str) -> Document:
    """The document that `text` holds. RecipeError listing syntax errors, doubled keys and unknown tags."""
    root = _compose(text, source)
    if root is None:
        raise RecipeError([f"{source}:1:1: the recipe is empty: it must begin with `acm: 1` and have a `model:`"])
    if not isinstance(root, MappingNode):
        raise RecipeError([f"{_place(source, root)}: expected a mapping of keys such as `name:` and `model:`"])
    walk = _Walk(source)
    data = walk.construct(root, ())
    if walk.problems:
        raise RecipeError([str(problem) for problem in sorted(walk.problems, key=lambda p: p.place.order())])
    return Document(source=source, data=data, keys=walk.keys, values=walk.values)


def read_value(text: str) -> Any:
    """The value that `text` stands for as the value of a key. RecipeError as for a file, without places."""
    walk = _Walk("")
    try:
        root = _compose(text, "")
    except RecipeError as error:
        raise RecipeError([what.partition(": ")[2] for what in error.problems]) from error
    value = walk.construct(root, ()) if root is not None else None
    if walk.problems:
        raise RecipeError([problem.what for problem in walk.problems])
    return value


def _compose(text: str, source: str) -> Node | None:
    yaml = YAML(typ="safe", pure=True)
    yaml.Composer = _Composer
    try:
        return yaml.compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source
        what = ", ".join(part for part in (error.context, error.problem) if part)
        line = text.splitlines()[mark.line : mark.line + 1] if mark else []
        hint = " (quote text with ${...} inside braces)" if "${" in "".join(line) else ""
        raise RecipeError([f"{where}: not valid YAML: {what}{hint}"]) from error
    except YAMLError as error:
        raise RecipeError([f"{source}: not valid YAML: {str(error).splitlines()[0]}"]) from error


def _place(source: str, node: Node) -> Place:
    return Place(source=source, line=node.start_mark.line + 1, column=node.start_mark.column + 1)


class _Walk:
    """One pass over the node graph: builds the data, notes the places, collects the faults."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.keys: dict[KeyPath, Place] = {}
        self.values: dict[KeyPath, Place] = {}
        self.problems: list[Problem] = []
        self._open: list[Node] = []
        self._count = 0
        self._scalars = YAML(typ="safe", pure=True).constructor

    def construct(self, node: Node, path: KeyPath) -> Any:
        """The data of `node`, which stands at `path`."""
        self.values[path] = _place(self.source, node)
        self._count += 1
        if any(node is outer for outer in self._open):
            return self._fault(node, "an alias that contains itself")
        if len(self._open) > _DEEPEST:
            return self._fault(node, f"nested more than {_DEEPEST} deep, by aliases")
        if self._count > _MOST_VALUES:
            raise RecipeError([f"{self.source}: more than {_MOST_VALUES} values; this is not a recipe"])
        if isinstance(node, ScalarNode):
            return self._scalar(node)
        if node.tag not in _CONTAINERS:
            return self._unknown_tag(node)
        self._open.append(node)
        if isinstance(node, MappingNode):
            data: Any = {}
            self._fill(data, node, path)
        else:
            data = [self.construct(item, (*path, index)) for index, item in enumerate(node.value)]
        self._open.pop()
        return data

    def _scalar(self, node: ScalarNode) -> Any:
        tag = str(node.tag)
        if tag in _AS_TEXT:
            return node.value
        if tag not in _SCALARS:
            return self._unknown_tag(node)
        try:
            return self._scalars.construct_object(node)
        except ValueError:
            return self._fault(node, f"not a value of type {tag.removeprefix(_TAG)}: {node.value!r}")

    def _fill(self, data: dict[str, Any], mapping: MappingNode, path: KeyPath, *, is_merged: bool = False) -> None:
        """Add the keys of a mapping; of one that `<<` names, those that `data` does not have itself."""
        merges = []
        for key_node, value_node in mapping.value:
            if key_node.tag == _MERGE:
                merges.append(value_node)
                continue
            key = self._key(key_node)
            if key is None:
                continue
            if key in data:
                if not is_merged:
                    self._fault(key_node, f"key {key!r} appears twice in one mapping")
                continue
            self.keys[(*path, key)] = _place(self.source, key_node)
            data[key] = self.construct(value_node, (*path, key))
            if value_node.start_mark.index == value_node.end_mark.index:  # `key:` alone: the parser is lines further
                self.values[(*path, key)] = self.keys[(*path, key)]
        for node in merges:
            self._merge(data, node, path)

    def _key(self, node: Node) -> str | None:
        key = self._scalar(node) if isinstance(node, ScalarNode) else None
        if isinstance(key, str):
            return key
        self._fault(node, "a key must be text")
        return None

    def _merge(self, data: dict[str, Any], node: Node, path: KeyPath) -> None:
        """`<<: *anchor`: keys of the anchor that `data` does not have itself."""
        mappings = node.value if isinstance(node, SequenceNode) else [node]
        for mapping in mappings:
            if not isinstance(mapping, MappingNode) or mapping in self._open:
                self._fault(mapping, "<< takes other mappings, one or a list of them")
                continue
            self._open.append(mapping)
            self._fill(data, mapping, path, is_merged=True)
            self._open.pop()

    def _unknown_tag(self, node: Node) -> None:
        tag = str(node.tag).replace(_TAG, "!!")
        self._fault(node, f"unknown tag {tag!r}; recipes hold plain values only")

    def _fault(self, node: Node, what: str) -> None:
        self.problems.append(Problem(_place(self.source, node), what))
