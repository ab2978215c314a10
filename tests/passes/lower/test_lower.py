"""The backend's passes on the graphs that Dynamo makes: before, after, same answers."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import acm_compiler as acm
from acm_compiler.acm import ops
from acm_compiler.backend import choose_implementation
from acm_compiler.errors import VerificationFailed
from acm_compiler.passes.lower.acm_nodes import (
    GATED,
    GATES,
    LEARNERS,
    NORM_EPS,
    acm_nodes,
    call_of,
    learners_nodes,
    value_of,
)
from acm_compiler.passes.lower.drop_stand_ins import drop_stand_ins
from acm_compiler.passes.lower.fold_norm import fold_norm
from acm_compiler.passes.lower.fuse_gate import fuse_gate
from acm_compiler.passes.lower.fuse_residual import fuse_residual
from acm_compiler.passes.lower.merge_gates import merge_gates
from acm_compiler.passes.lower.verify import verify
from tests.helpers.build import acm_for, planned_site


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
    fused = [call_of(node).residual is not None for node in learners_nodes(graph_module.graph)]
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
        lambda x, y: operator.iadd(x, 1) + y,
    ],
    ids=[
        "read twice",
        "itself",
        "number",
        "broadcast",
        "promoted",
        "alpha",
        "dropout",
        "permuted",
        "in place",
        "input written",
    ],
)
def test_fuse_residual_leaves_alone_what_is_no_plain_bypass(use):
    graph_module, _ = graph_of(Odd(use), torch.randn(5, 5, 8))
    assert fuse_residual(graph_module.graph) == 0


class BranchWithoutGradients(nn.Module):
    def __init__(self):
        super().__init__()
        self.acm = acm_for(planned_site("mlp"))

    def forward(self, x):
        with torch.no_grad():
            y = self.acm(x)
        return x + y


@pytest.mark.filterwarnings("ignore")  # what Inductor imports warns of itself on torch 2.11
def test_a_branch_without_gradients_gets_none_when_compiled():
    module, x = BranchWithoutGradients().eval(), torch.randn(2, 5, 8, requires_grad=True)
    torch._dynamo.reset()
    torch.compile(module, backend="acm", fullgraph=True)(x).sum().backward()
    assert all(p.grad is None for p in module.parameters())
    torch.testing.assert_close(x.grad, torch.ones_like(x))


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


class Written(nn.Module):
    """Two ACMs of one tensor, which something else is written into between their calls."""

    def __init__(self):
        super().__init__()
        self.first, self.second = projection("first"), projection("second")

    def forward(self, x):
        x = x * 1.0
        y = self.first(x)
        x.mul_(-3.0)
        return y + self.second(x)


def test_merge_gates_keeps_apart_what_reads_other_values_of_a_tensor(monkeypatch):
    monkeypatch.setattr(ops, "gate_is_operator", lambda x: False)
    graph_module, inputs = graph_of(Written().eval(), torch.randn(2, 5, 8))
    expected = run(graph_module, inputs)
    assert merge_gates(graph_module.graph) == 0
    torch.testing.assert_close(run(graph_module, inputs), expected)


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


LAYER_NORMS = (F.layer_norm, torch.layer_norm)


def folded(graph) -> list[bool]:
    return [node.kwargs.get(NORM_EPS) is not None for node in acm_nodes(graph)]


def test_fold_norm_takes_a_norm_that_nothing_else_reads():
    graph_module, inputs = graph_of(Block().eval(), torch.randn(2, 5, 8) * 3 + 2)
    expected, graph = run(graph_module, inputs), graph_module.graph
    fuse_residual(graph)
    assert fold_norm(graph) == 0  # nothing is folded where gates are apart: there may be gradients
    fuse_gate(graph)
    assert fold_norm(graph) == 1 and fold_norm(graph) == 0
    assert folded(graph) == [False, False, False, False, True] and count(graph, LAYER_NORMS) == 1
    torch.testing.assert_close(run(graph_module, inputs), expected)
    found = verify(graph, choose_implementation, expected=5)
    assert found[-1].fused == ("norm", "gate", "residual")


@pytest.mark.parametrize(("device", "folds"), [("cpu", 1), ("cuda:0", 0)])
def test_fold_norm_leaves_norms_on_gpus_to_inductor(device, folds):
    graph_module, _ = graph_of(Block().eval(), torch.randn(2, 5, 8))
    fuse_residual(graph_module.graph)
    fuse_gate(graph_module.graph)
    values = [value_of(node) for node in graph_module.graph.nodes]
    for value in values:
        if value is not None:
            value.fake_device = torch.device(device)
    assert fold_norm(graph_module.graph) == folds


class Normed(nn.Module):
    """One ACM behind a norm that is called, and used, in some way."""

    def __init__(self, use, **site):
        super().__init__()
        self.acm, self.use = acm_for(planned_site("mlp", **site)), use
        self.weight, self.bias = nn.Parameter(torch.rand(8) + 0.5), nn.Parameter(torch.randn(8))

    def forward(self, x):
        return self.use(self, x)


def plain(m, x):
    return F.layer_norm(x, (8,), m.weight, m.bias, 1e-3)


FOLDED = {
    "by position": lambda m, x: m.acm(plain(m, x)),
    "by name": lambda m, x: m.acm(F.layer_norm(x, [8], eps=1e-3, bias=m.bias, weight=m.weight)),
    "without weights": lambda m, x: m.acm(F.layer_norm(x, (8,))),
    "torch's": lambda m, x: m.acm(torch.layer_norm(x, (8,), m.weight)),
    "flattened": lambda m, x: m.acm(plain(m, x).view(-1, 8)),
    "permuted": lambda m, x: m.acm(plain(m, x.transpose(0, 1)).view(-1, 8)),
    "post": lambda m, x: x + m.acm(plain(m, x + 1)),
    "part": lambda m, x: m.acm(plain(m, x[:1])),
}


def rms(m, x, *, dtype=torch.float32, dim=-1):
    """An RMSNorm as transformers writes it out."""
    h = x.to(dtype)
    h = h * torch.rsqrt(h.pow(2).mean(dim, keepdim=True) + 1e-3)
    return m.weight * h.to(x.dtype)


RMS_FOLDED = {
    "written out": lambda m, x: m.acm(rms(m, x)),
    "weight behind": lambda m, x: m.acm((torch.rsqrt((x**2).mean((-1,), True) + 1e-3) * x) * m.weight),
    "torch's": lambda m, x: m.acm(F.rms_norm(x, (8,), m.weight, 1e-3).view(-1, 8)),
    "without weight": lambda m, x: m.acm(torch.rms_norm(x, (8,), eps=1e-3)),
    "post": lambda m, x: x + m.acm(rms(m, x + 1).reshape(-1, 8)).view(x.shape),
}
KEPT = {
    "no eps": lambda m, x: m.acm(F.rms_norm(x, (8,), m.weight)),
    "other power": lambda m, x: m.acm(m.weight * (x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + 1e-3))),
    "other rows of squares": lambda m, x: m.acm(rms(m, x, dim=1)),
    "squares of another": lambda m, x: m.acm(m.weight * (x * torch.rsqrt((x + 1).pow(2).mean(-1, True) + 1e-3))),
    "in float64": lambda m, x: m.acm(rms(m, x, dtype=torch.float64)),
    "root read": lambda m, x: m.acm(m.weight * (x * (r := torch.rsqrt(x.pow(2).mean(-1, True) + 1e-3)))) * r.sum(),
    "read twice": lambda m, x: (z := plain(m, x)) + m.acm(z),
    "read elsewhere": lambda m, x: (m.acm(z := plain(m, x)), z.sum()),
    "more features": lambda m, x: m.acm(F.layer_norm(x, (5, 8))),
    "other rows": lambda m, x: m.acm(F.layer_norm(x.view(2, 4, 10), (10,)).view(-1, 8)),
    "transposed": lambda m, x: m.acm(F.layer_norm(x.view(10, 8)[:8], (8,)).t()),
    "converted": lambda m, x: m.acm(F.layer_norm(x.double(), (8,)).float()),
    "written": lambda m, x: m.acm((plain(m, x), x.add_(1))[0]),
    "input written": lambda m, x: m.acm((plain(m, x), operator.iadd(x, 1))[0]),
    "no norm": lambda m, x: m.acm(x * 2),
}
IN_PLACE = {
    "relu": nn.ReLU(inplace=True),
    "relu6": nn.ReLU6(inplace=True),
    "hardswish": nn.Hardswish(inplace=True),
    "leaky relu": nn.LeakyReLU(inplace=True),
    "elu": nn.ELU(inplace=True),
}


def fully_fused(module, *inputs):
    graph_module, held = graph_of(module.eval(), *inputs)
    # the first run may write to what the second reads
    expected = run(graph_module, [t.clone() if isinstance(t, torch.Tensor) else t for t in held])
    fuse_residual(graph_module.graph)
    fuse_gate(graph_module.graph)
    folds = fold_norm(graph_module.graph)
    torch.testing.assert_close(run(graph_module, held), expected)
    return folds


@pytest.mark.parametrize("use", FOLDED.values(), ids=FOLDED)
def test_fold_norm_reads_every_way_to_call_it(use):
    assert fully_fused(Normed(use), torch.randn(2, 5, 8) * 3 + 2) == 1


@pytest.mark.parametrize("use", RMS_FOLDED.values(), ids=RMS_FOLDED)
def test_fold_norm_takes_rms_norms(use):
    module, x = Normed(use), torch.randn(2, 5, 8) * 3 + 2
    assert fully_fused(module, x) == 1
    exported = torch.export.export(module.eval(), (x,))
    expected = exported.module()(x)
    assert fuse_gate(exported.graph) == 1 and fold_norm(exported.graph) == 1
    exported.graph.lint()
    exported.graph_module.recompile()
    torch.testing.assert_close(exported.module()(x), expected)


@pytest.mark.parametrize("use", KEPT.values(), ids=KEPT)
def test_fold_norm_leaves_alone_what_it_would_change(use):
    assert fully_fused(Normed(use), torch.randn(2, 5, 8) * 3 + 2) == 0


@pytest.mark.parametrize("act", IN_PLACE.values(), ids=IN_PLACE)
def test_nothing_moves_past_an_activation_that_works_in_place(act):
    """torch's modules ask for it by position."""

    def use(m, x):
        x = x * 1.0
        z = plain(m, x)
        x = act(x)
        return m.acm(z) * x

    assert fully_fused(Normed(use), torch.randn(2, 5, 8) * 3 + 2) == 0
    graph_module, _ = graph_of(Odd(lambda x, y: act(x) + y), torch.randn(5, 5, 8))
    assert fuse_residual(graph_module.graph) == 0


