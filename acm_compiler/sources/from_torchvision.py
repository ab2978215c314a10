"""`torchvision:NAME`: models of torchvision's registry."""

from __future__ import annotations

import functools
from typing import Any
from urllib.error import URLError

import torch
from torch import nn

from acm_compiler.errors import ModelSourceError, did_you_mean
from acm_compiler.recipe.models import ModelConfig
from acm_compiler.sources.built import Device, Found, build_on, call_builder, is_file, load_own_file

_FRAMES = 16


def build(config: ModelConfig, *, weights: bool, device: Device) -> Found:
    """The model `config.name`; without `weights` only its structure, which may depend on the named weights."""
    from torchvision.models import get_model_builder

    check(config)
    builder = functools.partial(get_model_builder(config.name), **_no_backbone(config.name))
    entry = _weights_entry(config)
    if weights and entry is not None:
        model = _fetch(builder, entry, config)
    else:
        model = _structure(builder, entry, config, device)
        if weights:
            load_own_file(model, config)
    facts = {"weights": entry.name} if entry is not None else {}
    return Found(model=model, example=functools.partial(_example, entry=entry, name=config.name), facts=facts)


def check(config: ModelConfig) -> None:
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


def _fetch(builder: Any, entry: Any, config: ModelConfig) -> nn.Module:
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


def _example(model: nn.Module, *, entry: Any, name: str) -> torch.Tensor | None:
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
