"""A small wav2vec2 with a CTC head that writes down spoken digits.

The shipped weights were made by `python -m scripts.train_shipped.spoken`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from acm_compiler.data.spoken_digits import RATE, VOCABULARY
from acm_compiler.errors import PackageMissing
from acm_compiler.shipped.open_weights import FOLDER, load_shipped

WEIGHTS = FOLDER / "wav2vec2_digits.safetensors"
_SECONDS = 3


def build_model(*, post_norm: bool = False) -> nn.Module:
    """A `Wav2Vec2ForCTC` with 4 layers of width 96, random weights; 8 kHz audio [B, R] -> logits [B, S, V].

    A frame is 25 ms, and sees 50 ms of sound before the layers mix frames. post_norm: norms after the sums, as in
    wav2vec2-base; the shipped weights are of the other kind, as XLS-R. PackageMissing without transformers.
    """
    try:
        from transformers import Wav2Vec2Config, Wav2Vec2ForCTC
    except ImportError as error:
        raise PackageMissing("this model is one of transformers'", fix="pip install 'acm_compiler[hf]'") from error
    config = Wav2Vec2Config(
        vocab_size=len(VOCABULARY),
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
        hidden_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=384,
        conv_dim=[16, 32, 64, 96],
        conv_stride=[5, 5, 4, 2],
        conv_kernel=[10, 8, 8, 4],
        conv_bias=True,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=8,
        feat_extract_norm="layer",
        do_stable_layer_norm=not post_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        feat_proj_dropout=0.0,
        final_dropout=0.0,
        layerdrop=0.0,
        mask_time_prob=0.0,
        mask_feature_prob=0.0,
        ctc_loss_reduction="mean",
        ctc_zero_infinity=True,
    )
    return Wav2Vec2ForCTC(config)


def load_weights(model: nn.Module, path: Path = WEIGHTS) -> nn.Module:
    """`model` with the trained weights of `path`, in place. StorageError when they are missing or do not fit."""
    return load_shipped(model, path, script="spoken")


def example_input(batch: int = 1) -> dict[str, torch.Tensor]:
    """Three seconds of silence."""
    return {"input_values": torch.zeros(batch, _SECONDS * RATE)}