def test_a_dropout_in_place_that_only_passes_on_hides_no_bypass():
    drop = nn.Dropout(0.5, inplace=True).eval()
    graph_module, _ = graph_of(Odd(lambda x, y: x + drop(y)), torch.randn(5, 5, 8))
    assert fuse_residual(graph_module.graph) == 1


class WrittenOut(nn.Module):
    """A pre-norm block whose MLP calls its activation as a function."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return x + self.down(F.relu(self.up(self.norm(x))))


def test_what_a_graft_left_behind_does_not_read_the_norm():
    block = nn.Sequential(WrittenOut(), nn.Linear(8, 8)).eval()
    x = torch.randn(2, 5, 8)
    model = acm.rewrite(block, acm.plan(block, x, sites="mlp"))
    graph_module, inputs = graph_of(model, x)
    expected, graph = run(graph_module, inputs), graph_module.graph
    before = len(graph.nodes)
    assert drop_stand_ins(graph) == before - len(graph.nodes) == 2
    fuse_residual(graph)
    fuse_gate(graph)
    assert fold_norm(graph) == 1
    torch.testing.assert_close(run(graph_module, inputs), expected)


def test_fold_norm_makes_no_rows_longer_than_the_hidden_ones():
    assert fully_fused(Normed(FOLDED["by position"], learners=3, width=2), torch.randn(5, 8)) == 0


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
    assert all(acm.line and acm.line.startswith("test_lower.py:") for acm in found)


def test_verify_notices_a_lost_acm():
    graph_module, _ = graph_of(Block().eval(), torch.randn(2, 5, 8))
    with pytest.raises(VerificationFailed, match="number of ACMs"):
        verify(graph_module.graph, choose_implementation, expected=6)
