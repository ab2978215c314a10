"""Transformers as people write them for themselves."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers import models
from tests.helpers.models import HEADS, WIDTH, Stack, heads, merged
from tests.zoo.entry import Build, Inputs, Model

HIDDEN = models.HIDDEN


def _stack(*blocks: Callable[[], nn.Module]) -> Build:
    def build() -> tuple[nn.Module, Inputs]:
        return Stack(*(block() for block in blocks)).eval(), models.example()

    return build


class SplitQkv(nn.Module):
    """One block of a small GPT: c_attn split in three, causal attention, MLP in a dictionary of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64), persistent=False)
        parts = {"up": nn.Linear(WIDTH, HIDDEN), "act": nn.GELU(), "down": nn.Linear(HIDDEN, WIDTH)}
        self.mlp = nn.ModuleDict(parts)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads(part) for part in self.c_attn(self.ln_1(x)).split(WIDTH, dim=2))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(self.mask[:, :, : x.size(1), : x.size(1)] == 0, float("-inf"))
        x = x + self.c_proj(merged(F.softmax(scores, dim=-1) @ v))
        m = self.mlp
        return x + m["down"](m["act"](m["up"](self.ln_2(x))))


class ViewedQkv(nn.Module):
    """qkv by view, permute and subscripts, with rotary embeddings on q and k."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, tokens, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        q, k, v = _turned(qkv[0]), _turned(qkv[1]), qkv[2]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, WIDTH))


def _turned(x: Tensor) -> Tensor:
    """Rotary embeddings as complex numbers."""
    angle = torch.outer(torch.arange(x.shape[-2]), 1.0 / 100.0 ** torch.linspace(0, 1, x.shape[-1] // 2))
    turned = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) * torch.polar(torch.ones_like(angle), angle)
    return torch.view_as_real(turned).flatten(-2).type_as(x)


class PerHeadQkv(nn.Module):
    """The rows of qkv lie head by head: q, k, v of the first head, then of the next."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm(x)).unflatten(-1, (HEADS, 3, -1)).movedim(1, 2)
        q, k, v = qkv.unbind(-2)
        return x + self.out(merged(F.scaled_dot_product_attention(q, k, v)))


class PackedKv(nn.Module):
    """Cross attention to a pooled copy of the input: to_q, and keys and values by one to_kv."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.to_q = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.to_kv = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.to_out = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        context = F.avg_pool1d(y.transpose(1, 2), 2, ceil_mode=True).transpose(1, 2)
        k, v = self.to_kv(context).chunk(2, dim=-1)
        attended = (heads(self.to_q(y)) @ heads(k).transpose(-1, -2)).mul(0.5).softmax(-1) @ heads(v)
        return self.to_out(merged(attended)) + x


class ClonedLinears(nn.Module):
    """Four copies of one linear in a list, called in a comprehension."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linears = nn.ModuleList(copy.deepcopy(nn.Linear(WIDTH, WIDTH)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (heads(linear(part)) for linear, part in zip(self.linears, (y, y, y), strict=False))
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
        return x + self.linears[-1](merged(torch.matmul(scores.softmax(dim=-1), v)))


class Geglu(nn.Module):
    """proj to twice the width, the second half through gelu, in a module of its own inside a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, 2 * HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.proj(x).chunk(2, dim=-1)
        return value * F.gelu(gate)


class Adaptive(nn.Module):
    """Norms whose shift, scale and gate come from a condition, as in diffusion transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.condition = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 3 * WIDTH))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(approximate="tanh"), nn.Linear(HIDDEN, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        shift, scale, gate = self.condition(x.mean(1)).chunk(3, dim=-1)
        y = self.norm(x) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)
        return x + gate.unsqueeze(1) * self.mlp(y)


