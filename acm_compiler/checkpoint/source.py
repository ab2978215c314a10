"""How a live model of a known library can be built again, for plans that do not say."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from typing import Any

from torch import nn

from acm_compiler.acm import ACM
from acm_compiler.checkpoint.tensors import slots
from acm_compiler.errors import AcmError
from acm_compiler.files import parse_json
from acm_compiler.passes.rewrite.rewrite import check_convertible, convert
from acm_compiler.planning.plan import Plan
from acm_compiler.sources import build_from_record

_PLAIN = (bool, int, float, str, type(None))
# modes, and a number that `resize_token_embeddings` sets at the outermost module alone: the shapes tell it
_UNLIKE = frozenset(["training", "gradient_checkpointing", "vocab_size"])
Record = dict[str, Any]


def source_of(model: nn.Module, plan: Plan) -> Record | None:
    """A record from which `model`, rewritten by `plan`, can be built again; None when there is none that fits.

    It is tried: what it builds must have the same parameters and buffers once it is rewritten and, but for the plan's
    own record, the same modules and plain attributes. The plan's own no longer fits where the model was changed since.
    """
    recorded = plan.model.source
    if recorded is not None and not _is_outdated(recorded, model, plan):
        return recorded
    candidates = {"transformers": _transformers, "torchvision": _torchvision, "timm": _timm}
    library = type(model).__module__.partition(".")[0]
    for record in candidates[library](model) if library in candidates else ():
        built = _rewritten(record, plan)
        if built is not None and _shapes(built) == _shapes(model) and _alike(model, built):
            return record
    return None


def _is_outdated(record: Record, model: nn.Module, plan: Plan) -> bool:
    """Whether `record` is known to build another model by now; users' code is not run to find out."""
    if record.get("source") == "python" or record.get("trust_remote_code"):
        return False
    built = _rewritten(record, plan)
    return built is not None and _shapes(built) != _shapes(model)


def _rewritten(record: Record, plan: Plan) -> nn.Module | None:
    """What `record` builds, rewritten by `plan` and without values; None where either cannot be done."""
    try:
        built = build_from_record(parse_json(json.dumps(record)), device="meta")  # as `load` will read it
        check_convertible(built, plan, resized=True)
        convert(built, plan, empty=True)
    except (AcmError, TypeError, ValueError):
        return None
    return built


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(slot.tensor.shape) for name, slot in slots(model).items()}


def _transformers(model: nn.Module) -> Iterator[Record]:
    import transformers

    from acm_compiler.recipe.models import AUTO_CLASSES

    config: Any = getattr(model, "config", None)
    for name in AUTO_CLASSES:
        known = getattr(transformers, name)._model_mapping.get(type(config), ())
        if type(model) in (known if isinstance(known, (tuple, list)) else (known,)):
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
    """What a builder may have been given: nothing, or the sizes that the model shows."""
    yield {}
    shown = {"num_classes": list(model.parameters())[-1].shape[0], "image_size": getattr(model, "image_size", None)}
    open_ended = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(builder).parameters.values())
    args = {key: value for key, value in shown.items() if value is not None}
    if open_ended:
        yield {"num_classes": args["num_classes"]}
        yield args


def _alike(model: nn.Module, built: nn.Module) -> bool:
    """Whether two rewritten models have the same modules with the same plain attributes, outside their ACMs."""
    mine, theirs = dict(_plain(model)), dict(_plain(built))
    return mine == theirs


def _plain(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(model, ACM):
        return
    yield f"{prefix}type", type(model).__name__
    for name, value in vars(model).items():
        if not name.startswith("_") and name not in _UNLIKE and isinstance(value, _PLAIN):
            yield f"{prefix}{name}", value
    for name, child in model.named_children():
        yield from _plain(child, f"{prefix}{name}.")
