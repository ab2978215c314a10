"""A small Llama that was trained on the documentation of Python packages, and its tokenizer.

The shipped weights were made by `python -m scripts.train_shipped.text --model llama_docs`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from acm_compiler.errors import PackageMissing
from acm_compiler.shipped.open_weights import FOLDER, load_shipped

WEIGHTS = FOLDER / "llama_docs.safetensors"
TOKENIZER = FOLDER / "docs_tokenizer.json"
VOCABULARY, TOKENS = 2048, 96
PACKAGES = ("matplotlib", "networkx", "numpy", "scipy", "sklearn", "sympy", "torch", "transformers")


def build_model() -> nn.Module:
    """A `LlamaForCausalLM` with 6 layers of width 160, random weights; tokens [B, S] -> logits [B, S, 2048].

    PackageMissing without transformers.
    """
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise PackageMissing("this model is one of transformers'", fix="pip install 'acm_compiler[hf]'") from error
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=160,
        intermediate_size=432,
        num_hidden_layers=6,
        num_attention_heads=5,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config)


def load_weights(model: nn.Module, path: Path = WEIGHTS) -> nn.Module:
    """`model` with the trained weights of `path`, in place. StorageError when they are missing or do not fit."""
    return load_shipped(model, path, script="text --model llama_docs")


def example_input(batch: int = 1) -> dict[str, torch.Tensor]:
    """One text of the length it was trained on."""
    return {"input_ids": torch.ones(batch, TOKENS, dtype=torch.int64)}
