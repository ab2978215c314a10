"""JSON text -> the fields of its plan, or a StorageError that names the key, what is found there and what must be."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict

from acm_compiler.acm.activations import resolve
from acm_compiler.errors import AcmError, StorageError
from acm_compiler.files import parse_json
from acm_compiler.planning.cost import SiteCost, size_limits
from acm_compiler.planning.decisions import SCHEMA, ModelFacts, PlannedSite
from acm_compiler.recipe.document import ABSENT, differing, show_path, show_value
from acm_compiler.recipe.messages import checked_json, wrong_entry
from acm_compiler.site import Skip

_WHAT = "the plan cannot be used"
_FIX = "plan again, or use the version of acm_compiler that wrote it"
# derived from the rest, and written for readers: `check_derived`
_DERIVED = ("schema", "totals", "budget_range")
_DERIVED_OF_SITES = tuple(SiteCost.__dataclass_fields__)
_LINEARS = {"mlp": 1, "gated_mlp": 2, "linear": 1}
Fault = tuple[str, object, str]


class _Document(BaseModel):
    """Content of a plan's JSON without what is derived; sites, grafts and so on as their dataclasses say."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: ModelFacts
    sites: tuple[PlannedSite, ...]
    skipped: tuple[Skip, ...]
    kept: tuple[Skip, ...]
    notes: tuple[str, ...] = ()  # not known to plans that were written before there were any


def read_plan(text: str) -> dict[str, Any]:
    """The fields of the plan that `Plan.to_json` wrote as `text`."""
    try:
        document = parse_json(text)
        found = document["schema"]
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError("this is not a plan", found=repr(error), expected="JSON written by Plan.to_json") from None
    if found != SCHEMA or isinstance(found, bool):
        raise StorageError("a plan of another schema", found=found, expected=SCHEMA, fix=_FIX)
    read = checked_json(_Document, json.dumps(_without_derived(document)), what=_WHAT, fix=_FIX)
    for path, found, expected in _faults(read.sites):
        raise wrong_entry(path, found, expected, what=_WHAT, fix=_FIX)
    return {name: getattr(read, name) for name in _Document.model_fields}


def check_derived(text: str, derived: dict[str, Any]) -> None:
    """Raise StorageError where the plan in `text` says of itself what is not `derived` from the rest of it."""
    for path, found, expected in _contradictions(parse_json(text), derived):
        expected = f"{show_value(expected)}, which follows from the rest"
        raise wrong_entry(path, found, expected, what=_WHAT, fix=f"leave out {path}, which is for readers; or {_FIX}")


def _contradictions(document: dict[str, Any], derived: dict[str, Any]) -> Iterator[tuple[str, object, Any]]:
    given = {name: document[name] for name in _DERIVED if name in document}
    given["sites"] = [{name: site[name] for name in _DERIVED_OF_SITES if name in site} for site in document["sites"]]
    for path, found, expected in differing(given, derived, same=_is_same_number):
        if found is not ABSENT:  # what the text leaves out contradicts nothing
            yield show_path(path), found, None if expected is ABSENT else expected


def _is_same_number(found: Any, expected: Any) -> bool:
    """True if two numbers are the same, to the rounding of sums in another order."""
    if isinstance(found, float) and isinstance(expected, float):
        return math.isclose(found, expected)
    return type(found) in (int, float) and found == expected


def _without_derived(document: dict[str, Any]) -> dict[str, Any]:
    """The part of the document that is read; `class` is `cls` in Python."""
    read = {name: value for name, value in document.items() if name not in _DERIVED}
    if isinstance(read.get("model"), dict):
        read["model"] = {"cls" if name == "class" else name: value for name, value in read["model"].items()}
    if isinstance(read.get("sites"), list):
        read["sites"] = [
            {name: value for name, value in site.items() if name not in _DERIVED_OF_SITES}
            if isinstance(site, dict)
            else site
            for site in read["sites"]
        ]
    return read


