"""The model that a recipe converts: where it comes from, and what one example of its input is."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, model_validator

from acm_compiler.errors import did_you_mean
from acm_compiler.recipe.fields import FUNCTION, Count, Many, PathLike, Positive, Section, Texts, Three, refusal

Source = Literal["torchvision", "timm", "hf", "python", "shipped", "directory"]
SOURCES = get_args(Source)
AUTO_CLASSES = tuple(
    f"AutoModel{task}"
    for task in (
        "ForCausalLM",
        "ForSeq2SeqLM",
        "ForMaskedLM",
        "ForSequenceClassification",
        "ForTokenClassification",
        "ForQuestionAnswering",
        "ForMultipleChoice",
        "ForImageClassification",
        "ForMaskedImageModeling",
        "ForSemanticSegmentation",
        "ForObjectDetection",
        "ForDepthEstimation",
        "ForVideoClassification",
        "ForImageTextToText",
        "ForCTC",
        "ForSpeechSeq2Seq",
        "ForAudioClassification",
        "ForAudioFrameClassification",
        "ForAudioXVector",
        "ForPreTraining",
        "",
    )
)


class ModelConfig(Section):
    """The model to convert, by the place it comes from and its name there."""

    source: Source
    """Source of the model."""
    name: Annotated[str, Field(min_length=1), PathLike()]
    """The name in torchvision's or timm's registry; a hub name or folder (hf); package.module:function (python);
    a shipped model; a directory that acm_compiler saved."""
    weights: Annotated[str | None, PathLike()] = "default"
    """`default`: the trained weights that belong to the name. A name the source knows (IMAGENET1K_V1), or a file
    (.safetensors, .pt, .pth). null: a random start."""
    auto_class: str | None = None
    """Transformers class that builds it (hf); unset: the one the model's config names."""
    gguf: Annotated[str | None, Field(pattern=r"\.gguf$"), PathLike()] = None
    """GGUF file with config, weights and tokenizer, in the folder or installed Python package `name` (hf)."""
    trust_remote_code: bool = False
    """Run the Python files that come with the model (hf). Only for repositories whose code you have read."""
    args: Annotated[dict[str, Any], PathLike()] = Field(default_factory=dict)
    """Keyword arguments of the model's builder (hf: changes to its config)."""
    freeze: Texts = ()
    """Modules, globs over parameter names, or `re:` and a regular expression, that no phase trains."""

    @model_validator(mode="after")
    def _keys_fit_source(self) -> ModelConfig:
        if self.source == "python" and not re.fullmatch(f"(python:)?{FUNCTION}", self.name):
            raise refusal("name must be package.module:function", "name")
        for key in ("auto_class", "trust_remote_code", "gguf"):
            if getattr(self, key) and self.source != "hf":
                raise refusal(f"{key} must be left out unless source is hf", key)
        if self.source == "hf" and self.gguf is None and self.name.endswith(".gguf"):
            raise refusal("name must be the folder or package that holds the GGUF file, and gguf the file", "name")
        if self.auto_class is not None and self.auto_class not in AUTO_CLASSES:
            hint = did_you_mean(self.auto_class, AUTO_CLASSES) or f"; known: {', '.join(AUTO_CLASSES)}"
            raise refusal(f"unknown auto_class {self.auto_class!r}{hint}", "auto_class")
        return self


class InputConfig(Section):
    """Shape of one example, without the batch axis. Exactly one of the four kinds."""

    image: Three[Count] | None = None
    """Channels, height, width."""
    tokens: Count | None = None
    """Length of a text in tokens."""
    audio_seconds: Positive | None = None
    """Length of a recording."""
    sample_rate: Count = 16_000
    """Samples per second, for audio_seconds."""
    shape: Many[Count] | None = None
    """Sizes of a plain tensor of numbers."""

    @model_validator(mode="after")
    def _one_kind(self) -> InputConfig:
        kinds = ("image", "tokens", "audio_seconds", "shape")
        given = [kind for kind in kinds if getattr(self, kind) is not None]
        if len(given) != 1:
            raise refusal("exactly one of image, tokens, audio_seconds and shape must be given")
        return self
