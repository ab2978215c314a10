"""All models of the zoo, by family."""

from __future__ import annotations

from tests.zoo import (
    audio,
    decoders,
    encoder_decoders,
    experts,
    hybrids,
    multimodal,
    newcomers,
    text_encoders,
    timm_models,
    torchvision_models,
    vision,
    written,
)
from tests.zoo.entry import Model

FAMILIES: dict[str, list[Model]] = {
    "torchvision": torchvision_models.MODELS,
    "timm": timm_models.MODELS,
    "transformers: text encoders": text_encoders.MODELS,
    "transformers: vision": vision.MODELS,
    "transformers: audio": audio.MODELS,
    "transformers: language models": decoders.MODELS,
    "transformers: encoder-decoders": encoder_decoders.MODELS,
    "transformers: mixtures of experts": experts.MODELS,
    "transformers: recurrences and hybrids": hybrids.MODELS,
    "transformers: images and text": multimodal.MODELS,
    "newcomers": newcomers.MODELS,
    "hand-written": written.MODELS,
}
MODELS: dict[str, Model] = {model.name: model for family in FAMILIES.values() for model in family}
