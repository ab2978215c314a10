"""Write a recipe back, complete: every default, what was overridden, by which versions, and its hash."""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import json
import platform
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.representer import BaseRepresenter

from acm_compiler.recipe.schema import Recipe, Resolved

# what may change between an interrupted run and its continuation
_HOW = {"workers", "save_every", "eval_every", "eval_batch"}
_ACCEPTED = {"max_broken": True}  # of data: raised, it must not cost a night's training its continuation
_NO_DECISION: dict[str, Any] = {
    "resolved": True,
    "description": True,
    "expect": True,
    "run": _HOW,
    "data": {"train": _ACCEPTED, "eval": _ACCEPTED},
}
_VERSIONED = ("acm_compiler", "torch", "torchvision", "transformers", "timm", "accelerate")


def decisions(recipe: Recipe) -> dict[str, Any]:
    """What makes the model, as plain data: equal whatever is written out, in which order, and how it is run."""
    return recipe.model_dump(mode="json", exclude=_NO_DECISION)


def recipe_hash(recipe: Recipe) -> str:
    """Equal for recipes that lead to the same model."""
    return hashlib.sha256(json.dumps(decisions(recipe), sort_keys=True).encode()).hexdigest()


def resolve(recipe: Recipe) -> Recipe:
    """`recipe` with its section `resolved` filled in."""
    versions = {name: version for name in _VERSIONED if (version := installed_version(name))}
    resolved = Resolved(
        recipe=recipe.origin.document.source,
        overrides=recipe.origin.overrides,
        versions={"python": platform.python_version(), **versions},
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
