"""The small trained models that come with the package: a vision transformer, a Llama, a ModernBERT and a wav2vec2, and
their weights, kept beside it as 8, 16 or 32 bit numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from acm_compiler.data.digits import CLASSES, SIDE
from acm_compiler.data.spoken_digits import RATE
from acm_compiler.data.spoken_digits import VOCABULARY as LETTERS
from acm_compiler.errors import ModelSourceError, StorageError
from acm_compiler.sources.builders import fill
from acm_compiler.sources.from_hf import import_transformers
from acm_compiler.sources.inputs import Inputs

FOLDER = Path(__file__).parent / "weights"
# beside a matrix of 8 bit integers: what one of them is worth in each row
SCALE = ".scale"
PATCH = 6
TOKENIZER = FOLDER / "docs_tokenizer.json"
VOCABULARY, TOKENS = 2048, 96
PACKAGES = ("matplotlib", "networkx", "numpy", "scipy", "sklearn", "sympy", "torch", "transformers")
_SECONDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ShippedModel:
    """One of them. build_model: with random weights; example_input: one example.

    The shipped weights were made by `python -m scripts.train_shipped.<script>`.
    """

    name: str
    script: str
    build_model: Callable[..., nn.Module]
    example_input: Callable[[], Inputs]

    @property
    def weights(self) -> Path:
        """The file of the trained weights."""
        return FOLDER / f"{self.name}.safetensors"

    def load_weights(self, model: nn.Module, path: Path | None = None) -> nn.Module:
        """`model` with the trained weights, or those of `path`, in place. StorageError when missing, or of another."""
        return load_shipped(model, path or self.weights, script=self.script)

    def trained(self) -> nn.Module:
        """The trained model, in eval mode."""
        return self.load_weights(self.build_model()).eval()


def _digits_vit() -> nn.Module:
    """A `VisionTransformer` with 4 layers of width 64; [B, 3, 36, 36] -> logits [B, 10].

    36 patches of 6x6 pixels and a class token. The convolutional stem normalises by groups within an image, so
    that an output never depends on the rest of the batch, in training either.
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


def _llama_docs() -> nn.Module:
    """A `LlamaForCausalLM` with 6 layers of width 160; tokens [B, S] -> logits [B, S, 2048]."""
    transformers = import_transformers()
    config = transformers.LlamaConfig(
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
    return transformers.LlamaForCausalLM(config)


def _modernbert_packages() -> nn.Module:
    """A `ModernBertForSequenceClassification` with 4 layers of width 96; tokens [B, S] -> logits [B, 8].

    It names the package a paragraph of documentation is from. Its output is made of the mean over tokens, which are
    those of the shipped Llama.
    """
    transformers = import_transformers()
    config = transformers.ModernBertConfig(
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
    return transformers.ModernBertForSequenceClassification(config)


def _wav2vec2_digits(*, post_norm: bool = False) -> nn.Module:
    """A `Wav2Vec2ForCTC` with 4 layers of width 96; 8 kHz audio [B, R] -> logits [B, S, V].

    A frame is 25 ms, and sees 50 ms of sound before the layers mix frames. post_norm: norms after the sums, as in
    wav2vec2-base; the shipped weights are of the other kind, as XLS-R.
    """
    transformers = import_transformers()
    config = transformers.Wav2Vec2Config(
        vocab_size=len(LETTERS),
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
    return transformers.Wav2Vec2ForCTC(config)


def _text() -> Inputs:
    return {"input_ids": torch.ones(1, TOKENS, dtype=torch.int64)}


DIGITS_VIT = ShippedModel(
    name="digits_vit",
    script="digits",
    build_model=_digits_vit,
    example_input=lambda: torch.zeros(1, 3, SIDE, SIDE),
)
LLAMA_DOCS = ShippedModel(
    name="llama_docs", script="text --model llama_docs", build_model=_llama_docs, example_input=_text
)
MODERNBERT_PACKAGES = ShippedModel(
    name="modernbert_packages",
    script="text --model modernbert_packages",
    build_model=_modernbert_packages,
    example_input=_text,
)
WAV2VEC2_DIGITS = ShippedModel(
    name="wav2vec2_digits",
    script="spoken",
    build_model=_wav2vec2_digits,
    example_input=lambda: {"input_values": torch.zeros(1, _SECONDS * RATE)},
)


def load_shipped(model: nn.Module, path: Path, *, script: str) -> nn.Module:
    """`model` with the trained weights of `path`, in place and in its own precision; `script` is what made them.

    StorageError when they are missing or do not fit.
    """
    from safetensors.torch import load_file

    name = path.stem
    fix = f"reinstall acm_compiler, or train them: python -m scripts.train_shipped.{script} --out PATH"
    if not path.is_file():
        raise StorageError(f"the weights of {name} are missing", where=str(path), fix=fix)
    try:
        fill(model, unpacked(load_file(path)), where=str(path), fix=fix)
    except ModelSourceError as error:
        what = f"these are not the weights of {name}"
        raise StorageError(what, where=str(path), found=error.found, fix=fix) from error
    return model


def unpacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Floating tensors from integers and what these are worth; others as they are."""
    found = {}
    for name, tensor in tensors.items():
        if f"{name}{SCALE}" in tensors:
            rows = tensor.float().flatten(1) * tensors[f"{name}{SCALE}"][:, None]
            found[name] = rows.view_as(tensor)
        elif not name.endswith(SCALE):
            found[name] = tensor
    return found
