"""Operators that become one call: which ones do, and that answers stay."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from acm_compiler.acm import ops
from acm_compiler.acm.steps import STEPS, read_program
from acm_compiler.passes.lower.acm_nodes import GATED, acm_nodes
from acm_compiler.passes.lower.fold_norm import fold_norm
from acm_compiler.passes.lower.fuse_gate import fuse_gate
from acm_compiler.passes.lower.fuse_residual import fuse_residual
from acm_compiler.passes.lower.join_calls import join_calls
from tests.helpers.build import acm_for, planned_site
from tests.passes.lower.test_lower import count, graph_of, projection, run


class Block(nn.Module):
    """Attention of two heads and an MLP, all five of them ACMs."""

    def __init__(self, **attention):
        super().__init__()
        self.q, self.k, self.v, self.o = (projection(name) for name in "qkvo")
        self.mlp, self.norms = acm_for(planned_site("mlp")), nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.attention, self.drop = attention, nn.Dropout(0.5)

    def heads(self, x):
        return x.unflatten(-1, (2, 4)).transpose(1, 2)

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, **self.attention).transpose(1, 2).flatten(2)

    def forward(self, x):
        z = self.norms[0](x)
        y = self.attend(*(self.heads(part(z)) for part in (self.q, self.k, self.v)))
        x = x + self.drop(self.o(y))
        return self.mlp(self.norms[1](x)) + x


def joined(module, *inputs):
    """The graph with its calls joined, its programs, and the answers before and after."""
    ops.load_kernels("cpu")
    graph_module, given = graph_of(module.eval(), *inputs)
    graph = graph_module.graph
    for rewrite in (fuse_residual, fuse_gate, fold_norm):
        rewrite(graph)
    before = run(graph_module, given)
    join_calls(graph, acm_nodes(graph))
    programs = [read_program(node.args[1]) for node in graph.nodes if node.target is STEPS]
    return graph, [[step.kind for step in program.steps] for program in programs], before, run(graph_module, given)


WHOLE = ["norm", "gated", "gated", "gated", "attention", "gated", "gated"]


@pytest.mark.parametrize("attention", [{}, {"is_causal": True}, {"scale": 0.7}], ids=str)
def test_a_block_becomes_one_call(attention):
    graph, programs, before, after = joined(Block(**attention), torch.randn(3, 5, 8))
    assert programs == [WHOLE] and not count(graph, GATED)
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-4)


def test_blocks_become_one_call_together():
    graph, programs, before, after = joined(nn.Sequential(Block(), Block()), torch.randn(1, 5, 8))
    assert programs == [WHOLE + WHOLE] and not count(graph, GATED)
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-4)


class OtherHeads(Block):
    """Heads whose values lie where those of neighbours would."""

    def heads(self, x):
        return x.unflatten(-1, (4, 2)).permute(0, 3, 1, 2)


class KeysOfAnother(Block):
    def attend(self, q, k, v):
        return super().attend(q, k[:, :, :3], v[:, :, :3])


class HeadsSwapped(Block):
    def attend(self, q, k, v):
        y = F.scaled_dot_product_attention(q, k, v)
        return y.flip(1).transpose(1, 2).flatten(2)


class TokensSwapped(Block):
    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v).flatten(2).reshape(q.shape[0], -1, 8)


MASK = torch.zeros(5, 5)


@pytest.mark.parametrize(
    "module",
    [OtherHeads(), KeysOfAnother(), Block(attn_mask=MASK), Block(dropout_p=0.5)],
    ids=["heads", "keys", "mask", "dropout"],
)
def test_another_attention_stays_torchs(module):
    _, programs, before, after = joined(module, torch.randn(3, 5, 8))
    assert programs == [["norm", "gated", "gated", "gated"], ["gated", "gated"]]
    if module.attention.get("dropout_p") is None:
        torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", [HeadsSwapped, TokensSwapped])
def test_what_moves_values_between_two_operators_stays_between_them(kind):
    _, programs, before, after = joined(kind(), torch.randn(3, 5, 8))
    assert [step for program in programs for step in program].count("gated") == 5 and len(programs) == 2
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-4)


class Read(nn.Module):
    """Two ACMs one after the other, the first one's result read in between and at the end."""

    def __init__(self, use):
        super().__init__()
        self.first, self.second, self.use = acm_for(planned_site("a")), acm_for(planned_site("b")), use

    def forward(self, x):
        y = self.first(x)
        return self.use(y, self.second)


@pytest.mark.parametrize(
    "use",
    [
        lambda y, second: (second(y), y.sum())[0],
        lambda y, second: operator.mul(y.exp(), second(y)),
        lambda y, second: torch.stack([y, second(y)]),
        lambda y, second: second(y).transpose(0, 1) + y.transpose(0, 1),
    ],
    ids=["unread", "before", "behind", "views"],
)
def test_results_that_others_read_are_there(use):
    _, programs, before, after = joined(Read(use), torch.randn(2, 5, 8))
    assert programs == [["gated", "gated"]]
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "use",
    [
        lambda y, second: second(y * 2),
        lambda y, second: second(y.relu_()),
        lambda y, second: second(y.flip(1)),
        lambda y, second: second(y.add_(1)) + y,
    ],
    ids=["changed", "written", "turned", "written and read"],
)
def test_what_is_computed_between_two_keeps_them_apart(use):
    graph, programs, before, after = joined(Read(use), torch.randn(2, 5, 8))
    assert programs == [] and count(graph, GATED) == 2
    torch.testing.assert_close(after, before)


def test_many_tokens_and_single_acms_keep_their_calls():
    graph, programs, _, _ = joined(Block(), torch.randn(3, 100, 8))
    assert programs == [] and count(graph, GATED) == 5
    _, programs, _, _ = joined(acm_for(planned_site("mlp")), torch.randn(3, 5, 8))
    assert programs == []


def test_a_norm_that_something_else_reads_is_given_back():
    class Shown(Block):
        def forward(self, x):
            return super().forward(x) + self.norms[0](x).tanh()

    _, programs, before, after = joined(Shown(), torch.randn(2, 5, 8))
    assert "attention" in programs[0]
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-4)