class Macaron(nn.Module):
    """Half an MLP, attention, a gated convolution, half an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = self._half(), self._half()
        self.attention = models.Residual(models.Attention())
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Conv1d(WIDTH, 2 * WIDTH, 3, padding=1)

    def _half(self) -> nn.Sequential:
        up, down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        return nn.Sequential(nn.LayerNorm(WIDTH), up, nn.SiLU(), nn.Dropout(0.1), down, nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x + 0.5 * self.before(x))
        x = x + F.glu(self.mix(self.norm(x).transpose(1, 2)), dim=1).transpose(1, 2)
        return x + 0.5 * self.after(x)


class ByKeyword(nn.Module):
    """Linears and the MLP called by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = models.Attention(), models.Mlp()

    def forward(self, x: Tensor) -> Tensor:
        a = self.attention
        q, k, v = (heads(linear(input=x)) for linear in (a.q, a.k, a.v))
        x = x + a.o(input=merged(F.scaled_dot_product_attention(query=q, key=k, value=v)))
        return x + self.mlp.down(input=F.relu(self.mlp.up(input=x)))


class OneKeyHead(nn.Module):
    """All queries share one key head and one value head, by einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.size = nn.LayerNorm(WIDTH), WIDTH // HEADS
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * self.size)
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        k, v = self.kv(y).split(self.size, -1)
        weights = torch.einsum("bhid,bjd->bhij", heads(self.q(y)), k).softmax(-1)
        return x + self.o(merged(torch.einsum("bhij,bjd->bhid", weights, v)))


class FusedBlock(nn.Module):
    """One matrix in front of attention and MLP together, one behind both."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH + HIDDEN), nn.Linear(WIDTH + HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, hidden = self.into(self.norm(x)).split([WIDTH, WIDTH, WIDTH, HIDDEN], -1)
        mixed = merged(F.scaled_dot_product_attention(heads(q), heads(k), heads(v)))
        return x + self.out(torch.cat([mixed, F.gelu(hidden)], -1))


