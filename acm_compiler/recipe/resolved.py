"""Recipes written out: complete with defaults, versions and hash; their differences; their JSON Schema."""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import json
import platform
from collections.abc import Sequence
from typing import Any

from pydantic.json_schema import GenerateJsonSchema
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.representer import BaseRepresenter

from acm_compiler.recipe.document import ABSENT, differing, show_path
from acm_compiler.recipe.fields import Every
from acm_compiler.recipe.schema import Recipe, Resolved

# what may change between an interrupted run and its continuation, as far as its state does not say otherwise
_HOW = {"workers", "save_every", "eval_every", "eval_batch", "sharded"}
_ACCEPTED = {"max_broken": True}  # of data: raised, it must not cost a night's training its continuation
_NO_DECISION: dict[str, Any] = {
    "resolved": True,
    "description": True,
    "expect": True,
    "run": _HOW,
    "data": {"train": _ACCEPTED, "eval": _ACCEPTED},
}
VERSIONED = ("acm_compiler", "torch", "torchvision", "transformers", "timm")


def decisions(recipe: Recipe) -> dict[str, Any]:
    """The decisions that make the model, as plain data: equal in any order of keys, and however it is run."""
    return recipe.model_dump(mode="json", exclude=_NO_DECISION)


def recipe_hash(recipe: Recipe) -> str:
    """Equal for recipes that lead to the same model."""
    return hashlib.sha256(json.dumps(decisions(recipe), sort_keys=True).encode()).hexdigest()


def resolve(recipe: Recipe) -> Recipe:
    """`recipe` with its section `resolved` filled in."""
    resolved = Resolved(
        recipe=recipe.origin.document.source,
        overrides=recipe.origin.overrides,
        versions=measured_with((*VERSIONED, "accelerate")),
        hash=recipe_hash(recipe),
    )
    return recipe.model_copy(update={"resolved": resolved})


def resolved_yaml(recipe: Recipe) -> str:
    """The text of a run's `recipe.yaml`; it can be loaded like any recipe and then says the same."""
    yaml = YAML()
    yaml.width = 110
    yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.representer.add_representer(type(None), _null)
    stream = io.StringIO()
    stream.write("# the recipe of this run, complete: defaults and --set values are written out\n")
    data = resolve(recipe).model_dump(mode="json")
    yaml.dump(_styled(data), stream)
    return stream.getvalue()


def installed_versions(distributions: Sequence[str] = VERSIONED) -> dict[str, str]:
    """Versions of the distributions that are installed; by default of what takes part in a measurement."""
    return {name: version for name in distributions if (version := installed_version(name)) is not None}


def measured_with(distributions: Sequence[str] = VERSIONED) -> dict[str, str]:
    """The same with the version of Python."""
    return {"python": platform.python_version(), **installed_versions(distributions)}


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, without importing it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _null(representer: BaseRepresenter, _: None) -> Any:
    return representer.represent_scalar("tag:yaml.org,2002:null", "null")


def _styled(value: Any) -> Any:
    """`value` with lists of plain values on one line and the key that says what a section is in front."""
    if isinstance(value, dict):
        first = sorted(value.items(), key=lambda item: item[0] not in ("phase", "kind"))
        styled = CommentedMap((key, _styled(item)) for key, item in first)
        if not value:
            styled.fa.set_flow_style()
        return styled
    if isinstance(value, list):
        sequence = CommentedSeq(_styled(item) for item in value)
        if not any(isinstance(item, (dict, list)) for item in value):
            sequence.fa.set_flow_style()
        return sequence
    return value


_TOLD = 8


def differences(before: Any, after: Any) -> list[str]:
    """`schedule[0].lr: 0.001 -> 0.01` for every value that differs between two recipes as plain data.

    A key that one of them lacks was not known to the version that wrote it: it is null there.
    """
    found = differing(before, after, same=lambda old, new: old == new or all(v in (ABSENT, None) for v in (old, new)))
    return [f"{show_path(path)}: {_shown(old)} -> {_shown(new)}" for path, old, new in found]


def first_differences(before: Any, after: Any) -> str:
    """The first eight differences, one a line, for a message; empty where there are none."""
    changed = differences(before, after)
    more = [f"and {len(changed) - _TOLD} more"] if len(changed) > _TOLD else []
    return "\n  ".join([*changed[:_TOLD], *more])


def _shown(value: Any) -> str:
    """A value in a few words; a phase, a data set or a task by its kind."""
    if value is ABSENT:
        return "nothing"
    if isinstance(value, dict):
        return str(value.get("phase") or value.get("kind") or "a section")
    if isinstance(value, list):
        return f"[{', '.join(_shown(part) for part in value)}]"
    return "null" if value is None else str(value)


class _Generator(GenerateJsonSchema):
    def encode_default(self, dft: Any) -> Any:
        return str(dft) if isinstance(dft, Every) else super().encode_default(dft)


def recipe_json_schema() -> dict[str, Any]:
    """A JSON Schema (2020-12) document that describes recipe files."""
    schema = Recipe.model_json_schema(schema_generator=_Generator)
    return {"$schema": _Generator.schema_dialect, **schema, "title": "acm_compiler recipe"}
