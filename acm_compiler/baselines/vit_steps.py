"""Vision transformers of torchvision, transformers and timm, run a step at a time by their own modules.

Shapes: B images, S tokens, D features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Steps(nn.Module, ABC):
    """A vision transformer's own modules, to be run one after the other; without dropout in eval mode."""

    models: ClassVar[tuple[str, ...]]
    """Classes, by module and name."""
    known: ClassVar[str]
    """The same, in words."""

    def __init__(self, vit: nn.Module) -> None:
        super().__init__()
        self.vit: Any = vit
        self.blocks = self.blocks_of(vit)

    @staticmethod
    @abstractmethod
    def blocks_of(vit: Any) -> Any:
        """The blocks, in their order."""

    @staticmethod
    @abstractmethod
    def tokens_of(vit: Any) -> int:
        """Tokens of an image, those that are no patches among them."""

    @staticmethod
    def lacks(vit: Any) -> str | None:
        """A reason why a model of these classes cannot be run so."""
        return None

    @abstractmethod
    def embed(self, image: Tensor) -> Tensor:
        """Tokens [B, S, D], the class token first."""

    @abstractmethod
    def attend(self, block: Any, x_BSD: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The addition of attention to the tokens, and its keys, the mean over heads; `bias` is added to its scores."""

    @abstractmethod
    def transform(self, block: Any, x_BSD: Tensor) -> Tensor:
        """The addition of the MLP to the tokens."""

    @abstractmethod
    def head(self, x_BD: Tensor) -> Tensor:
        """Logits of class tokens."""

    def run_block(self, place: int, x_BSD: Tensor, bias: Tensor | None = None) -> Tensor:
        """One block; `bias` is added to the scores of attention, [B, 1, 1, S]."""
        block = self.blocks[place]
        x_BSD = x_BSD + self.attend(block, x_BSD, bias)[0]
        return x_BSD + self.transform(block, x_BSD)


class TorchvisionSteps(Steps):
    """torchvision's `VisionTransformer`."""

    models = ("torchvision.models.vision_transformer.VisionTransformer",)
    known = "torchvision's VisionTransformer"

    @staticmethod
    def blocks_of(vit: Any) -> Any:
        """The encoder's layers."""
        return vit.encoder.layers

    @staticmethod
    def tokens_of(vit: Any) -> int:
        """The number of positions."""
        return vit.encoder.pos_embedding.shape[1]

    def embed(self, image: Tensor) -> Tensor:
        """Patches behind the class token."""
        x_BSD = self.vit._process_input(image)
        x_BSD = torch.cat([self.vit.class_token.expand(len(x_BSD), -1, -1), x_BSD], dim=1)
        return x_BSD + self.vit.encoder.pos_embedding

    def attend(self, block: Any, x_BSD: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The packed projections of `nn.MultiheadAttention`, which keeps its keys to itself."""
        attention: nn.MultiheadAttention = block.self_attention
        packed = F.linear(block.ln_1(x_BSD), attention.in_proj_weight, attention.in_proj_bias).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (attention.num_heads, -1)).transpose(1, 2) for part in packed)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return attention.out_proj(mixed.transpose(1, 2).flatten(2)), k.mean(1)

    def transform(self, block: Any, x_BSD: Tensor) -> Tensor:
        """The MLP behind its norm."""
        return block.mlp(block.ln_2(x_BSD))

    def head(self, x_BD: Tensor) -> Tensor:
        """The last norm and the head."""
        return self.vit.heads(self.vit.encoder.ln(x_BD))


class TransformersSteps(Steps):
    """transformers' `ViTForImageClassification` and `DeiTForImageClassification`."""

    models = (
        "transformers.models.vit.modeling_vit.ViTForImageClassification",
        "transformers.models.deit.modeling_deit.DeiTForImageClassification",
    )
    known = "transformers' ViT- and DeiTForImageClassification"

    @staticmethod
    def blocks_of(vit: Any) -> Any:
        """The layers of the model inside."""
        return vit.base_model.layers

    @staticmethod
    def tokens_of(vit: Any) -> int:
        """The number of positions."""
        return vit.base_model.embeddings.position_embeddings.shape[1]

    def embed(self, image: Tensor) -> Tensor:
        """The model's own embeddings."""
        return self.vit.base_model.embeddings(image)

    def attend(self, block: Any, x_BSD: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The block's own attention."""
        return _with_keys(block.attention, block.attention.k_proj, block.layernorm_before(x_BSD), bias)

    def transform(self, block: Any, x_BSD: Tensor) -> Tensor:
        """The MLP behind its norm."""
        return block.mlp(block.layernorm_after(x_BSD))

    def head(self, x_BD: Tensor) -> Tensor:
        """The last norm and the classifier."""
        return self.vit.classifier(self.vit.base_model.layernorm(x_BD))


class TimmSteps(Steps):
    """timm's `VisionTransformer` with a class token."""

    models = ("timm.models.vision_transformer.VisionTransformer",)
    known = "timm's VisionTransformer"

    @staticmethod
    def blocks_of(vit: Any) -> Any:
        """Its blocks."""
        return vit.blocks

    @staticmethod
    def tokens_of(vit: Any) -> int:
        """Patches, and those before them."""
        return vit.patch_embed.num_patches + vit.num_prefix_tokens

    @staticmethod
    def lacks(vit: Any) -> str | None:
        """A reason for models that do not answer from the class token, or whose blocks take other arguments."""
        if vit.cls_token is None or vit.global_pool != "token":
            return "it reads the class token, and this model answers from a mean of its tokens"
        block = f"{type(vit.blocks[0]).__name__} with {type(vit.blocks[0].attn).__name__}"
        return None if block == "Block with Attention" else f"it does not know blocks of {block}"

    def embed(self, image: Tensor) -> Tensor:
        """Patches behind the class token and registers."""
        return self.vit.norm_pre(self.vit.patch_drop(self.vit._pos_embed(self.vit.patch_embed(image))))

    def attend(self, block: Any, x_BSD: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The block's own attention."""
        attended, keys_BSD = _with_keys(block.attn, block.attn.k_norm, block.norm1(x_BSD), bias)
        return block.ls1(attended), keys_BSD

    def transform(self, block: Any, x_BSD: Tensor) -> Tensor:
        """The MLP behind its norm, scaled."""
        return block.ls2(block.mlp(block.norm2(x_BSD)))

    def head(self, x_BD: Tensor) -> Tensor:
        """The last norms and the classifier."""
        return self.vit.head(self.vit.fc_norm(self.vit.norm(x_BD)))


KNOWN: tuple[type[Steps], ...] = (TorchvisionSteps, TransformersSteps, TimmSteps)


def _with_keys(attention: Any, keys: nn.Module, x_BSD: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The output of an attention, and the mean over heads of what its part `keys` gave meanwhile, [B, S, D]."""
    seen: list[Tensor] = []
    handle = keys.register_forward_hook(lambda module, args, output: seen.append(output))
    try:
        found = attention(x_BSD, bias)
    finally:
        handle.remove()
    (k,) = seen
    if k.ndim == 3:  # before it is split into heads
        k = k.unflatten(-1, (attention.num_attention_heads, -1)).transpose(1, 2)
    return found if isinstance(found, Tensor) else found[0], k.mean(1)


def kind_of(model: nn.Module) -> type[Steps] | None:
    """The class here that runs models of this one; None where there is none."""
    name = f"{type(model).__module__}.{type(model).__name__}"
    return next((kind for kind in KNOWN if name in kind.models), None)


def steps_of(model: nn.Module) -> Steps:
    """A vision transformer, which must be known here, to be run a step at a time."""
    kind = kind_of(model)
    assert kind is not None
    return kind(model)
