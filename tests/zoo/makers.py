"""Makers of the zoo's models: small, from a configuration, without weights."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from tests.zoo.entry import Build, Inputs

VOCABULARY = 50
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def words(batch: int = 2, length: int = 7) -> dict[str, Any]:
    """Token numbers without special ones."""
    return {"input_ids": torch.randint(5, VOCABULARY, (batch, length))}


def word_pairs() -> dict[str, Any]:
    """Inputs of an encoder-decoder."""
    return words() | {"decoder_input_ids": torch.randint(5, VOCABULARY, (2, 5))}


def pictures(size: int = 32, channels: int = 3, *, batch: int = 2) -> dict[str, Any]:
    """Pictures, two unless said otherwise."""
    return {"pixel_values": torch.randn(batch, channels, size, size)}


def waves() -> dict[str, Any]:
    """Two sound waves."""
    return {"input_values": torch.randn(2, 400)}


def hf(cls: str, inputs: Any = words, /, *, by_class: str | None = None, **settings: Any) -> Build:
    """A transformers model of class `cls` from its own configuration class (or `by_class`) with these settings."""

    def build() -> tuple[nn.Module, Inputs]:
        import transformers

        model = getattr(transformers, cls)
        config = getattr(transformers, by_class) if by_class else model.config_class
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about settings of the makers' own
            return model(config(**settings)).eval(), inputs()

    return build


def text(cls: str, inputs: Any = words, /, **settings: Any) -> Build:
    """`hf` with two blocks of width 32 and a vocabulary of 50."""
    return hf(cls, inputs, **{"vocab_size": VOCABULARY, "pad_token_id": 0, **SMALL} | settings)


def timm(name: str, /, *, size: int = 32, **settings: Any) -> Build:
    """A timm model by its class or entry name, for pictures of `size`."""

    def build() -> tuple[nn.Module, Inputs]:
        import timm

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about names that timm moved
            model = timm.create_model(name, pretrained=False, num_classes=10, **settings)
        return model.eval(), torch.randn(2, 3, size, size)

    return build
