"""torchvision's vision models."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.zoo.entry import Build, Inputs, Model


def _vision(cls: str, *args: Any, **settings: Any) -> Build:
    """A class of torchvision's for pictures of 32 x 32; classes among the settings are given by name."""

    def build() -> tuple[nn.Module, Inputs]:
        from torchvision import models
        from torchvision.models import convnext, swin_transformer

        rooms = (models, swin_transformer, convnext)
        named = {key: value for key, value in settings.items() if isinstance(value, str)}
        found = {key: next(getattr(room, v) for room in rooms if hasattr(room, v)) for key, v in named.items()}
        return getattr(models, cls, None)(*args, num_classes=10, **settings | found).eval(), torch.randn(2, 3, 32, 32)

    return build


def _swin(bypass: str) -> str:
    return f"""
        in features.1.#
        qkv attn.qkv      : 16 48
        o   attn.proj     : 16 16 {bypass}
        mlp mlp.0 > mlp.3 : 16 64 16 {bypass}
        in features.3.#
        qkv attn.qkv      : 32 96
        o   attn.proj     : 32 32 {bypass}
        mlp mlp.0 > mlp.3 : 32 128 32 {bypass}"""


def _convnext() -> tuple[nn.Module, Inputs]:
    from torchvision.models import ConvNeXt
    from torchvision.models.convnext import CNBlockConfig

    return ConvNeXt([CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 1)], 0.1).eval(), torch.randn(2, 3, 32, 32)


_SWIN = ([4, 4], 16, [2, 2], [2, 4], [4, 4])
_PARTITIONS = "blocks.0.layers.0.layers.{window,grid}_attention"

MODELS = [
    Model(
        name="torchvision ViT",
        build=_vision("VisionTransformer", 32, 8, 2, 4, 32, 64, dropout=0.1),
        truth="""
            in encoder.layers.encoder_layer_#
            q,k,v self_attention.{q,k,v}_proj : 32 32
            o     self_attention.out_proj     : 32 32
            mlp   mlp.0 > mlp.3               : 32 64 32""",
        skips={"conv_proj": "convolution", "heads.head": "classifier"},
    ),
    # attention is one function of the weights; the modules qkv and proj are never called
    Model(name="torchvision Swin", build=_vision("SwinTransformer", *_SWIN), truth=_swin("bypass")),
    Model(
        name="torchvision Swin v2",
        # a norm after every branch; the keys' bias is set to zero in every forward
        build=_vision("SwinTransformer", *_SWIN, block="SwinTransformerBlockV2", downsample_layer="PatchMergingV2"),
        truth=_swin("normed"),
    ),
    Model(
        name="torchvision MaxViT",
        build=_vision("MaxVit", (32, 32), 8, 2, [16], [1], 16, 0.0),
        truth=f"""
            in {_PARTITIONS}
            qkv attn_layer.1.to_qkv       : 16 48
            o   attn_layer.1.merge        : 16 16
            mlp mlp_layer.1 > mlp_layer.3 : 16 64 16""",
        skips={"classifier.3": "classifier"},
    ),
    Model(
        name="torchvision ConvNeXt",
        build=_convnext,
        truth="""
            mlp features.1.0.block.3 > features.1.0.block.5 : 8 32 8
            mlp features.3.0.block.3 > features.3.0.block.5 : 16 64 16""",
    ),
]
