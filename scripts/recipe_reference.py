"""Write docs/recipe-reference.md from the schema of recipes: python scripts/recipe_reference.py"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from acm_compiler.recipe.resolved import recipe_json_schema

PAGE = Path(__file__).resolve().parent.parent / "docs" / "recipe-reference.md"
TAGS = ("kind", "phase")
HEAD = """# Recipe reference

Written by `python scripts/recipe_reference.py` from the schema; do not edit. `acmc validate FILE`
checks a recipe, `acmc recipes show NAME` prints a shipped one, `acmc schema` gives the JSON Schema
for editors.

A recipe is a YAML mapping. Unknown keys are refused, no value is turned into another type, and
paths may hold `${VAR}` and a leading `~/`; relative ones begin where `acmc` is started. A key
without a default must be given. A small complete one:

```yaml
acm: 1
name: tiny
model: {source: torchvision, name: vit_b_16, weights: null}
sites:
  - {match: mlp, learners: 4}
```
"""
BOUNDS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
PLAIN = {
    "integer": "whole number",
    "number": "number",
    "boolean": "true or false",
    "null": "null",
    "object": "mapping",
    "string": "text",
}


def page() -> str:
    """The whole page."""
    schema = recipe_json_schema()
    definitions = schema["$defs"]
    paths: dict[str, list[str]] = {}
    _collect(schema, "", definitions, paths)
    parts = [HEAD, _section("The recipe", schema, definitions, paths)]
    for name, where in paths.items():
        parts.append(_section(_heading(where, definitions[name]), definitions[name], definitions, paths))
    return "\n".join(parts)


def _collect(section: dict[str, Any], path: str, definitions: dict[str, Any], paths: dict[str, list[str]]) -> None:
    """The paths at which each section may stand, in the order of the recipe's keys."""
    for key, value in section["properties"].items():
        for name in _references(value):
            where = f"{path}.{key}".lstrip(".")
            if where not in paths.setdefault(name, []):
                paths[name].append(where)
                _collect(definitions[name], where, definitions, paths)


def _references(value: Any) -> list[str]:
    """The names of all sections that a value may be."""
    if isinstance(value, list):
        return [name for part in value for name in _references(part)]
    if not isinstance(value, dict):
        return []
    own = [value["$ref"].rpartition("/")[2]] if "$ref" in value else []
    return own + [name for key in ("anyOf", "oneOf", "items") for name in _references(value.get(key))]


def _heading(where: list[str], section: dict[str, Any]) -> str:
    tags = [f"{tag}: {_tag(section['properties'][tag])}" for tag in TAGS if tag in section["properties"]]
    return f"`{', '.join(where)}`" + "".join(f" with `{tag}`" for tag in tags)


def _tag(value: dict[str, Any]) -> str:
    return value.get("const", "python:module:function")


def _section(title: str, section: dict[str, Any], definitions: dict[str, Any], paths: dict[str, list[str]]) -> str:
    rows = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for key, value in section["properties"].items():
        if key in TAGS and _is_tag(value):
            continue
        default = "" if key in section.get("required", ()) else _shown(value.get("default", {}))
        meaning = " ".join(value.get("description", "").split())
        cells = [f"`{key}`", _kind(value, definitions, paths), default, meaning]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    text = "" if title == "The recipe" else " ".join(section.get("description", "").split()) + "\n\n"
    table = "\n".join(rows) + "\n" if len(rows) > 2 else ""
    return f"## {title}\n\n{text}{table}"


def _is_tag(value: dict[str, Any]) -> bool:
    return "const" in value or "pattern" in value


def _kind(value: dict[str, Any], definitions: dict[str, Any], paths: dict[str, list[str]]) -> str:
    """Values that a key may have, as text."""
    for union in ("anyOf", "oneOf"):
        if union in value:
            return " or ".join(dict.fromkeys(_kind(part, definitions, paths) for part in value[union]))
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        tags = [_tag(definitions[name]["properties"][tag]) for tag in TAGS if tag in definitions[name]["properties"]]
        return f"[{tags[0] if tags else 'section'}](#{_anchor(_heading(paths[name], definitions[name]))})"
    if "enum" in value or "const" in value:
        return " or ".join(f"`{one}`" for one in value.get("enum", [value.get("const")]))
    if value.get("type") == "array":
        return _list(value, definitions, paths)
    bounds = [f"{word} {value[bound]:g}" for bound, word in BOUNDS.items() if bound in value]
    examples = [f"such as {', '.join(f'`{e}`' for e in value['examples'])}"] if "examples" in value else []
    return ", ".join([PLAIN.get(value.get("type", ""), "any value"), *bounds, *examples])


def _list(value: dict[str, Any], definitions: dict[str, Any], paths: dict[str, list[str]]) -> str:
    if "prefixItems" in value:
        first = value["prefixItems"]
        return f"list of {len(first)}: {_kind(first[0], definitions, paths)}"
    return f"list of {_kind(value['items'], definitions, paths)}"


def _shown(default: Any) -> str:
    """A default as a recipe writes it; of a section only that it has its own."""
    if isinstance(default, dict):
        return "its defaults" if default else "`{}`"
    if isinstance(default, list) and any(isinstance(part, dict) for part in default):
        rules = ", ".join("{match: " + part["match"][0] + "}" for part in default)
        return f"`[{rules}]`"
    return f"`{json.dumps(default)}`"


def _anchor(heading: str) -> str:
    """The name that GitHub gives to a heading."""
    return "".join(c for c in heading.lower().replace(" ", "-") if c.isalnum() or c in "-_")


if __name__ == "__main__":
    PAGE.write_text(page())
