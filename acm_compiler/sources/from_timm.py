"""`timm:NAME`: models of timm's registry."""

from __future__ import annotations

import functools
import os

import torch
from torch import nn

from acm_compiler.errors import ModelSourceError, did_you_mean
from acm_compiler.recipe.models import ModelConfig
from acm_compiler.sources.built import Device, Found, build_on, call_builder, is_file, load_own_file, unloadable
from acm_compiler.sources.from_hf import out_of_reach

_FILES = ("model.safetensors", "pytorch_model.bin")


def build(config: ModelConfig, *, weights: bool, device: Device) -> Found:
    """The model `config.name`; a tag behind a dot (`.augreg_in1k`) says which pretrained weights are meant."""
    check(config)
    import timm

    pretrained = weights and config.weights == "default"
    builder = functools.partial(timm.create_model, config.name, pretrained=pretrained)
    if pretrained:
        model = _fetch(builder, config)
    else:
        model = build_on(device, lambda: call_builder(builder, config))
        if weights:
            load_own_file(model, config)
    return Found(model=model, example=_example)


def check(config: ModelConfig) -> None:
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
            f"timm knows no weights {config.weights!r}",
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


def _fetch(builder: functools.partial[nn.Module], config: ModelConfig) -> nn.Module:
    if offline := _out_of_reach(config.name):
        raise unloadable(config, f"none in the hub's cache; {offline}")
    try:
        return call_builder(builder, config)
    except (OSError, RuntimeError) as error:
        raise unloadable(config, str(error).splitlines()[0]) from error


def _out_of_reach(name: str) -> str | None:
    """Reason why the hub cannot give the weights of `name` now; None where it can, or where it need not."""
    import timm
    from huggingface_hub import try_to_load_from_cache

    place = getattr(timm.get_pretrained_cfg(name), "hf_hub_id", None)
    # timm's own switch for files that older versions fetched elsewhere
    if not place or os.environ.get("TIMM_USE_OLD_CACHE"):
        return None
    cached = any(isinstance(try_to_load_from_cache(place, file), str) for file in _FILES)
    return None if cached else out_of_reach(place)


def _example(model: nn.Module) -> torch.Tensor | None:
    settings = getattr(model, "pretrained_cfg", None) or {}
    size = settings.get("input_size")
    return torch.zeros(1, *size) if size else None
