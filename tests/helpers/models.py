"""Small models to look at: blocks as users write them, and tiny versions of published ones.

Every user-written block maps [batch, tokens, WIDTH] to the same shape and sits in a `Stack` between an
embedding and a classifier.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

WIDTH, HEADS, HIDDEN = 16, 4, 32
BATCH, TOKENS, FEATURES = 2, 5, 6


class Stack(nn.Module):
    """Embedding, blocks, norm, mean over tokens, classifier: [BATCH, TOKENS, FEATURES] -> [BATCH, 3]."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def example() -> Tensor:
    """An input of `Stack`."""
    return torch.randn(BATCH, TOKENS, FEATURES)


def heads(x: Tensor) -> Tensor:
    """[batch, tokens, features] -> [batch, heads, tokens, features of one head]."""
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def merged(x: Tensor) -> Tensor:
    """The inverse of `heads`."""
    return x.transpose(1, 2).flatten(-2)


class Attention(nn.Module):
    """Four linears around scaled_dot_product_attention, no norm, no bypass."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.o(merged(F.scaled_dot_product_attention(heads(self.q(x)), heads(self.k(x)), heads(self.v(x)))))


class Mlp(nn.Module):
    """Linear, activation, linear."""

    def __init__(self, act: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.act = act or nn.GELU()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Residual(nn.Module):
    """x + inner(norm(x))."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


class Flattened(Residual):
    """The same, with examples and tokens in one axis inside, as shared experts see them; takes a padding mask."""

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return x + self.inner(self.norm(x).view(-1, WIDTH)).view(x.shape)


class FusedQkv(nn.Module):
    """One linear for q, k and v, attention written out, then o; a residual around it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.o = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads(part) for part in self.qkv(self.norm(x)).chunk(3, dim=-1))
        weights = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(-1)
        return x + self.o(merged(weights @ v))


class Einsum(nn.Module):
    """Everything by einsum over bare matrices [out, in] (queries, keys, values) and [in, out] (output)."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Parameter(0.1 * torch.randn(WIDTH, WIDTH)) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (torch.einsum("bsd,ed->bse", h, w).unflatten(-1, (HEADS, -1)) for w in (self.wq, self.wk, self.wv))
        weights = torch.softmax(torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.5, dim=-1)
        mixed = torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(-2)
        return x + torch.einsum("...i,io->...o", mixed, self.wo)


class Functional(nn.Module):
    """An MLP of bare parameters: F.linear for the first layer, a product and a sum for the second."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.b1 = nn.Parameter(0.1 * torch.randn(HIDDEN, WIDTH)), nn.Parameter(torch.zeros(HIDDEN))
        self.w2, self.b2 = nn.Parameter(0.1 * torch.randn(HIDDEN, WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + (F.silu(F.linear(x, self.w1, self.b1)) @ self.w2 + self.b2)


class ChunkedGlu(nn.Module):
    """Both branches of a gated MLP in one linear, the second half activated."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.up(x).chunk(2, dim=-1)
        return x + self.down(value * torch.sigmoid(gate))


class SwiGlu(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Escaping(nn.Module):
    """An MLP whose hidden value is also used to scale the result."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.up(x))
        return x + self.down(hidden) * hidden.mean(-1, keepdim=True)


class Parallel(nn.Module):
    """x + attention(norm(x)) + mlp(norm(x)), as in GPT-J."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(WIDTH), Attention(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return self.attention(h) + self.mlp(h) + x


class PostNorm(nn.Module):
    """norm(x + inner(x)), as in BERT."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), inner

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.inner(x))


class LayerScale(nn.Module):
    """x + scale * dropout(inner(norm(x))) with a learned scale per channel."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner, self.dropout = nn.LayerNorm(WIDTH), inner, nn.Dropout(0.1)
        self.scale = nn.Parameter(0.1 * torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.dropout(self.inner(self.norm(x)))


class BranchNorm(nn.Module):
    """x + norm(inner(x)), as in Swin v2: a norm between branch and sum."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.inner(x))


def shared_block() -> Stack:
    """One block called three times."""
    block = Residual(Mlp())
    return Stack(block, block, block)


_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def torchvision_vit() -> tuple[nn.Module, Tensor]:
    """Two blocks of width 32 on 4 x 4 patches of 32 x 32 pictures, classes token first."""
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, 8, 2, 4, 32, 64, dropout=0.1, num_classes=10), torch.randn(2, 3, 32, 32)


def hf_vit() -> tuple[nn.Module, Tensor]:
    """A classifier over two blocks of width 32."""
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(image_size=16, patch_size=4, **_SMALL)), torch.randn(2, 3, 16, 16)


def hf_bert() -> tuple[nn.Module, Tensor]:
    """A sequence classifier over two post-norm blocks of width 32."""
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(vocab_size=50, **_SMALL)), torch.randint(0, 50, (2, 7))


def hf_wav2vec2() -> tuple[nn.Module, Tensor]:
    """A CTC model with two convolutions and two blocks of width 32."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    config = Wav2Vec2Config(
        vocab_size=30,
        conv_dim=(16, 16),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        **_SMALL,
    )
    return Wav2Vec2ForCTC(config), torch.randn(2, 400)


def hf_gpt2() -> tuple[nn.Module, Tensor]:
    """A language model of two blocks of width 32, packed qkv, weights stored [in, out]."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config), torch.randint(0, 50, (2, 7))


def hf_llama() -> tuple[nn.Module, Tensor]:
    """A language model of two blocks of width 32 with two key heads for four query heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(vocab_size=50, num_key_value_heads=2, **_SMALL)), torch.randint(0, 50, (2, 7))


def torch_encoder(*, batch_first: bool) -> tuple[nn.Module, Tensor]:
    """torch's own encoder, two post-norm layers of width 32."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the nested tensors that such layouts cannot use
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=batch_first), 2)
    return encoder, torch.randn(*((2, 7) if batch_first else (7, 2)), 32)


def in_float64(make: Callable[[], tuple[nn.Module, Any]]) -> tuple[nn.Module, Any]:
    """A model in float64 that answers with more than zeros, and its example."""
    torch.manual_seed(3)
    model, x = make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.double().eval(), tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, x)