def _faults(planned: tuple[PlannedSite, ...]) -> Iterator[Fault]:
    """Values that fit by themselves and not together."""
    sites: dict[str, PlannedSite] = {}
    for i, site in enumerate(planned):
        for key, found, expected in (*_faults_of_place(site), *_faults_of_weights(site), *_faults_of_size(site)):
            yield f"sites[{i}].{key}", found, expected
        if site.name in sites:
            yield f"sites[{i}].name", site.name, "a name that no other site has"
        sites[site.name] = site
    for i, site in enumerate(planned):
        if site.pair is not None and site.pair.partner not in sites:
            yield f"sites[{i}].pair.partner", site.pair.partner, "the name of a site"


def _is_path(name: str) -> bool:
    """True if `name` is one of a module or parameter: names joined by dots, and no path of a file."""
    return all(name.split(".")) and not name.startswith(("/", "\\"))


def _faults_of_place(site: PlannedSite) -> Iterator[Fault]:
    if not _is_path(site.name):
        yield "name", site.name, "names of modules joined by dots"
    if site.graft.kind != "R":
        modules = site.graft.modules
        if not modules:
            yield "graft.modules", list(modules), f"the modules that become {site.name}"
        elif (home := modules[0 if site.graft.kind in ("W", "P") else -1]) != site.name:
            yield "name", site.name, f"the module that is grafted, {home}"
    for key in ("act", "learner_act"):
        try:
            resolve(getattr(site, key))
        except AcmError:
            yield key, getattr(site, key), "an activation, or an expression of them"


def _faults_of_weights(site: PlannedSite) -> Iterator[Fault]:
    refs = [(f"first[{i}]", ref) for i, ref in enumerate(site.first)]
    for place, ref in (*refs, *([] if site.last is None else [("last", site.last)])):
        for key, path in (("weight", ref.weight), ("bias", ref.bias)):
            if path is not None and not _is_path(path):
                yield f"{place}.{key}", path, "the name of a parameter"
        if ref.rows is not None and ref.rows[0] >= ref.rows[1]:
            yield f"{place}.rows", list(ref.rows), "the first row and the one after the last"


def _faults_of_size(site: PlannedSite) -> Iterator[Fault]:
    linear, count = site.kind == "linear", len(site.graft.widths) or _LINEARS[site.kind]
    if len(site.first) != count:
        yield "first", [ref.weight for ref in site.first], f"{count} for the kind {site.kind}"
    for key, value in (("last", site.last and site.last.weight), ("dense_width", site.dense_width)):
        if (value is None) != linear:
            yield key, value, "null for the kind linear, and only there"
    for key, most in size_limits(site).items():
        if getattr(site, key) > most:
            yield key, getattr(site, key), f"at most {most}, by the size of the site"
    if site.k_min > site.learners:
        yield "k_min", site.k_min, f"at most the site's learners, {site.learners}"
    if site.dense_width is not None and site.init == "auto" and site.learners * site.width < site.dense_width:
        yield "width", site.width, f"learners that hold {site.dense_width} neurons together"
    if site.is_sliced and site.pair is None:
        yield "pair", None, "the partner of a site whose form is slices"
    yield from _faults_of_packing(site)
    if site.is_sliced and site.width * site.learners != (site.d_in if site.role == "o" else site.d_out):
        yield "width", site.width, "the features of a slice divided by the learners"


def _faults_of_packing(site: PlannedSite) -> Iterator[Fault]:
    packed, widths = site.graft.kind == "P", site.graft.widths
    if packed != bool(widths) or (packed and sum(widths) != site.d_out):
        yield "graft.widths", list(widths), f"parts of the {site.d_out} outputs for the kind P, and only there"
    if site.pair is not None and site.role == "qkv":
        heads = sorted(head for own in site.pair.roles for head in own)
        if len(site.pair.roles) != 3 or heads != list(range(site.pair.heads)):
            yield "pair.roles", [*map(list, site.pair.roles)], f"each of {site.pair.heads} heads in one of three roles"
