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
from dataclasses import replace

import torch
from torch import Tensor, nn

from acm_compiler.baselines.method import BatchResult, Method, Subject, setting_within
from acm_compiler.baselines.trained.blocks import Blockwise, Tokens, blockwise
from acm_compiler.baselines.trained.train import to_dense, train
from acm_compiler.baselines.vit import layer_macs
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
        known = "torchvision's VisionTransformer, and Wav2Vec2ForCTC and HubertForCTC of transformers"
        return f"it runs {known} a block at a time, and this is a {type(model).__name__} of {type(model).__module__}"

    @classmethod
    def floor(cls, model: nn.Module, plan: Plan) -> float:
        """One block, and what lies outside of the blocks."""
        way = blockwise(model)
        assert way is not None
        blocks, width, hidden, tokens = way.sizes(model, plan)
        return 1 - (blocks - 1) * layer_macs(width, hidden, tokens) / (plan.model.dense_macs / plan.model.batch)

    def convert(self, budgets: Sequence[float], say: Say) -> None:
        """Train heads and their weights; then find the threshold of each budget on the examples to fit to."""
        first = next(iter(self.subject.fit()))
        with torch.no_grad():
            x_BSD = self.steps.embed(first, self.subject.task).x_BSD
            classes = self.steps.answer(x_BSD).shape[-1]
        self.exits = Exits(len(self.steps.blocks), self.steps.seen, classes).to(x_BSD.device)
        train("ztw", self.exits, self._loss, self.subject, lr=_LR, say=say)
        self.exits.eval().requires_grad_(False)
        confidences, costs = zip(*(self._exits(batch) for batch in self.subject.fit()), strict=True)
        for budget in budgets:
            self.thresholds[budget] = self._threshold(torch.cat(confidences), torch.cat(costs), budget)

    def _logits(self, tokens: Tokens) -> list[Tensor]:
        """Logits of all heads, the network's own last."""
        seen: list[Tensor] = []
        with torch.no_grad():
            for place in range(len(self.steps.blocks)):
                tokens = replace(tokens, x_BSD=self.steps.block(place, tokens))
                seen.append(tokens.x_BSD)
            own = self.steps.answer(seen.pop())
        logits: list[Tensor] = []
        for place, x_BSD in enumerate(seen):
            logits.append(self.exits.head(place, self.steps.read(x_BSD), logits))
        return [*logits, own]

    def _loss(self, batch: Batch, wanted: Tensor) -> Tensor:
        """The loss of every head, and of every exit, which learns nothing but how to put heads together."""
        with torch.no_grad():
            tokens = self.steps.embed(batch, self.subject.task)
        logits = self._logits(tokens)
        fixed = [part.detach() for part in logits]
        exits = [self.exits.together(place, fixed[: place + 1]) for place in range(len(logits))]
        return torch.stack([to_dense(self.subject, part, batch, wanted) for part in (*logits[:-1], *exits)]).sum()

    @torch.no_grad()
    def _exits(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Confidence in each example at each exit [B, M], and `_costs`."""
        tokens = self.steps.embed(batch, self.subject.task)
        logits = self._logits(tokens)
        exits = [self.exits.together(place, logits[: place + 1]) for place in range(len(logits))]
        confidence_BM = torch.stack([self.steps.confidence(part, tokens) for part in exits], dim=1)
        return confidence_BM.cpu(), self._costs(tokens)

    def _costs(self, tokens: Tokens) -> Tensor:
        """MACs of an example that leaves at each exit, and last those of the dense model, float64 [B, M + 1]."""
        blocks, width, hidden, _ = self.steps.sizes(self.subject.dense, self.subject.plan)
        own = sum(part.weight.numel() for part in self.steps.own_head.modules() if isinstance(part, nn.Linear))
        heads_M = torch.tensor([self.exits.head_macs(place) for place in range(blocks - 1)] + [own]).cumsum(0)
        run_M = torch.cat([torch.arange(1, blocks + 1), torch.tensor([blocks])]).double()
        head_M = torch.cat([heads_M, torch.tensor([own])]).double()
        each_B, reads_B = layer_macs(width, hidden, tokens.real_B), self.steps.reads(tokens)
        return tokens.before_B[:, None] + each_B[:, None] * run_M + reads_B[:, None] * head_M

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
        left, costs_BM = torch.arange(len(tokens.x_BSD)), self._costs(tokens)
        logits: list[Tensor] = []
        output, macs_B = None, torch.zeros(len(left), dtype=torch.float64)
        for place in range(len(self.steps.blocks)):
            x_BSD, is_last = self.steps.block(place, tokens), place + 1 == len(self.steps.blocks)
            tokens = replace(tokens, x_BSD=x_BSD)
            read = self.steps.read(x_BSD)
            logits.append(self.steps.answer(x_BSD) if is_last else self.exits.head(place, read, logits))
            exit_B = self.exits.together(place, logits)
            output = exit_B.clone() if output is None else output
            leaves_B = (self.steps.confidence(exit_B, tokens) >= threshold) | is_last
            gone = left[leaves_B.cpu()]
            output[gone.to(output.device)] = exit_B[leaves_B]
            macs_B[gone] = costs_BM[gone, place]
            left, tokens, logits = left[~leaves_B.cpu()], tokens.only(~leaves_B), [part[~leaves_B] for part in logits]
            if not len(left):
                break
        return BatchResult(self.score(output, batch), macs_B)
