"""Stand-ins around an ACM, as other tools see them."""

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import acm_compiler as acm
from acm_compiler.passes.rewrite.conversion import conversion
from tests.helpers.rewrite_cases import give_budgets


class Tiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(self.act(self.up(x)))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        return x + self.o(F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x)))


@pytest.mark.parametrize(
    ("cls", "kind", "rule"),
    [(Tiled, "T", {"match": "mlp"}), (Gated, "S", {"match": "mlp"}), (Attention, "P", {"match": "attn", "pack": True})],
    ids=["tile", "stash", "packed"],
)
def test_symbolic_traces_call_them_as_modules(cls, kind, rule):
    model, x = cls().eval(), torch.randn(2, 5, 16)
    converted = acm.rewrite(model, acm.plan(model, x, sites=[{"learners": 2, "init": "random"} | rule]))
    give_budgets(converted)
    assert conversion(converted).plan.sites[0].graft.kind == kind
    traced = fx.symbolic_trace(converted)
    for k in (1, 2):
        acm.set_k(converted, k)
        assert torch.equal(traced(x), converted(x))
