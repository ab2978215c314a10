"""Example inputs of a transformers model, from its config."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

TOKENS = 128
AUDIO_SECONDS = 10
DECODER_TOKENS = 32


def is_hf(model: nn.Module) -> bool:
    """True if `model` takes its inputs by transformers' names."""
    return isinstance(getattr(model, "main_input_name", None), str) and hasattr(model, "config")


def default_inputs(model: nn.Module) -> dict[str, Tensor] | None:
    """One example of a common size as keyword arguments; None for models that take something else."""
    config: Any = model.config
    name = model.main_input_name
    if name == "input_ids":
        longest = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or TOKENS
        return token_inputs(model, min(TOKENS, longest))
    if name == "pixel_values":
        return pixel_inputs(model)
    if name == "input_values":
        return named(model, torch.zeros(1, AUDIO_SECONDS * getattr(config, "sampling_rate", 16_000)))
    if name == "input_features" and hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):
        return named(model, torch.zeros(1, config.num_mel_bins, 2 * config.max_source_positions))
    return None


def token_inputs(model: nn.Module, tokens: int) -> dict[str, Tensor]:
    """A text of that many tokens, for encoder-decoders also as long a target."""
    return named(model, torch.ones(1, tokens, dtype=torch.int64), answer=tokens)


def pixel_inputs(model: nn.Module) -> dict[str, Tensor] | None:
    """An image of the size in the config (or in its vision part), a clip where it has frames."""
    config: Any = getattr(model.config, "vision_config", model.config)
    size = getattr(config, "image_size", None)
    if size is None:
        return None
    height, width = (size, size) if isinstance(size, int) else (size[0], size[-1])
    frames = [config.num_frames] if hasattr(config, "num_frames") else []
    return named(model, torch.zeros(1, *frames, getattr(config, "num_channels", 3), height, width))


def named(model: nn.Module, tensor: Tensor, *, answer: int = DECODER_TOKENS) -> dict[str, Tensor]:
    """`tensor` under the name of the model's main input, with a decoder's tokens where there is a decoder."""
    inputs = {str(model.main_input_name): tensor}
    if getattr(model.config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = torch.ones(1, answer, dtype=torch.int64)
    return inputs
