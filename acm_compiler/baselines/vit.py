"""Vision transformers of torchvision's class, a step at a time: for methods that leave out tokens or blocks.

Shapes: B images, S tokens, D features.
"""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from acm_compiler.baselines.method import Method
from acm_compiler.data import Batch
from acm_compiler.planning.plan import Plan

VIT = "torchvision.models.vision_transformer.VisionTransformer"


class OnVit(Method):
    """Acts on torchvision's `VisionTransformer`."""

    @classmethod
    def refuses(cls, model: nn.Module, plan: Plan) -> str | None:
        """A reason for all models but torchvision's vision transformers."""
        module, name = type(model).__module__, type(model).__name__
        if f"{module}.{name}" == VIT:
            return None
        if name.endswith("ForCTC"):
            return "it runs fewer tokens, and CTC reads a label from every frame"
        return f"it acts on torchvision's VisionTransformer, and this is a {name} of {module}"

    @classmethod
    def floor(cls, model: nn.Module, plan: Plan) -> float:
        """One block for all tokens, and what lies outside of the blocks."""
        return cls.outside_share(model, plan) + cls.block_share(model, plan)

    @staticmethod
    def block_share(model: nn.Module, plan: Plan) -> float:
        """The share of the dense MACs that one block takes."""
        return block_macs(model, sizes_of(model)[3]) / (plan.model.dense_macs / plan.model.batch)

    @classmethod
    def outside_share(cls, model: nn.Module, plan: Plan) -> float:
        """The share of the dense MACs outside of the blocks."""
        return 1 - sizes_of(model)[0] * cls.block_share(model, plan)

    def image(self, batch: Batch) -> Tensor:
        """The images of a batch."""
        found = self.subject.task.inputs(batch)
        assert isinstance(found, Tensor)
        return found


class Steps(nn.Module):
    """A vision transformer's own modules, to be run one after the other; without dropout."""

    def __init__(self, vit: nn.Module) -> None:
        super().__init__()
        self.vit = vit
        self.blocks: nn.ModuleList = vit.encoder.layers  # type: ignore

    def embed(self, image: Tensor) -> Tensor:
        """Tokens [B, S, D], the class token first."""
        x_BSD = self.vit._process_input(image)  # type: ignore[operator]
        x_BSD = torch.cat([self.vit.class_token.expand(len(x_BSD), -1, -1), x_BSD], dim=1)  # type: ignore
        return x_BSD + self.vit.encoder.pos_embedding  # type: ignore

    def head(self, x_BD: Tensor) -> Tensor:
        """Logits of class tokens."""
        return self.vit.heads(self.vit.encoder.ln(x_BD))  # type: ignore


def run_block(block: nn.Module, x_BSD: Tensor, bias: Tensor | None = None) -> Tensor:
    """One block; `bias` is added to the scores of attention, [B, 1, 1, S]."""
    x_BSD = x_BSD + attend(block.self_attention, block.ln_1(x_BSD), bias)[0]  # type: ignore
    return x_BSD + block.mlp(block.ln_2(x_BSD))  # type: ignore[operator]


def attend(attention: nn.MultiheadAttention, x_BSD: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention with `bias` added to its scores, and the keys, the mean over heads."""
    heads = attention.num_heads
    packed = F.linear(x_BSD, attention.in_proj_weight, attention.in_proj_bias).chunk(3, dim=-1)
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in packed)
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    return attention.out_proj(mixed.transpose(1, 2).flatten(2)), k.mean(1)


def sizes_of(model: nn.Module) -> tuple[int, int, int, int]:
    """Blocks, width, hidden width and tokens of a vision transformer."""
    encoder = model.encoder
    return len(encoder.layers), model.hidden_dim, model.mlp_dim, encoder.pos_embedding.shape[1]  # type: ignore


Count = TypeVar("Count", int, Tensor)


def block_macs(model: nn.Module, tokens: Count) -> Count:
    """Multiply-adds of one block for so many tokens of each image."""
    _, width, hidden, _ = sizes_of(model)
    return layer_macs(width, hidden, tokens)


def layer_macs(width: int, hidden: int, tokens: Count) -> Count:
    """Multiply-adds of attention and an MLP of two layers for so many tokens of each example."""
    return tokens * (4 * width**2 + 2 * width * hidden) + 2 * tokens**2 * width


def mlp_macs(model: nn.Module) -> int:
    """Multiply-adds of an MLP for one token."""
    _, width, hidden, _ = sizes_of(model)
    return 2 * width * hidden
