"""The demo's model: a small vision transformer of torchvision's, trained on cluttered digits.

The shipped weights were made by `python -m scripts.train_shipped.digits`; accuracy on held-out canvases .958.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import nn

from acm_compiler.data.digits import CLASSES, SIDE
from acm_compiler.shipped.open_weights import FOLDER, load_shipped

PATCH = 6
WEIGHTS = FOLDER / "digits_vit.safetensors"


def build_model() -> nn.Module:
    """A `VisionTransformer` with 4 layers of width 64, random weights; [B, 3, 36, 36] -> logits [B, 10].

    36 patches of 6x6 pixels and a class token. The convolutional stem normalises by groups within an image, so
    that an answer never depends on the rest of the batch, in training either.
    """
    from torchvision.models.vision_transformer import ConvStemConfig, VisionTransformer

    norm = functools.partial(nn.GroupNorm, 4)
    return VisionTransformer(
        image_size=SIDE,
        patch_size=PATCH,
        num_layers=4,
        num_heads=4,
        hidden_dim=64,
        mlp_dim=256,
        num_classes=CLASSES,
        conv_stem_configs=[
            ConvStemConfig(out_channels=16, kernel_size=3, stride=2, norm_layer=norm),
            ConvStemConfig(out_channels=32, kernel_size=3, stride=3, norm_layer=norm),
        ],
    )


def load_weights(model: nn.Module, path: Path = WEIGHTS) -> nn.Module:
    """`model` with the trained weights of `path`, in place. StorageError when they are missing or do not fit."""
    return load_shipped(model, path, script="digits")


def trained() -> nn.Module:
    """The trained model, in eval mode."""
    return load_weights(build_model()).eval()


def example_input(batch: int = 1) -> torch.Tensor:
    """Zeros of the shape that the model takes."""
    return torch.zeros(batch, 3, SIDE, SIDE)
