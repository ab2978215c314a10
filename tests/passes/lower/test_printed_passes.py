"""The graph of one block, and the lines that each pass of the backend changes: `ACM_ACCEPT=1` writes them anew."""

import difflib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import acm_compiler as acm
from acm_compiler.acm import ops
from acm_compiler.passes.lower.drop_stand_ins import drop_stand_ins
from acm_compiler.passes.lower.fold_norm import fold_norm
from acm_compiler.passes.lower.fuse_gate import fuse_gate
from acm_compiler.passes.lower.fuse_residual import fuse_residual
from acm_compiler.passes.lower.merge_gates import merge_gates
from tests.helpers import golden
from tests.helpers.listing import Listing
from tests.passes.lower.test_lower import graph_of


class Block(nn.Module):
    """Pre-norm attention of one head and MLP, the latter in functions: its ACM leaves dummies in the graph."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        z = self.norm1(x)
        x = x + self.o(F.scaled_dot_product_attention(self.q(z), self.k(z), self.v(z)))
        return x + self.down(F.relu(self.up(self.norm2(x))))


def changed_lines(before: str, after: str) -> str:
    """The lines that a pass took out and put in, in their places."""
    lines = difflib.unified_diff(before.splitlines(True), after.splitlines(True), n=0)
    return "".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


@pytest.mark.parametrize("gates", ["operators", "plain torch"])
def test_every_pass_prints_what_it_changes(monkeypatch, gates):
    if gates == "plain torch":
        monkeypatch.setattr(ops, "gate_is_operator", lambda x: False)
    x = torch.randn(2, 5, 8)
    block = nn.Sequential(Block(), nn.Linear(8, 8)).eval()
    model = acm.rewrite(block, acm.plan(block, x, init="random"))
    graph_module, _ = graph_of(model, x)
    graph, listing = graph_module.graph, Listing()
    printed = listing.text(graph)
    # plain gates are some thirty calls each: of those only the changes fit on a screen
    pages = [f"captured\n{printed}"] if gates == "operators" else []
    for rewrite in (drop_stand_ins, merge_gates, fuse_residual, fuse_gate, fold_norm):
        changes, before = rewrite(graph), printed
        printed = listing.text(graph)
        pages.append(f"{rewrite.__name__}: {changes}\n{changed_lines(before, printed)}")
    golden.check(f"lowered_{gates.replace(' ', '_')}.txt", "\n".join(pages))
