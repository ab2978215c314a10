"""The record by which a known library builds a live model again, and how a base model differs from the saved one."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from acm_compiler.acm import ACM, Learners
from acm_compiler.acm.quantized.integers import SCALES
from acm_compiler.checkpoint.hf_files import auto_classes
from acm_compiler.checkpoint.tensors import Stored, slots
from acm_compiler.errors import AcmError, PlanMismatch
from acm_compiler.files import parse_json
from acm_compiler.passes.capture.normalize import normalized
from acm_compiler.passes.rewrite.dense_region import check_tensors, named_tensors, tensor_names
from acm_compiler.passes.rewrite.rewrite import check_convertible, convert
from acm_compiler.passes.rewrite.site_functions import check_functions
from acm_compiler.planning.plan import Plan
from acm_compiler.runtime.quantized_linear import QuantizedLinear, replace_linears
from acm_compiler.sources.build import build_from_record

_PLAIN = (bool, int, float, str, type(None))
# modes, how weights were stored, and a number that `resize_token_embeddings` sets at the outermost module alone: the
# shapes tell it
_UNLIKE = frozenset(["training", "gradient_checkpointing", "is_quantized", "quantization_method", "vocab_size"])
Record = dict[str, Any]


def source_of(model: nn.Module, plan: Plan, rest: Sequence[str] = ()) -> Record | None:
    """A record from which `model`, rewritten by `plan`, can be built again; None when there is none that fits.

    It is tried: what it builds must have the same parameters and buffers once it is rewritten and, but for the plan's
    own record, the same modules and plain attributes. The plan's own no longer fits where the model was changed since;
    that of a model which comes with this package gives way to its library's, which others know, too.
    rest: the linears outside of ACMs that are quantised.
    """
    recorded = plan.model.source
    if recorded is not None and _is_outdated(recorded, model, plan, rest):
        recorded = None
    if recorded is not None and recorded.get("source") != "shipped":
        return recorded
    fitting = (record for record, built in _candidates(model, plan, rest) if _unlike(model, built) is None)
    return next(fitting, recorded)


def why_none(model: nn.Module, plan: Plan, rest: Sequence[str] = ()) -> str | None:
    """Name what keeps `source_of` from a record: the first difference of `model` from what its library builds."""
    return next((_unlike(model, built) for _, built in _candidates(model, plan, rest)), None)


def _candidates(model: nn.Module, plan: Plan, rest: Sequence[str]) -> Iterator[tuple[Record, nn.Module]]:
    """Records of the library that the model's class is of, and what each builds, rewritten."""
    candidates = {"transformers": _transformers, "torchvision": _torchvision, "timm": _timm}
    library = type(model).__module__.partition(".")[0]
    for record in candidates[library](model) if library in candidates else ():
        built = _rewritten(record, plan, rest)
        if built is not None:
            yield record, built


def _unlike(model: nn.Module, built: nn.Module) -> str | None:
    """The first shape or plain attribute of `model` that is another in `built`; None if all agree."""
    found, expected = (_shapes(part) | dict(_plain(part)) for part in (model, built))
    name = next((name for name in found | expected if found.get(name) != expected.get(name)), None)
    return None if name is None else f"{name} is {found.get(name)}, its configuration says {expected.get(name)}"


def _is_outdated(record: Record, model: nn.Module, plan: Plan, rest: Sequence[str]) -> bool:
    """True if `record` is known to build another model by now; users' code is not run to find out."""
    if record.get("source") == "python" or record.get("trust_remote_code"):
        return False
    built = _rewritten(record, plan, rest)
    return built is not None and _shapes(built) != _shapes(model)


def _rewritten(record: Record, plan: Plan, rest: Sequence[str]) -> nn.Module | None:
    """The model that `record` builds, rewritten by `plan` and without values; None where either cannot be done."""
    try:
        built = build_from_record(parse_json(json.dumps(record)), device="meta")  # as `load` will read it
        check_convertible(built, plan, resized=True)
        convert(built, plan, empty=True)
        replace_linears(built, rest)
    except (AcmError, TypeError, ValueError, AttributeError):
        return None
    return built


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    # as they were before weights became integers, which what was just built has not: without scales, two 4-bit values a
    # byte
    shapes: dict[str, tuple[int, ...]] = {}
    for name, slot in slots(model).items():
        if isinstance(slot.owner, Learners) and slot.leaf in SCALES:
            continue
        if isinstance(slot.owner, QuantizedLinear) and slot.leaf == "scales":
            continue
        *rows, last = slot.tensor.shape or (1,)
        packed = isinstance(slot.owner, (Learners, QuantizedLinear)) and slot.tensor.dtype == torch.uint8
        shapes[name] = (*rows, 2 * last if packed else last)
    return shapes