class GatedSum(nn.Module):
    """A learned gate mixes the branch with the bypass: x + g * (branch - x)."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.gate = models.Mlp(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.lerp(x, self.mlp(x), torch.sigmoid(self.gate(x)))


class Contractions(nn.Module):
    """An MLP of bare weights through inner and tensordot, as code that came from NumPy has it."""

    def __init__(self) -> None:
        super().__init__()
        mlp = models.Mlp()
        self.up, self.shift, self.down = mlp.up.weight, mlp.up.bias, nn.Parameter(mlp.down.weight.T.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tensordot(F.relu(torch.inner(x, self.up) + self.shift), self.down, dims=1)


def _torch_transformer() -> tuple[nn.Module, Inputs]:
    model = nn.Transformer(WIDTH, HEADS, 1, 1, HIDDEN, batch_first=True)
    return model.eval(), (torch.randn(2, 6, WIDTH), torch.randn(2, 5, WIDTH))


def _sequence(*blocks: Any) -> Callable[[], nn.Module]:
    return lambda: models.Residual(nn.Sequential(*(block() for block in blocks)))


_SEPARATE = """
    q,k,v {q,k,v} : 16 16
    o     o       : 16 16"""

MODELS = [
    Model(
        name="own GPT, c_attn split in three",
        build=_stack(SplitQkv, SplitQkv),
        truth="""
            in blocks.#
            qkv c_attn            : 16 48
            o   c_proj            : 16 16
            mlp mlp.up > mlp.down : 16 32 16""",
    ),
    Model(
        name="own attention, qkv chunked",
        build=_stack(models.FusedQkv),
        truth="""
            qkv blocks.0.qkv : 16 48
            o   blocks.0.o   : 16 16""",
    ),
    Model(
        name="own attention, qkv viewed and permuted, rotary",
        build=_stack(ViewedQkv),
        truth="""
            qkv blocks.0.qkv : 16 48
            o   blocks.0.out : 16 16""",
    ),
    Model(
        name="own attention, qkv head by head",
        build=_stack(PerHeadQkv),
        truth="""
            qkv blocks.0.qkv : 16 48
            o   blocks.0.out : 16 16""",
    ),
    Model(
        name="own cross attention, kv in one",
        build=_stack(PackedKv),
        truth="""
            in blocks.0
            q  to_q     : 16 16
            kv to_kv    : 16 32
            o  to_out.0 : 16 16""",
    ),
    Model(
        name="own attention, cloned linears",
        build=_stack(ClonedLinears),
        truth="""
            in blocks.0
            q,k,v linears.{0,1,2} : 16 16
            o     linears.3       : 16 16""",
    ),
    Model(
        name="own attention, one key head",
        build=_stack(OneKeyHead),
        truth="""
            in blocks.0
            q  q  : 16 16
            kv kv : 16 8
            o  o  : 16 16""",
    ),
    Model(
        name="own attention over bare parameters",
        build=_stack(models.Einsum),
        truth="""
            q,k,v blocks.0.w{q,k,v} : 16 16
            o     blocks.0.wo       : 16 16""",
    ),
    Model(
        name="own MLP over bare parameters",
        build=_stack(models.Functional),
        truth="mlp blocks.0.w1 > blocks.0.w2 : 16 32 16",
    ),
    Model(
        name="own GEGLU in a Sequential",
        build=_stack(_sequence(Geglu, lambda: nn.Dropout(0.1), lambda: nn.Linear(HIDDEN, WIDTH))),
        truth="gated blocks.0.inner.0.proj[32:64]*blocks.0.inner.0.proj[0:32] > blocks.0.inner.2 : 16 32 16",
    ),
    Model(
        name="own diffusion block, conditioned norms",
        build=_stack(Adaptive),
        truth="mlp blocks.0.mlp.0 > blocks.0.mlp.2 : 16 32 16",
    ),
    Model(
        name="own conformer block",
        build=_stack(Macaron),
        truth="""
            mlp blocks.0.{before,after}.1 > blocks.0.{before,after}.4 : 16 32 16
            in blocks.0.attention.inner"""
        + _SEPARATE,
    ),
    Model(
        name="own block, called by keyword",
        build=_stack(ByKeyword),
        truth=f"""
            mlp blocks.0.mlp.up > blocks.0.mlp.down : 16 32 16
            in blocks.0.attention{_SEPARATE}""",
    ),
    Model(
        name="own block, attention and MLP in one matrix",
        build=_stack(FusedBlock),
        truth="",
        skips={"blocks.0.into": "packed"},
    ),
    Model(
        name="own block, parallel",
        build=_stack(models.Parallel),
        truth=f"""
            mlp blocks.0.mlp.up > blocks.0.mlp.down : 16 32 16
            in blocks.0.attention{_SEPARATE}""",
    ),
    Model(
        name="own block, bypass mixed by a gate",
        build=_stack(GatedSum),
        # with nothing added, (1 - g) x remains
        truth="mlp blocks.0.mlp.up > blocks.0.mlp.down : 16 32 16",
    ),
    Model(
        name="own block, inner and tensordot",
        build=_stack(Contractions),
        truth="mlp blocks.0.up > blocks.0.down : 16 32 16",
    ),
    Model(
        name="own block, called three times",
        build=lambda: (models.shared_block().eval(), models.example()),
        truth="mlp blocks.0.inner.up > blocks.0.inner.down : 16 32 16 x3",
    ),
    Model(
        name="torch Transformer",
        build=_torch_transformer,
        truth="""
            in encoder.layers.0
            q,k,v self_attn.{q,k,v}_proj : 16 16
            o     self_attn.out_proj     : 16 16
            mlp   linear1 > linear2      : 16 32 16
            in decoder.layers.0
            q,k,v {self_attn,multihead_attn}.{q,k,v}_proj : 16 16
            o     {self_attn,multihead_attn}.out_proj     : 16 16
            mlp   linear1 > linear2                       : 16 32 16""",
    ),
]
