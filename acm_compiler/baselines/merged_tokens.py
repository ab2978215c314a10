"""ToMe (arXiv 2210.09461): the tokens of an image merge from layer to layer, without training.

In every block, between attention and MLP, tokens are split alternately into two sets; each token of the first knows the
one of the second whose keys, the mean over heads, are nearest by cosine. The r nearest pairs become one token each, a
mean weighted by how many patches a token stands for, and attention adds the logarithm of that number to its scores.
The class token never merges. r is the same in every layer, up to rounding: as a mean it need not be whole.

Shapes: B images, S tokens, A and M tokens of the two sets, D features.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from acm_compiler.baselines.method import BatchResult, Subject, macs_of_call, setting_within
from acm_compiler.baselines.vit import OnVit, block_macs, mlp_macs, sizes_of
from acm_compiler.baselines.vit_steps import steps_of
from acm_compiler.data import Batch
from acm_compiler.planning.plan import Plan
from acm_compiler.progress import Say
from acm_compiler.sources.inputs import call_model

_HALVINGS = 12  # for r: to a fraction of a token


class ToMe(OnVit):
    """Vision transformers with r set by the budget."""

    title = "ToMe: tokens merged"

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self.model = MergingTransformer(copy.deepcopy(subject.dense)).eval()
        self.settings: dict[float, tuple[float, int]] = {}  # of each budget: r, and the MACs of one image

    @classmethod
    def floor(cls, model: nn.Module, plan: Plan) -> float:
        """Half of the tokens merged in every layer."""
        blocks, tokens = sizes_of(model).blocks, sizes_of(model).tokens
        saved, now = 0.0, tokens
        for _ in range(blocks):
            left = now - (now - 1) // 2
            # attention sees the tokens before the merging, the MLP those that are left
            saved += block_macs(model, tokens) - block_macs(model, now) + (now - left) * mlp_macs(model)
            now = left
        return 1 - saved / (plan.model.dense_macs / plan.model.batch)

    @torch.no_grad()
    def convert(self, budgets: Sequence[float], say: Say) -> None:
        """Find the r of each budget: the least that costs no more."""
        image = self.image(next(iter(self.subject.fit())))[:1]
        dense, most = macs_of_call(self.subject.dense, image), sizes_of(self.subject.dense).tokens / 2

        def cost(rate: float) -> float:
            self.model.rate = rate
            return macs_of_call(self.model, image)

        for budget in budgets:
            rate = setting_within(cost, budget * dense, cheap=most, dear=0.0, halvings=_HALVINGS) if budget < 1 else 0.0
            self.settings[budget] = rate, int(cost(rate))

    @torch.no_grad()
    def run(self, batch: Batch, budget: float) -> BatchResult:
        """One forward; all images cost the same."""
        self.model.rate, macs = self.settings[budget]
        score_B = self.score(call_model(self.model, self.image(batch)), batch)
        return BatchResult(score_B, torch.full((len(score_B),), float(macs), dtype=torch.float64))


class MergingTransformer(nn.Module):
    """A vision transformer's own modules, with `rate` tokens merged in every block."""

    def __init__(self, vit: nn.Module) -> None:
        super().__init__()
        self.steps = steps_of(vit)
        self.rate = 0.0

    def forward(self, image: Tensor) -> Tensor:
        """Logits [B, classes]."""
        x_BSD = self.steps.embed(image)
        size_BS = x_BSD.new_ones(x_BSD.shape[:2])
        for place, block in enumerate(self.steps.blocks):
            merged = int((place + 1) * self.rate + 1e-9) - int(place * self.rate + 1e-9)
            x_BSD, size_BS = self._block(block, x_BSD, size_BS, merged)
        return self.steps.head(x_BSD[:, 0])

    def _block(self, block: nn.Module, x_BSD: Tensor, size_BS: Tensor, merged: int) -> tuple[Tensor, Tensor]:
        in_proportion = size_BS.log()[:, None, None, :]
        attended, keys_BSD = self.steps.attend(block, x_BSD, in_proportion)
        x_BSD, size_BS = merge(x_BSD + attended, size_BS, keys_BSD, min(merged, (x_BSD.shape[1] - 1) // 2))
        return x_BSD + self.steps.transform(block, x_BSD), size_BS


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
