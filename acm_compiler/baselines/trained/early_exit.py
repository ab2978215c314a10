"""Zero Time Waste (arXiv 2106.05409): an example leaves the network at the first head that is sure enough.

A head after every block but the last reads the class token and the mean of all tokens, or each frame of audio, and
what the head before it said (cascade). At each exit the classes' probabilities are a geometric mean of those of all
heads so far, the network's own last, with weights and a bias for each class that are learned while the heads stay as
they are. An example leaves where the largest probability, of audio its mean over frames, reaches a threshold, which the
budget sets. The network itself stays as it is.

Shapes: B examples, S tokens, D features, C classes, E examples to fit to, M exits.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from acm_compiler.baselines.method import BatchResult, Method, Subject, setting_within
from acm_compiler.baselines.trained.block_kinds import blockwise, known_models
from acm_compiler.baselines.trained.blocks import Blockwise, Tokens
from acm_compiler.baselines.trained.train import to_dense, train
from acm_compiler.data import Batch
from acm_compiler.planning.plan import Plan
from acm_compiler.progress import Say

_LR = 2e-3
_OTHERS = 0.05  # weight of the heads before, at the start
_HALVINGS = 24


class Exits(nn.Module):
    """Heads after the first M - 1 blocks, and the weights by which M exits put heads together."""

    def __init__(self, exits: int, seen: int, classes: int) -> None:
        super().__init__()
        self.hidden, self.last = nn.ModuleList(), nn.ModuleList()
        for place in range(exits - 1):
            self.hidden.append(nn.Sequential(nn.LayerNorm(seen), nn.Linear(seen, seen), nn.GELU()))
            self.last.append(nn.Linear(seen + (classes if place else 0), classes))
        starts = [torch.tensor([_OTHERS] * place + [1.0]).log() for place in range(exits)]
        self.log_weights = nn.ParameterList(nn.Parameter(start) for start in starts)
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(classes)) for _ in range(exits))

    def head(self, place: int, read: Tensor, before: Sequence[Tensor]) -> Tensor:
        """Logits of one head [..., C] from what it reads; it sees those of the head before."""
        seen = self.hidden[place](read)
        return self.last[place](torch.cat([seen, before[-1].detach()], dim=-1) if place else seen)

    def together(self, place: int, logits: Sequence[Tensor]) -> Tensor:
        """Logits of one exit [..., C], from those of all heads so far."""
        weights = self.log_weights[place].exp()
        parts = [w * part.log_softmax(-1) for w, part in zip(weights, logits, strict=True)]
        return torch.stack(parts).sum(0) + self.biases[place]

    def head_macs(self, place: int) -> int:
        """Multiply-adds of one head, each time that it reads."""
        return sum(part.weight.numel() for part in (self.hidden[place][1], self.last[place]))  # type: ignore


class EarlyExit(Method):
    """Heads between the blocks of a model, and a threshold for each budget."""

    title, trains = "Zero Time Waste: early exits", True

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        way = blockwise(subject.dense)
        assert way is not None
        self.steps: Blockwise = way(copy.deepcopy(subject.dense)).eval().requires_grad_(False)
        self.thresholds: dict[float, float] = {}

    @classmethod
    def refuses(cls, model: nn.Module, plan: Plan) -> str | None:
        """A reason for all models that are not known to run a block at a time."""
        if blockwise(model) is not None:
            return None
        name = f"{type(model).__name__} of {type(model).__module__}"
        return f"it runs these a block at a time: {known_models()}; and this is a {name}"

    @classmethod
    def floor(cls, model: nn.Module, plan: Plan) -> float:
        """One block, and what lies outside of the blocks."""
        way = blockwise(model)
        assert way is not None
        return way.least(model, plan)

    def convert(self, budgets: Sequence[float], say: Say) -> None:
        """Train heads and their weights; then find the threshold of each budget on the examples to fit to."""
        with torch.no_grad():
            after = self._after(next(iter(self.subject.fit())))
            read, own = self.steps.read(after[-1]), self.steps.answer(after[-1])
        self.exits = Exits(len(after), read.shape[-1], own.shape[-1]).to(own.device)
        train("ztw", self.exits, self._loss, self.subject, lr=_LR, say=say)
        self.exits.eval().requires_grad_(False)
        confidences, costs = zip(*(self._exits(batch) for batch in self.subject.fit()), strict=True)
        for budget in budgets:
            self.thresholds[budget] = self._threshold(torch.cat(confidences), torch.cat(costs), budget)

    @torch.no_grad()
    def _after(self, batch: Batch) -> list[Tokens]:
        """The examples after every block."""
        after, tokens = [], self.steps.embed(batch, self.subject.task)
        for place in range(len(self.steps.blocks)):
            tokens = self.steps.advance(place, tokens)
            after.append(tokens)
        return after

    def _logits(self, after: Sequence[Tokens], own: Tensor) -> list[Tensor]:
        """Logits of all heads, the network's own last."""
        logits: list[Tensor] = []
        for place, tokens in enumerate(after[:-1]):
            logits.append(self.exits.head(place, self.steps.read(tokens), logits))
        return [*logits, own]

    def _loss(self, batch: Batch, wanted: Tensor) -> Tensor:
        """The loss of every head, and of every exit, which learns nothing but how to put heads together."""
        after = self._after(batch)
        with torch.no_grad():
            own = self.steps.answer(after[-1])
        logits = self._logits(after, own)
        fixed = [part.detach() for part in logits]
        exits = [self.exits.together(place, fixed[: place + 1]) for place in range(len(logits))]
        return torch.stack([to_dense(self.subject, part, batch, wanted) for part in (*logits[:-1], *exits)]).sum()

    @torch.no_grad()
    def _exits(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Confidence in each example at each exit [B, M]; MACs of leaving there, and of the dense model, [B, M + 1]."""
        after = self._after(batch)
        own, own_B = self.steps.finish(after[-1])
        logits = self._logits(after, own)
        exits = [self.exits.together(place, logits[: place + 1]) for place in range(len(logits))]
        confidence_BM = torch.stack([self.steps.confidence(part, after[0]) for part in exits], dim=1)
        costs = [self._cost(place, tokens) for place, tokens in enumerate(after)]
        return confidence_BM.cpu(), torch.stack([*costs[:-1], costs[-1] + own_B, after[-1].spent_B + own_B], dim=1)

    def _cost(self, place: int, tokens: Tokens) -> Tensor:
        """MACs of the examples after a block, [B], with all heads so far but the network's own."""
        heads = sum(map(self.exits.head_macs, range(min(place + 1, len(self.exits.last)))))
        return tokens.spent_B + self.steps.reads(tokens) * heads

    @staticmethod
    def _threshold(confidence_EM: Tensor, costs_EM: Tensor, budget: float) -> float:
        """The largest threshold at which the examples cost no more than the budget."""

        def cost(threshold: float) -> float:
            leaves_EM = confidence_EM >= threshold
            leaves_EM[:, -1] = True
            return float(costs_EM.gather(1, leaves_EM.int().argmax(1, keepdim=True)).mean())

        most = budget * float(costs_EM[:, -1].mean())
        return setting_within(cost, most, cheap=0.0, dear=1.0 + 1e-6, halvings=_HALVINGS)

    @torch.no_grad()
    def run(self, batch: Batch, budget: float) -> BatchResult:
        """One forward, in which examples leave."""
        threshold, tokens = self.thresholds[budget], self.steps.embed(batch, self.subject.task)
        left = torch.arange(len(tokens.x_BSD))
        logits: list[Tensor] = []
        output, macs_B = None, torch.zeros(len(left), dtype=torch.float64)
        for place in range(len(self.steps.blocks)):
            tokens, is_last = self.steps.advance(place, tokens), place + 1 == len(self.steps.blocks)
            macs_B[left] = self._cost(place, tokens)
            if is_last:
                own, own_B = self.steps.finish(tokens)
                macs_B[left] += own_B
            logits.append(own if is_last else self.exits.head(place, self.steps.read(tokens), logits))
            exit_B = self.exits.together(place, logits)
            output = exit_B.clone() if output is None else output
            leaves_B = (self.steps.confidence(exit_B, tokens) >= threshold) | is_last
            output[left[leaves_B.cpu()].to(output.device)] = exit_B[leaves_B]
            left, tokens, logits = left[~leaves_B.cpu()], tokens.only(~leaves_B), [part[~leaves_B] for part in logits]
            if not len(left):
                break
        return BatchResult(self.score(output, batch), macs_B)
