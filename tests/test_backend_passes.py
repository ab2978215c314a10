"""The backend's passes on the graphs that Dynamo makes: before, after, same answers."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from acm_compiler.acm import ops
from acm_compiler.backend import choose_implementation
from acm_compiler.errors import VerificationFailed
from acm_compiler.passes.acm_nodes import GATED, GATES, LEARNERS, RESIDUAL, learners_nodes
from acm_compiler.passes.fuse_gate import fuse_gate
from acm_compiler.passes.fuse_residual import fuse_residual
from acm_compiler.passes.merge_gates import merge_gates
from acm_compiler.passes.verify import verify
from tests.build import acm_for, planned_site


def projection(name: str):
    return acm_for(planned_site(name, kind="linear", learner_act="identity", k_min=1))


class Block(nn.Module):
    """Attention and MLP, all five of them ACMs."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (projection(name) for name in "qkvo")
        self.mlp, self.norm = acm_for(planned_site("mlp")), nn.LayerNorm(8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        z = self.norm(x)
        x = x + self.drop(self.o(F.scaled_dot_product_attention(self.q(z), self.k(z), self.v(z))))
        return self.mlp(self.norm(x)) + x


def graph_of(module: nn.Module, *inputs):
    """Dynamo's graph of the module, and how to call it as the module was called."""
    held = []

    def keep(graph_module, example_inputs):
        held[:] = [graph_module, [t.clone() if isinstance(t, torch.Tensor) else t for t in example_inputs]]
        return graph_module.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(module, backend=keep, fullgraph=True, dynamic=False)(*inputs)
    return held


def run(graph_module, inputs):
    graph_module.graph.lint()
    graph_module.recompile()
    with torch.no_grad():
        return graph_module(*inputs)[0]


def count(graph, targets) -> int:
    return sum(node.op == "call_function" and node.target in targets for node in graph.nodes)


def test_fuse_residual_takes_every_bypass_and_nothing_else():
    block, x = Block().eval(), torch.randn(2, 5, 8)
    graph_module, inputs = graph_of(block, x)
    expected = run(graph_module, inputs)
    assert fuse_residual(graph_module.graph) == 2
    torch.testing.assert_close(run(graph_module, inputs), expected)
    fused = [len(node.args) > RESIDUAL for node in learners_nodes(graph_module.graph)]
    assert fused == [False, False, False, True, True]
    assert fuse_residual(graph_module.graph) == 0


class Odd(nn.Module):
    """One ACM, its output used in some way that must stay as it is."""

    def __init__(self, use):
        super().__init__()
        self.acm, self.use = acm_for(planned_site("mlp")), use

    def forward(self, x):
        return self.use(x, self.acm(x))


@pytest.mark.parametrize(
    "use",
    [
        lambda x, y: (x + y) * y,
        lambda x, y: y + y,
        lambda x, y: y + 1.0,
        lambda x, y: y + x[:, :1],
        lambda x, y: y + x.double(),
        lambda x, y: torch.add(x, y, alpha=2),
        lambda x, y: x + F.dropout(y, 0.5, True),
        lambda x, y: x + y.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x, y: x.clone().add_(y),
    ],
    ids=["read twice", "itself", "number", "broadcast", "promoted", "alpha", "dropout", "permuted", "in place"],
)
def test_fuse_residual_leaves_alone_what_is_no_plain_bypass(use):
    graph_module, _ = graph_of(Odd(use), torch.randn(5, 5, 8))
    assert fuse_residual(graph_module.graph) == 0


def test_a_residual_that_is_computed_later_is_fused_too():
    module = Odd(lambda x, y: y + torch.sin(x) * 3).eval()
    graph_module, inputs = graph_of(module, torch.randn(3, 5, 8))
    expected = run(graph_module, inputs)
    assert fuse_residual(graph_module.graph) == 1
    torch.testing.assert_close(run(graph_module, inputs), expected)


def test_merge_gates_shares_the_first_product_of_q_k_and_v(monkeypatch):
    monkeypatch.setattr(ops, "gate_is_operator", lambda x: False)
    graph_module, inputs = graph_of(Block().eval(), torch.randn(2, 5, 8))
    expected, before = run(graph_module, inputs), count(graph_module.graph, {torch._C._nn.linear, F.linear})
    assert merge_gates(graph_module.graph) == 2
    assert count(graph_module.graph, {torch._C._nn.linear, F.linear}) == before - 2
    torch.testing.assert_close(run(graph_module, inputs), expected)
    assert merge_gates(graph_module.graph) == 0


def test_merge_gates_leaves_operators_alone():
    graph_module, _ = graph_of(Block().eval(), torch.randn(2, 5, 8))
    assert merge_gates(graph_module.graph) == 0
    assert count(graph_module.graph, GATES) == count(graph_module.graph, LEARNERS) == 5


def test_fuse_gate_makes_one_operator_of_every_acm():
    graph_module, inputs = graph_of(Block().eval(), torch.randn(2, 5, 8))
    expected = run(graph_module, inputs)
    fuse_residual(graph_module.graph)
    assert fuse_gate(graph_module.graph) == 5
    assert count(graph_module.graph, GATED) == 5 and count(graph_module.graph, (*GATES, *LEARNERS)) == 0
    assert not [node for node in graph_module.graph.nodes if node.target == "view" and torch.float32 in node.args]
    torch.testing.assert_close(run(graph_module, inputs), expected)
    found = verify(graph_module.graph, choose_implementation, expected=5)
    assert [acm.fused for acm in found] == [("gate",)] * 3 + [("gate", "residual")] * 2


class Reading(nn.Module):
    """An ACM whose k something else reads too, or through which something is differentiated after all."""

    def __init__(self, grad: bool):
        super().__init__()
        self.acm, self.grad = acm_for(planned_site("mlp")), grad

    def forward(self, x):
        if self.grad:
            with torch.enable_grad():
                return self.acm(x) * 1
        k = self.acm.choose(x, x.shape[:-1])
        return ops.learners(x, k, self.acm.learners.weights()) * k[:, None]


@pytest.mark.parametrize("grad", [False, True])
def test_fuse_gate_leaves_alone_what_others_read_or_differentiate(grad):
    graph_module, _ = graph_of(Reading(grad), torch.randn(5, 8))
    assert fuse_gate(graph_module.graph) == 0


def test_verify_lists_every_acm_with_its_line():
    graph_module, _ = graph_of(Block().eval(), torch.randn(2, 5, 8))
    fuse_residual(graph_module.graph)
    found = verify(graph_module.graph, choose_implementation, expected=5)
    assert [acm.site for acm in found] == ["q", "k", "v", "o", "mlp"]
    assert {acm.implementation for acm in found} == {"cpu"}
    assert [acm.fused for acm in found] == [("gate",)] * 3 + [("gate", "residual")] * 2
    assert all(acm.line and acm.line.startswith("test_backend_passes.py:") for acm in found)


def test_verify_notices_a_lost_acm():
    graph_module, _ = graph_of(Block().eval(), torch.randn(2, 5, 8))
    with pytest.raises(VerificationFailed, match="number of ACMs"):
        verify(graph_module.graph, choose_implementation, expected=6)
