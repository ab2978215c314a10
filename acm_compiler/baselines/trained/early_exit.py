"""Zero Time Waste (arXiv 2106.05409): an image leaves the network at the first head that is sure enough.

A head after every block but the last reads the class token and the mean of all tokens, and what the head before it
said (cascade). At each exit the classes' probabilities are a geometric mean of those of all heads so far, the network's
own last, with weights and a bias for each class that are learned while the heads stay as they are. An image leaves
where the largest probability reaches a threshold, which the budget sets. The network itself stays as it is.

Shapes: B images, S tokens, D features, C classes, E examples, M exits.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from acm_compiler.baselines.count import setting_within
from acm_compiler.baselines.method import BatchResult, Subject
from acm_compiler.baselines.trained.train import to_dense, train
from acm_compiler.baselines.vit import OnVit, Steps, block_macs, run_block, sizes_of
from acm_compiler.data import Batch
from acm_compiler.progress import Say

_LR = 2e-3
_OTHERS = 0.05  # weight of the heads before, at the start
_HALVINGS = 24


class Exits(nn.Module):
    """Heads after the first M - 1 blocks, and the weights by which M exits put heads together."""

    def __init__(self, exits: int, width: int, classes: int) -> None:
        super().__init__()
        self.hidden, self.last = nn.ModuleList(), nn.ModuleList()
        for place in range(exits - 1):
            self.hidden.append(nn.Sequential(nn.LayerNorm(2 * width), nn.Linear(2 * width, 2 * width), nn.GELU()))
            self.last.append(nn.Linear(2 * width + (classes if place else 0), classes))
        starts = [torch.tensor([_OTHERS] * place + [1.0]).log() for place in range(exits)]
        self.log_weights = nn.ParameterList(nn.Parameter(start) for start in starts)
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(classes)) for _ in range(exits))

    def head(self, place: int, x_BSD: Tensor, before: Sequence[Tensor]) -> Tensor:
        """Logits of one head [B, C], which sees those of the head before."""
        seen = self.hidden[place](torch.cat([x_BSD[:, 0], x_BSD.mean(1)], dim=-1))
        return self.last[place](torch.cat([seen, before[-1].detach()], dim=-1) if place else seen)

    def together(self, place: int, logits: Sequence[Tensor]) -> Tensor:
        """Logits of one exit [B, C], from those of all heads so far."""
        weights = self.log_weights[place].exp()
        parts = [w * part.log_softmax(-1) for w, part in zip(weights, logits, strict=True)]
        return torch.stack(parts).sum(0) + self.biases[place]

    def head_macs(self, place: int) -> int:
        """Multiply-adds of one head for an image."""
        return sum(part.weight.numel() for part in (self.hidden[place][1], self.last[place]))  # type: ignore


class EarlyExit(OnVit):
    """Heads between the blocks of a vision transformer, and a threshold for each budget."""

    title, trains = "Zero Time Waste: early exits", True

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self.steps = Steps(copy.deepcopy(subject.dense)).eval().requires_grad_(False)
        self.thresholds: dict[float, float] = {}

    def convert(self, budgets: Sequence[float], say: Say) -> None:
        """Train heads and their weights; then find the threshold of each budget on the examples to fit to."""
        first = self.subject.task.inputs(next(iter(self.subject.fit())))
        assert isinstance(first, Tensor)
        with torch.no_grad():
            classes = self.subject.dense(first[:1]).shape[-1]
        blocks, width, _, self.tokens = sizes_of(self.subject.dense)
        self.exits = Exits(blocks, width, classes).to(first.device)
        train("ztw", self.exits, self._loss, self.subject, lr=_LR, say=say)
        self.exits.eval().requires_grad_(False)
        sure_EM = torch.cat([self._sureness(self.image(batch)) for batch in self.subject.fit()])
        for budget in budgets:
            self.thresholds[budget] = self._threshold(sure_EM, budget)

    def _logits(self, image: Tensor) -> list[Tensor]:
        """Logits of all heads, the network's own last."""
        with torch.no_grad():
            x_BSD = self.steps.embed(image)
            tokens = [x_BSD := run_block(block, x_BSD) for block in self.steps.blocks]
            own = self.steps.head(x_BSD[:, 0])
        logits: list[Tensor] = []
        for place, seen in enumerate(tokens[:-1]):
            logits.append(self.exits.head(place, seen, logits))
        return [*logits, own]

    def _loss(self, batch: Batch, wanted: Tensor) -> Tensor:
        """The loss of every head, and of every exit, which learns nothing but how to put heads together."""
        logits = self._logits(self.image(batch))
        fixed = [part.detach() for part in logits]
        exits = [self.exits.together(place, fixed[: place + 1]) for place in range(len(logits))]
        return torch.stack([to_dense(self.subject, part, batch, wanted) for part in (*logits[:-1], *exits)]).sum()

    @torch.no_grad()
    def _sureness(self, image: Tensor) -> Tensor:
        """The largest probability at each exit, [B, M]."""
        logits = self._logits(image)
        exits = [self.exits.together(place, logits[: place + 1]) for place in range(len(logits))]
        return torch.stack([part.softmax(-1).amax(-1) for part in exits], dim=1)

    def _costs(self) -> Tensor:
        """MACs of an image that leaves at each exit, [M]."""
        dense = self.subject.plan.model.dense_macs // self.subject.plan.model.batch
        block, blocks = block_macs(self.subject.dense, self.tokens), len(self.steps.blocks)
        own = sum(part.weight.numel() for part in self.steps.vit.heads.modules() if isinstance(part, nn.Linear))  # type: ignore
        heads = torch.tensor([self.exits.head_macs(place) for place in range(blocks - 1)] + [own])
        return dense - own - block * blocks + block * torch.arange(1, blocks + 1) + heads.cumsum(0)

    def _threshold(self, sure_EM: Tensor, budget: float) -> float:
        """The largest threshold at which the examples cost no more than the budget."""
        costs_M = self._costs().double()

        def cost(threshold: float) -> float:
            leaves_EM = sure_EM >= threshold
            leaves_EM[:, -1] = True
            return float(costs_M[leaves_EM.int().argmax(1).cpu()].mean())

        most = budget * self.subject.plan.model.dense_macs / self.subject.plan.model.batch
        return setting_within(cost, most, cheap=0.0, dear=1.0 + 1e-6, halvings=_HALVINGS)

    @torch.no_grad()
    def run(self, batch: Batch, budget: float) -> BatchResult:
        """One forward, in which images leave."""
        threshold, x_BSD = self.thresholds[budget], self.steps.embed(self.image(batch))
        left, costs_M = torch.arange(len(x_BSD), device=x_BSD.device), self._costs().double()
        logits: list[Tensor] = []
        output_BC, macs_B = None, torch.zeros(len(x_BSD), dtype=torch.float64)
        for place, block in enumerate(self.steps.blocks):
            x_BSD, is_last = run_block(block, x_BSD), place + 1 == len(self.steps.blocks)
            logits.append(self.steps.head(x_BSD[:, 0]) if is_last else self.exits.head(place, x_BSD, logits))
            exit_BC = self.exits.together(place, logits)
            output_BC = exit_BC.clone() if output_BC is None else output_BC
            leaves_B = (exit_BC.softmax(-1).amax(-1) >= threshold) | is_last
            output_BC[left[leaves_B]] = exit_BC[leaves_B]
            macs_B[left[leaves_B].cpu()] = costs_M[place]
            left, x_BSD, logits = left[~leaves_B], x_BSD[~leaves_B], [part[~leaves_B] for part in logits]
            if not len(left):
                break
        return BatchResult(self.score(output_BC, batch), macs_B)
