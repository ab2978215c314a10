"""A small encoder that tells which Python package a paragraph of documentation is from.

The shipped weights were made by `python -m scripts.train_shipped.text --model modernbert_packages`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from acm_compiler.errors import PackageMissing
from acm_compiler.shipped.docs import PACKAGES, TOKENS, VOCABULARY
from acm_compiler.shipped.open_weights import FOLDER, load_shipped

WEIGHTS = FOLDER / "modernbert_packages.safetensors"


def build_model() -> nn.Module:
    """A `ModernBertForSequenceClassification`, 4 layers of width 96, random weights; tokens [B, S] -> logits [B, 8].

    Its answer is made of the mean over tokens. Its tokens are those of the shipped Llama. PackageMissing without
    transformers.
    """
    try:
        from transformers import ModernBertConfig, ModernBertForSequenceClassification
    except ImportError as error:
        raise PackageMissing("this model is one of transformers'", fix="pip install 'acm_compiler[hf]'") from error
    config = ModernBertConfig(
        vocab_size=VOCABULARY,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=TOKENS,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
        classifier_pooling="mean",
    )
    config.num_labels = len(PACKAGES)
    return ModernBertForSequenceClassification(config)


def load_weights(model: nn.Module, path: Path = WEIGHTS) -> nn.Module:
    """`model` with the trained weights of `path`, in place. StorageError when they are missing or do not fit."""
    return load_shipped(model, path, script="text --model modernbert_packages")


def example_input(batch: int = 1) -> dict[str, torch.Tensor]:
    """One text of the greatest length."""
    return {"input_ids": torch.ones(batch, TOKENS, dtype=torch.int64)}
