"""A-ViT (arXiv 2112.07658): every token halts by itself, and is left out of the blocks that follow.

After each block a token's halting score is a sigmoid of its first feature; it halts once the sum of its scores reaches
1, and the image's answer is the mean of its class token over the blocks, weighted by the scores. A ponder loss and a
prior over the depth at which tokens halt lead training to a budget, so there is a model for each budget. Beyond the
paper, the sigmoid's offset is one for each block, starts where the scores are the prior's, and follows the cost of the
batches: in a training this short the losses alone miss the budget. An image whose class token has halted is done.

Shapes: B images, S tokens, D features, L blocks.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from acm_compiler.baselines.acms import in_percent
from acm_compiler.baselines.method import BatchResult, setting_within
from acm_compiler.baselines.trained.train import to_dense, train
from acm_compiler.baselines.vit import OnVit, block_macs
from acm_compiler.baselines.vit_steps import steps_of
from acm_compiler.data import Batch
from acm_compiler.progress import Say

_LR = 5e-4
_HALTED = 0.99  # of the sum of scores
_PONDER, _PRIOR = 5e-4, 0.01  # weights of the losses; the paper's prior has 0.1, which was worse here
_SCALE = 5.0  # of the first feature in a score
_GAIN = 0.05  # of the offset that follows the cost
_FAR = 30.0  # an offset that halts all tokens, or none
_HALVINGS = 14
_SEEN = 512  # images to find the last offset on


class HaltingTransformer(nn.Module):
    """A vision transformer whose tokens halt. `shift` is added to all halting scores; `costs_B`: of the last batch."""

    prior_L: Tensor
    shift: Tensor

    def __init__(self, vit: nn.Module, depth: float) -> None:
        super().__init__()
        self.steps = steps_of(vit)
        blocks = torch.arange(1, len(self.steps.blocks) + 1)
        self.register_buffer("prior_L", torch.softmax(-0.5 * (blocks - depth).square(), 0))
        self.scale = nn.Parameter(torch.tensor(float(_SCALE)))
        self.offset_L = nn.Parameter(torch.logit(self.prior_L.clone(), eps=1e-4))
        self.register_buffer("shift", torch.zeros(()))
        self.costs_B = torch.empty(0)

    def _scores(self, x_BSD: Tensor, place: int) -> Tensor:
        if place + 1 == len(self.steps.blocks):
            return torch.ones_like(x_BSD[..., 0])
        return torch.sigmoid(self.scale * x_BSD[..., 0] + self.offset_L[place] + self.shift)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """Logits, and the loss of halting; halted tokens are masked here."""
        x_BSD = self.steps.embed(image)
        sum_BS, runs_BS = torch.zeros_like(x_BSD[..., 0]), torch.ones_like(x_BSD[..., 0], dtype=torch.bool)
        class_BD, ponder, mass = torch.zeros_like(x_BSD[:, 0]), torch.zeros_like(x_BSD[0, 0, 0]), []
        costs_B = torch.zeros(len(x_BSD), device=x_BSD.device)
        for place in range(len(self.steps.blocks)):
            costs_B = costs_B + block_macs(self.steps.vit, (runs_BS & runs_BS[:, :1]).sum(1))
            bias = torch.where(runs_BS, 0.0, -1e4)[:, None, None, :]  # not infinite: all of an image may have halted
            x_BSD = torch.where(runs_BS[..., None], self.steps.run_block(place, x_BSD, bias), x_BSD)
            weight_BS, halts_BS, sum_BS = self._halt(x_BSD, place, sum_BS)
            weight_BS = weight_BS * runs_BS
            class_BD = class_BD + weight_BS[:, :1] * x_BSD[:, 0]
            ponder = ponder + (runs_BS * (1 + halts_BS * weight_BS)).mean()
            mass.append(weight_BS.mean())
            runs_BS = runs_BS & ~halts_BS
        self.costs_B, mass_L = costs_B, torch.stack(mass)
        prior = (mass_L * (mass_L.clamp_min(1e-9) / self.prior_L).log()).sum()
        return self.steps.head(class_BD), _PONDER * ponder + _PRIOR * prior

    def _halt(self, x_BSD: Tensor, place: int, sum_BS: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The weight of this block for each token, whether it halts here, and the sums of scores so far."""
        score_BS = self._scores(x_BSD, place)
        halts_BS = sum_BS + score_BS >= _HALTED
        return torch.where(halts_BS, 1 - sum_BS, score_BS), halts_BS, sum_BS + score_BS

    @torch.no_grad()
    def execute(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """Logits, and the MACs of the blocks for each image; images with as many tokens left run together."""
        x_BSD = self.steps.embed(image)
        sum_BS, runs_BS = torch.zeros_like(x_BSD[..., 0]), torch.ones_like(x_BSD[..., 0], dtype=torch.bool)
        class_BD, macs_B = torch.zeros_like(x_BSD[:, 0]), torch.zeros(len(x_BSD), dtype=torch.float64)
        for place in range(len(self.steps.blocks)):
            counts_B = runs_BS.sum(1)
            for count in counts_B[counts_B > 0].unique().tolist():
                rows = (counts_B == count).nonzero()[:, 0]
                index = runs_BS[rows].nonzero()[:, 1].view(len(rows), count, 1).expand(-1, -1, x_BSD.shape[-1])
                part = self.steps.run_block(place, x_BSD[rows].gather(1, index))
                x_BSD[rows] = x_BSD[rows].scatter(1, index, part)
                macs_B[rows.cpu()] += float(block_macs(self.steps.vit, count))
            weight_BS, halts_BS, sum_BS = self._halt(x_BSD, place, sum_BS)
            class_BD += (weight_BS * runs_BS)[:, :1] * x_BSD[:, 0]
            runs_BS = runs_BS & ~halts_BS
            runs_BS = runs_BS & runs_BS[:, :1]
        return self.steps.head(class_BD), macs_B


class Avit(OnVit):
    """A model for each budget, each trained by the same number of steps."""

    title, trains = "A-ViT: tokens that halt, a model for each budget", True

    def convert(self, budgets: Sequence[float], say: Say) -> None:
        """Train a model for each budget, and set it to this budget on the examples to fit to."""
        self.models: dict[float, HaltingTransformer] = {}
        dense, plan = self.subject.dense, self.subject.plan
        self.macs = plan.model.dense_macs / plan.model.batch
        for budget in budgets:
            most = (budget - self.outside_share(dense, plan)) * self.macs
            depth = most / (self.block_share(dense, plan) * self.macs)
            model = HaltingTransformer(copy.deepcopy(dense), depth).to(next(dense.parameters()).device).eval()
            self._set(model, most)
            self._learn(model, most, f"avit at {in_percent(budget)}", say)
            self._set(model, most)
            self.models[budget] = model

    def _learn(self, model: HaltingTransformer, most: float, name: str, say: Say) -> None:
        def loss(batch: Batch, wanted: Tensor) -> Tensor:
            logits, halting = model(self.image(batch))
            model.shift += _GAIN * (float(model.costs_B.mean()) / most - 1)
            return to_dense(self.subject, logits, batch, wanted) + halting

        train(name, model, loss, self.subject, lr=_LR, say=say)
        model.requires_grad_(False)

    def _set(self, model: HaltingTransformer, most: float) -> None:
        """Find the smallest shift at which the blocks cost no more."""
        images = torch.cat([self.image(batch) for batch in self.subject.fit()])[:_SEEN]

        def cost(shift: float) -> float:
            model.shift.fill_(shift)
            return float(model.execute(images)[1].mean())

        start = float(model.shift)
        model.shift.fill_(setting_within(cost, most, cheap=start + _FAR, dear=start - _FAR, halvings=_HALVINGS))

    def run(self, batch: Batch, budget: float) -> BatchResult:
        """One forward, in which tokens halt."""
        logits, macs_B = self.models[budget].execute(self.image(batch))
        rest = self.outside_share(self.subject.dense, self.subject.plan) * self.macs
        return BatchResult(self.score(logits, batch), macs_B + round(rest))