def _transformers(model: nn.Module) -> Iterator[Record]:
    config: Any = getattr(model, "config", None)
    for name in auto_classes(model) if config is not None else ():
        yield {
            "source": "hf",
            "name": config.name_or_path or config.model_type,
            "auto_class": name,
            "config": parse_json(config.to_json_string(use_diff=False)),
            "weights": None,
        }


def _torchvision(model: nn.Module) -> Iterator[Record]:
    from torchvision.models import get_model_builder, list_models

    for name in list_models():
        if get_model_builder(name).__module__ == type(model).__module__:
            for args in _arguments(model, get_model_builder(name)):
                yield {"source": "torchvision", "name": name, "weights": None, "args": args}


def _timm(model: nn.Module) -> Iterator[Record]:
    settings: Any = getattr(model, "pretrained_cfg", None) or {}
    name = settings.get("architecture") if isinstance(settings, dict) else None
    if name:
        for args in ({}, {"num_classes": getattr(model, "num_classes", None)}):
            yield {"source": "timm", "name": name, "weights": None, "args": args}


def _arguments(model: nn.Module, builder: Any) -> Iterator[Record]:
    """Arguments that a builder may have had: none, or the sizes that the model shows."""
    yield {}
    shown = {"num_classes": list(model.parameters())[-1].shape[0], "image_size": getattr(model, "image_size", None)}
    open_ended = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(builder).parameters.values())
    args = {key: value for key, value in shown.items() if value is not None}
    if open_ended:
        yield {"num_classes": args["num_classes"]}
        yield args


def _plain(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The modules of a rewritten model with their plain attributes, outside its ACMs."""
    if isinstance(model, ACM):
        return
    yield f"{prefix}type", type(model).__name__
    for name, value in vars(model).items():
        if not name.startswith("_") and name not in _UNLIKE and isinstance(value, _PLAIN):
            yield f"{prefix}{name}", value
    for name, child in model.named_children():
        yield from _plain(child, f"{prefix}{name}.")


Shape = tuple[int, ...]


def first_difference(base: nn.Module, plan: Plan, stored: Stored, rest: Sequence[str] = ()) -> tuple[str, str] | None:
    """First difference of `base` from the saved model, as found and as expected; None if there is none.

    First what stays beside ACMs, then the dense weights of sites. rest: linears outside of ACMs, quantised there.
    """
    others = (*(site.name for site in plan.sites), *rest)
    kept = _kept_shapes(stored, others)
    replaced = {name for site in plan.sites for name in tensor_names(site)}
    with normalized(base) as unpacked:
        packed, own = named_tensors(base), named_tensors(unpacked)
        for name, tensor in own.items():
            found = tuple(tensor.shape)
            if name in kept and found != kept[name]:
                return _text(name, found), _text(name, kept[name])
            known = name in kept or name in replaced or _is_part_of(others, name)
            if name in packed and not known and isinstance(tensor, nn.Parameter):
                return _text(name, found), "nothing of that name"
        for name, expected in kept.items():
            if name not in own and name not in packed:
                return f"no {name}", _text(name, expected)
        try:
            check_tensors(plan.sites, unpacked)
        except PlanMismatch as error:
            missing = error.expected is None
            return f"{error.where} {'without ' if missing else ''}{error.found}", str(error.expected or "them")
    return None


def other_functions(base: nn.Module, plan: Plan) -> str | None:
    """Text on a site between whose linears `base` computes something else than the rewritten model did; else None."""
    # no reason to refuse it: another version of its library may only write it otherwise, and ACMs run none of these
    try:
        with normalized(base) as unpacked:
            check_functions(plan.sites, unpacked, named_tensors(unpacked))
    except PlanMismatch as error:
        return f"computes something else at {error.where}: {error.found}, where {error.expected} was rewritten"
    return None


def _kept_shapes(stored: Stored, others: Sequence[str]) -> dict[str, Shape]:
    """The saved tensors that are part of no ACM or quantised linear, under all their names."""
    tensors = stored.tensors | {name: stored.tensors[owner] for name, owner in stored.aliases.items()}
    return {name: tuple(tensor.shape) for name, tensor in tensors.items() if not _is_part_of(others, name)}


def _is_part_of(others: Sequence[str], name: str) -> bool:
    return name.startswith(tuple(f"{other}." for other in others))


def _text(name: str, shape: Shape) -> str:
    return f"{name} {list(shape)}"
