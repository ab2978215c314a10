"""ToMe (arXiv 2210.09461): the tokens of an image merge from layer to layer, without training.

In every block, between attention and MLP, tokens are split alternately into two sets; each token of the first knows the
one of the second whose keys, the mean over heads, are nearest by cosine. The r nearest pairs become one token each, a
mean weighted by how many patches a token stands for, and attention adds the logarithm of that number to its scores.
The class token never merges. r is the same in every layer, up to rounding: as a mean it need not be whole.

Shapes: B images, S tokens, A and M tokens of the two sets, D features, H heads.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from acm_compiler.baselines.count import macs_of_call
from acm_compiler.baselines.method import BatchResult, Method, Subject
from acm_compiler.data import Batch
from acm_compiler.planning.plan import Plan
from acm_compiler.progress import Say
from acm_compiler.sources.inputs import call_model

_STEPS = 12  # of bisection for r: to a fraction of a token


class ToMe(Method):
    """Vision transformers of torchvision's class, with r set by the budget."""

    title = "ToMe: tokens merged"

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self.model = MergingTransformer(copy.deepcopy(subject.dense)).eval()
        self.settings: dict[float, tuple[float, int]] = {}  # of each budget: r, and the MACs of one image

    @classmethod
    def refuses(cls, model: nn.Module, plan: Plan) -> str | None:
        """A reason for all models but torchvision's vision transformers."""
        kind = f"{type(model).__module__}.{type(model).__qualname__}"
        if kind == "torchvision.models.vision_transformer.VisionTransformer":
            return None
        return f"it merges the patches of torchvision's VisionTransformer, and this is a {type(model).__name__}"

    @classmethod
    def floor(cls, model: nn.Module, plan: Plan) -> float:
        """Half of the tokens merged in every layer."""
        blocks, width, hidden, tokens = sizes_of(model)
        total, whole, now = 0.0, 0.0, tokens
        for _ in range(blocks):
            left = now - (now - 1) // 2
            total += 4 * now * width**2 + 2 * now**2 * width + 2 * left * width * hidden
            whole += 4 * tokens * width**2 + 2 * tokens**2 * width + 2 * tokens * width * hidden
            now = left
        return 1 - (whole - total) / (plan.model.dense_macs / plan.model.batch)

    @torch.no_grad()
    def convert(self, budgets: Sequence[float], say: Say) -> None:
        """Find the r of each budget: the least that costs no more."""
        inputs = self.subject.task.inputs(next(iter(self.subject.fit())))
        assert isinstance(inputs, Tensor)
        dense, most = macs_of_call(self.subject.dense, inputs[:1]), sizes_of(self.subject.dense)[3] / 2
        for budget in budgets:
            low, high = 0.0, most
            for _ in range(_STEPS):
                self.model.rate = (low + high) / 2
                if macs_of_call(self.model, inputs[:1]) > budget * dense:
                    low = self.model.rate
                else:
                    high = self.model.rate
            self.model.rate = 0.0 if budget >= 1 else high
            self.settings[budget] = self.model.rate, macs_of_call(self.model, inputs[:1])

    @torch.no_grad()
    def run(self, batch: Batch, budget: float) -> BatchResult:
        """One forward; all images cost the same."""
        self.model.rate, macs = self.settings[budget]
        score_B = self.score(call_model(self.model, self.subject.task.inputs(batch)), batch)
        return BatchResult(score_B, torch.full((len(score_B),), float(macs), dtype=torch.float64))


def sizes_of(model: nn.Module) -> tuple[int, int, int, int]:
    """Blocks, width, hidden width and tokens of a vision transformer."""
    encoder = model.encoder
    return len(encoder.layers), model.hidden_dim, model.mlp_dim, encoder.pos_embedding.shape[1]  # type: ignore


class MergingTransformer(nn.Module):
    """A vision transformer's own modules, with `rate` tokens merged in every block."""

    def __init__(self, vit: nn.Module) -> None:
        super().__init__()
        self.vit, self.rate = vit, 0.0

    def forward(self, image: Tensor) -> Tensor:
        """Logits [B, classes]."""
        vit = self.vit
        x_BSD = vit._process_input(image)  # type: ignore[operator]
        x_BSD = torch.cat([vit.class_token.expand(len(x_BSD), -1, -1), x_BSD], dim=1)  # type: ignore
        x_BSD = vit.encoder.dropout(x_BSD + vit.encoder.pos_embedding)  # type: ignore
        size_BS = x_BSD.new_ones(x_BSD.shape[:2])
        for place, block in enumerate(vit.encoder.layers):  # type: ignore
            merged = int((place + 1) * self.rate + 1e-9) - int(place * self.rate + 1e-9)
            x_BSD, size_BS = self._block(block, x_BSD, size_BS, merged)
        return vit.heads(vit.encoder.ln(x_BSD)[:, 0])  # type: ignore

    def _block(self, block: nn.Module, x_BSD: Tensor, size_BS: Tensor, merged: int) -> tuple[Tensor, Tensor]:
        attended, keys_BSD = attend(block.self_attention, block.ln_1(x_BSD), size_BS)  # type: ignore
        x_BSD = x_BSD + block.dropout(attended)  # type: ignore[operator]
        x_BSD, size_BS = merge(x_BSD, size_BS, keys_BSD, min(merged, (x_BSD.shape[1] - 1) // 2))
        return x_BSD + block.mlp(block.ln_2(x_BSD)), size_BS  # type: ignore[operator]


def attend(attention: nn.MultiheadAttention, x_BSD: Tensor, size_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to tokens in proportion to their size, and the keys, the mean over heads."""
    heads = attention.num_heads
    packed = F.linear(x_BSD, attention.in_proj_weight, attention.in_proj_bias).chunk(3, dim=-1)
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in packed)
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=size_BS.log()[:, None, None, :])
    return attention.out_proj(mixed.transpose(1, 2).flatten(2)), k.mean(1)


def merge(x_BSD: Tensor, size_BS: Tensor, keys_BSD: Tensor, merged: int) -> tuple[Tensor, Tensor]:
    """The tokens with the `merged` nearest pairs made one, and the sizes of all."""
    if merged < 1:
        return x_BSD, size_BS
    keys_BSD = F.normalize(keys_BSD, dim=-1)
    similarity_BAM = keys_BSD[:, ::2] @ keys_BSD[:, 1::2].transpose(1, 2)
    similarity_BAM[:, 0] = -torch.inf  # the class token
    best_BA, partner_BA = similarity_BAM.max(-1)
    order_BA = best_BA.argsort(dim=1, descending=True, stable=True)
    gone_BR, stay_BA = order_BA[:, :merged], order_BA[:, merged:].sort(dim=1).values
    into_BR = partner_BA.gather(1, gone_BR)
    weighted_BSX = torch.cat([x_BSD * size_BS[..., None], size_BS[..., None]], dim=-1)
    first, second = weighted_BSX[:, ::2], weighted_BSX[:, 1::2]
    wide = weighted_BSX.shape[-1]
    moved = first.gather(1, gone_BR[..., None].expand(-1, -1, wide))
    second = second.scatter_add(1, into_BR[..., None].expand(-1, -1, wide), moved)
    left = torch.cat([first.gather(1, stay_BA[..., None].expand(-1, -1, wide)), second], dim=1)
    return left[..., :-1] / left[..., -1:], left[..., -1]
