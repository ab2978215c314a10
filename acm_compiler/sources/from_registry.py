"""Models by their names in a registry: torchvision's, timm's, and the trained ones that come with this package."""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any
from urllib.error import URLError

import torch
from torch import nn

from acm_compiler.errors import ModelSourceError, did_you_mean
from acm_compiler.recipe.lookup import SHIPPED
from acm_compiler.recipe.models import ModelConfig
from acm_compiler.sources.builders import (
    Device,
    Found,
    build_on,
    call_builder,
    is_file,
    load_own_file,
    refuse_names,
    unloadable,
)
from acm_compiler.sources.from_hf import out_of_reach

_FRAMES = 16


def build_torchvision(config: ModelConfig, *, weights: bool, device: Device) -> Found:
    """The model `config.name`; without `weights` only its structure, which may depend on the named weights."""
    from torchvision.models import get_model_builder

    check_torchvision(config)
    builder = functools.partial(get_model_builder(config.name), **_no_backbone(config.name))
    entry = _weights_entry(config)
    if weights and entry is not None:
        model = _fetch_torchvision(builder, entry, config)
    else:
        model = _structure(builder, entry, config, device)
        if weights:
            load_own_file(model, config)
    facts = {"weights": entry.name} if entry is not None else {}
    example = functools.partial(_torchvision_example, entry=entry, name=config.name)
    return Found(model=model, example=example, facts=facts)


def check_torchvision(config: ModelConfig) -> None:
    """ModelSourceError for a name, or weights, that torchvision does not know."""
    from torchvision.models import list_models

    known = list_models()
    if config.name not in known:
        raise ModelSourceError(
            f"torchvision has no model {config.name!r}{did_you_mean(config.name, known, count=3)}",
            expected="a name of torchvision.models.list_models()",
        )
    _weights_entry(config)


def _no_backbone(name: str) -> dict[str, None]:
    """Detection and segmentation models load a backbone's weights unless told not to."""
    from inspect import signature

    from torchvision.models import get_model_builder

    return {"weights_backbone": None} if "weights_backbone" in signature(get_model_builder(name)).parameters else {}


def _weights_entry(config: ModelConfig) -> Any:
    """The member of the model's weights enum that the recipe means; None for a random start or a file."""
    from torchvision.models import get_model_weights

    if config.weights is None or is_file(config.weights):
        return None
    if config.weights == "default":
        return _default_weights(config.name)
    entries = get_model_weights(config.name)
    names = [entry.name for entry in entries]
    if config.weights not in names:
        raise ModelSourceError(
            f"{config.name} has no weights {config.weights!r}{did_you_mean(config.weights, names)}",
            expected=f"default, {', '.join(names)}, a file, or null for a random start",
        )
    return entries[config.weights]


def _fetch_torchvision(builder: Any, entry: Any, config: ModelConfig) -> nn.Module:
    try:
        return call_builder(functools.partial(builder, weights=entry), config)
    except URLError as error:
        raise ModelSourceError(
            f"the weights of {config.name} cannot be fetched",
            found=str(error.reason),
            fix=f"download {entry.url} elsewhere and set weights: FILE, or weights: null for a random start",
        ) from error


def _structure(builder: Any, entry: Any, config: ModelConfig, device: Device) -> nn.Module:
    """The model without weights, with the number of classes and the image size that the named weights have."""
    meta = entry.meta if entry is not None else {}
    untrained = functools.partial(builder, weights=None)
    settings: dict[str, Any] = {"num_classes": len(meta["categories"])} if "categories" in meta else {}
    model = build_on(device, lambda: call_builder(untrained, config, **settings))
    size = meta.get("min_size", (None,))[0]
    if size not in (None, getattr(model, "image_size", size)) and "image_size" not in config.args:
        model = build_on(device, lambda: call_builder(untrained, config, image_size=size, **settings))
    return model


def _torchvision_example(model: nn.Module, *, entry: Any, name: str) -> torch.Tensor | None:
    """One image (or clip) of the size the model was trained on; None for kinds that take no plain tensor."""
    size = getattr(model, "image_size", None)
    if isinstance(size, int):
        return torch.zeros(1, 3, size, size)
    entry = entry or _default_weights(name)
    transforms = entry.transforms() if entry is not None else None
    crop = getattr(transforms, "crop_size", None)
    if crop is None:
        return None
    height, width = crop[0], crop[-1]
    frames = [_FRAMES] if type(transforms).__name__ == "VideoClassification" else []
    return torch.zeros(1, 3, *frames, height, width)


