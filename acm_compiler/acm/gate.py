"""The gate of an ACM: a tiny network that scores, per token, every number of learners it may run."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from acm_compiler.acm.arguments import GateWeights, held
from acm_compiler.acm.precision import without_autocast
from acm_compiler.acm.reference import GateRule


class Gate(nn.Module):
    """Linear -> GELU -> Linear, one output column per allowed k (docs/semantics.md, Gate and knob).

    `rule` is the meaning of a score: a paper's logit, or the log of the damage expected from running k learners;
    `reference.utilities` turns either into choices.
    """

    def __init__(self, d_in: int, width: int, columns: int, *, device=None, dtype=None) -> None:
        super().__init__()
        self.inner = nn.Linear(d_in, width, device=device, dtype=dtype)
        self.outer = nn.Linear(width, columns, device=device, dtype=dtype)
        self.rule: GateRule = "logits"

    def forward(self, x_TD: Tensor) -> Tensor:
        """Scores [T, C], computed in the gate's own precision whatever autocast says."""
        with without_autocast(x_TD.device):
            h_TG = F.gelu(self.inner(x_TD.to(self.inner.weight.dtype)))
            return self.outer(h_TG)

    def weights(self) -> GateWeights:
        """Weight and bias of both linears, as the operator takes them."""
        return GateWeights(*held(("weight", "bias"), self.inner, self.outer))