def _default_weights(name: str) -> Any:
    from torchvision.models import get_model_weights

    return getattr(get_model_weights(name), "DEFAULT", None)


_WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")


def build_timm(config: ModelConfig, *, weights: bool, device: Device) -> Found:
    """The model `config.name`; a tag behind a dot (`.augreg_in1k`) says which pretrained weights are meant."""
    check_timm(config)
    import timm

    pretrained = weights and config.weights == "default"
    builder = functools.partial(timm.create_model, config.name, pretrained=pretrained)
    if pretrained:
        model = _fetch_timm(builder, config)
    else:
        model = build_on(device, lambda: call_builder(builder, config))
        if weights:
            load_own_file(model, config)
    return Found(model=model, example=_timm_example)


def check_timm(config: ModelConfig) -> None:
    """ModelSourceError for a name, a tag or weights that timm does not know, and where timm is not installed."""
    try:
        import timm
    except ImportError as error:
        raise ModelSourceError("timm is not installed", fix="pip install 'acm_compiler[timm]'") from error
    architecture, dot, tag = config.name.partition(".")
    if not timm.is_model(architecture):
        known = did_you_mean(architecture, timm.list_models(), count=3)
        raise ModelSourceError(f"timm has no model {architecture!r}{known}", expected="a name of timm.list_models()")
    if dot:
        _check_tag(architecture, tag)
    if config.weights not in (None, "default") and not is_file(config.weights):
        raise ModelSourceError(
            f"timm has no weights {config.weights!r}",
            expected="default, a file, or null; a pretrained tag belongs to the name",
            fix=f"write name: {architecture}.{config.weights}",
        )


def _check_tag(architecture: str, tag: str) -> None:
    import timm

    names = timm.list_models(f"{architecture}.*", include_tags=True)
    tags = [name.partition(".")[2] for name in names]
    if tag not in tags:
        raise ModelSourceError(
            f"timm's {architecture} has no pretrained tag {tag!r}{did_you_mean(tag, tags)}",
            expected=", ".join(tags) or "none",
            fix=f"leave the tag out: timm:{architecture}",
        )


def _fetch_timm(builder: functools.partial[nn.Module], config: ModelConfig) -> nn.Module:
    if offline := _timm_out_of_reach(config.name):
        raise unloadable(config, f"none in the hub's cache; {offline}")
    try:
        return call_builder(builder, config)
    except (OSError, RuntimeError) as error:
        raise unloadable(config, str(error).splitlines()[0]) from error


def _timm_out_of_reach(name: str) -> str | None:
    """Reason why the hub cannot give the weights of `name` now; None where it can, or where it need not."""
    import timm
    from huggingface_hub import try_to_load_from_cache

    place = getattr(timm.get_pretrained_cfg(name), "hf_hub_id", None)
    # timm's own switch for files that older versions fetched elsewhere
    if not place or os.environ.get("TIMM_USE_OLD_CACHE"):
        return None
    cached = any(isinstance(try_to_load_from_cache(place, file), str) for file in _WEIGHT_FILES)
    return None if cached else out_of_reach(place)


def _timm_example(model: nn.Module) -> torch.Tensor | None:
    settings = getattr(model, "pretrained_cfg", None) or {}
    size = settings.get("input_size")
    return torch.zeros(1, *size) if size else None


def check_shipped(config: ModelConfig) -> None:
    """ModelSourceError for a name that no shipped model has."""
    if config.name not in SHIPPED:
        raise ModelSourceError(
            f"no model {config.name!r} is shipped{did_you_mean(config.name, SHIPPED)}", expected=", ".join(SHIPPED)
        )


def build_shipped(config: ModelConfig, *, weights: bool, device: Device) -> Found:
    """The model `config.name` that comes with this package."""
    check_shipped(config)
    refuse_names(config)
    shipped: Any = getattr(importlib.import_module("acm_compiler.shipped"), config.name.upper())
    model = build_on(device, lambda: call_builder(shipped.build_model, config))
    if weights and config.weights == "default":
        shipped.load_weights(model)
    elif weights:
        load_own_file(model, config)
    return Found(model=model, example=lambda _: shipped.example_input())
