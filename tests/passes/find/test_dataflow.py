"""The captured graph as dataflow: one name per operation, linears and their parameters, norms, what is live."""

import networkx as nx
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from acm_compiler.passes.capture.capture import capture
from acm_compiler.passes.capture.graph import ModuleCall
from acm_compiler.passes.capture.op_names import op_name
from acm_compiler.passes.find.dataflow import build_dataflow
from acm_compiler.site import LinearRef
from tests.helpers.models import Mlp, Residual, Stack, example

IN, OUT = 4, 6


class Model(nn.Module):
    """A function of x [2, 3, IN] with a weight [OUT, IN], its transpose, a packed weight and biases at hand."""

    def __init__(self, function) -> None:
        super().__init__()
        self.w, self.wt = nn.Parameter(torch.randn(OUT, IN)), nn.Parameter(torch.randn(IN, OUT))
        self.packed, self.b = nn.Parameter(torch.randn(3 * OUT, IN)), nn.Parameter(torch.randn(OUT))
        self.packed_b = nn.Parameter(torch.randn(3 * OUT))
        self.stacked = nn.Parameter(torch.randn(2, IN, OUT))
        self.register_buffer("table", torch.randn(IN, OUT))
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def flow_of(function, x=None):
    x = torch.randn(2, 3, IN) if x is None else x
    return build_dataflow(capture(Model(function).eval(), x))


W, WT = LinearRef(weight="w"), LinearRef(weight="wt", transposed=True)
LINEARS = {
    "F.linear": (lambda m, x: F.linear(x, m.w), W),
    "F.linear with bias": (lambda m, x: F.linear(x, m.w, m.b), LinearRef(weight="w", bias="b")),
    "keywords": (lambda m, x: F.linear(input=x, weight=m.w, bias=m.b), LinearRef(weight="w", bias="b")),
    "matmul": (lambda m, x: torch.matmul(x, m.wt), WT),
    "operator": (lambda m, x: x @ m.wt, WT),
    "transposed weight": (lambda m, x: x @ m.w.t(), W),
    "property": (lambda m, x: x @ m.w.mT, W),
    "permuted weight": (lambda m, x: F.linear(x, m.wt.permute(1, 0)), WT),
    "twice transposed": (lambda m, x: x @ m.wt.transpose(0, 1).T, WT),
    "mm": (lambda m, x: torch.mm(x.flatten(0, 1), m.wt), WT),
    "addmm": (
        lambda m, x: torch.addmm(m.b, x.flatten(0, 1), m.wt),
        LinearRef(weight="wt", bias="b", transposed=True),
    ),
    "matmul, then bias": (lambda m, x: x @ m.wt + m.b, LinearRef(weight="wt", bias="b", transposed=True)),
    "bias, then matmul": (lambda m, x: m.b + x @ m.wt, LinearRef(weight="wt", bias="b", transposed=True)),
    "einsum": (lambda m, x: torch.einsum("bsi,oi->bso", x, m.w), W),
    "einsum, operands in a list": (lambda m, x: torch.einsum("bsi,oi->bso", [x, m.w]), W),
    "einsum, weight first": (lambda m, x: torch.einsum("io,...i->...o", m.wt, x), WT),
    "inner": (lambda m, x: torch.inner(x, m.w), W),
    "inner, then bias": (lambda m, x: torch.inner(x, m.w) + m.b, LinearRef(weight="w", bias="b")),
    "tensordot": (lambda m, x: torch.tensordot(x, m.wt, dims=1), WT),
    "tensordot over axes": (lambda m, x: torch.tensordot(x, m.w, dims=([-1], [1])), W),
    "tensordot over axes from either end": (lambda m, x: torch.tensordot(x, m.wt, dims=((2,), (-2,))), WT),
    "detached": (lambda m, x: F.linear(x, m.w.detach().contiguous().to(x.dtype)), W),
    "rows": (lambda m, x: F.linear(x, m.packed[OUT : 2 * OUT]), LinearRef(weight="packed", rows=(OUT, 2 * OUT))),
    "last rows": (lambda m, x: F.linear(x, m.packed[-OUT:, :]), LinearRef(weight="packed", rows=(2 * OUT, 3 * OUT))),
    "chunk": (
        lambda m, x: F.linear(x, m.packed.chunk(3)[1], m.packed_b.chunk(3)[1]),
        LinearRef(weight="packed", bias="packed_b", rows=(OUT, 2 * OUT)),
    ),
    "split sizes": (lambda m, x: F.linear(x, m.packed.split([2, 16])[1]), LinearRef(weight="packed", rows=(2, 18))),
    "narrow": (lambda m, x: x @ m.packed.t().narrow(1, 3, OUT), LinearRef(weight="packed", rows=(3, 9))),
}


@pytest.mark.parametrize("name", LINEARS)
def test_a_linear_is_one_however_it_is_written(name):
    function, expected = LINEARS[name]
    (linear,) = flow_of(function).linears.values()
    assert (linear.ref, linear.problem) == (expected, None)
    assert (linear.d_in, linear.tokens) == (IN, 6)
    assert linear.d_out == (16 if name == "split sizes" else OUT)


PROBLEMS = {
    "computed weight": (lambda m, x: F.linear(x, 2 * m.w), "its weight is computed from parameters"),
    "computed bias of a sum": (lambda m, x: torch.addmm(m.b * 2, x.flatten(0, 1), m.wt), "its bias is computed"),
    "bias from the input": (lambda m, x: F.linear(x, m.w, x.mean() + m.b), "its bias is computed"),
    "columns": (lambda m, x: F.linear(x[..., :2], m.w[:, :2]), "only some input columns of w are used"),
    "scaled": (lambda m, x: torch.addmm(m.b, x.flatten(0, 1), m.wt, beta=0.5), "addmm scales"),
    "one bias for some rows": (lambda m, x: F.linear(x, m.packed[:OUT], m.b), "rows of packed and of b do not match"),
    "one of several": (lambda m, x: x @ m.stacked[0], "mixture of experts"),
    "stacked": (lambda m, x: torch.bmm(x, m.stacked), "mixture of experts"),
    "by data": (lambda m, x: F.linear(x, m.packed[x.flatten().abs().int() % 9]), "its weight is computed"),
    "from the left": (lambda m, x: m.w @ x.mT, "its weight multiplies from the left"),
    "moved axes": (lambda m, x: torch.einsum("bsi,oi->bos", x, m.w), "its einsum moves axes"),
    "another axis": (lambda m, x: torch.tensordot(x.mT, m.w, dims=([1], [1])), "its tensordot moves axes"),
    "both axes": (lambda m, x: torch.tensordot(x.repeat(1, 2, 1), m.w, dims=2), "its tensordot moves axes"),
    "heads": (lambda m, x: torch.einsum("bsi,hio->bsho", x, m.stacked), "its einsum weight has 3 dimensions"),
    "a buffer": (lambda m, x: F.linear(x, m.table.t()), "its weight is a buffer"),
    "another type": (lambda m, x: F.linear(x.double(), m.w.double()), "its weight is torch.float32 and used as"),
    "no input": (lambda m, x: x.sum() + F.linear(m.packed[:2], m.w), "its input does not depend"),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_linear_that_no_acm_can_replace_says_why(name):
    function, problem = PROBLEMS[name]
    (linear,) = flow_of(function).linears.values()
    assert linear.ref is None and linear.problem.startswith(problem)


def test_a_bias_put_together_from_parameters_stays_the_models_own():
    (linear,) = flow_of(lambda m, x: F.linear(x, m.w, m.b * 2)).linears.values()
    assert (linear.ref, linear.problem, linear.own_bias) == (W, None, True)


NO_LINEARS = {
    "two values": lambda m, x: x @ x.mT,
    "a buffer": lambda m, x: x @ m.table,
    "an embedding": lambda m, x: F.embedding(x.argmax(-1), m.w),
}


@pytest.mark.parametrize("name", NO_LINEARS)
def test_a_product_without_a_parameter_is_no_linear(name):
    assert not flow_of(NO_LINEARS[name]).linears


def test_a_bias_added_by_another_module_is_not_the_linears():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.b = nn.Linear(IN, OUT, bias=False), nn.Parameter(torch.zeros(OUT))

        def forward(self, x):
            return self.linear(x) + self.b

    (linear,) = build_dataflow(capture(Outer().eval(), torch.randn(2, IN))).linears.values()
    assert linear.ref == LinearRef(weight="linear.weight")


NORMS = {
    "rms": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "rms in float": lambda x: (lambda y: (y * torch.rsqrt(y.square().mean(-1, keepdim=True))).to(x.dtype))(x.float()),
    "rms by division": lambda x: x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6),
    "l2": lambda x: x / x.norm(dim=-1, keepdim=True).clamp(min=1e-6),
    "layer norm": lambda x: (x - x.mean(-1, keepdim=True)) * (x.var(-1, keepdim=True) + 1e-6).rsqrt(),
    "standardised": lambda x: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6),
}


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_that_is_written_out_is_one_operation(name):
    flow = flow_of(lambda m, x: NORMS[name](x))
    assert [value.op for value in flow.values.values() if value.op in ("rms_norm", "mul", "div")] == ["rms_norm"]
    assert not {"mean", "rsqrt", "pow", "norm"} & {value.op for value in flow.values.values()}


def test_a_product_with_the_size_of_another_value_is_no_norm():
    flow = flow_of(lambda m, x: x * torch.rsqrt(torch.cos(x).pow(2).mean(-1, keepdim=True)))
    assert "rms_norm" not in {value.op for value in flow.values.values()}


def test_operations_have_one_name_whatever_way_they_are_called():
    def all_ways(m, x):
        y = torch.add(x, 1) + x.add(2)
        y += 3
        y = 4 + y
        y.add_(5)
        return torch.ops.aten.add.Tensor(y, 6)

    graph = capture(Model(all_ways).eval(), torch.randn(2, IN)).graph
    assert {op_name(node) for node in graph.nodes if node.op == "call_function"} == {"add"}


def test_values_that_only_lend_their_shape_have_no_effect():
    flow = flow_of(lambda m, x: torch.zeros_like(x) + F.linear(x, m.w).expand_as(x[..., :1].expand(2, 3, OUT)).sum())
    zeros = next(value for value in flow.values.values() if value.op == "zeros_like")
    assert not zeros.live and not zeros.args


def test_live_is_what_depends_on_the_inputs():
    flow = flow_of(lambda m, x: x + (m.w.sum() + torch.arange(3.0).sum()))
    live = {value.name: value.live for value in flow.values.values()}
    assert sum(live.values()) == 2  # the input and the last sum


def test_the_graph_is_acyclic_and_knows_what_feeds_what():
    flow = build_dataflow(capture(Stack(Residual(Mlp())).eval(), example()))
    assert nx.is_directed_acyclic_graph(flow.graph)
    names = list(flow.graph)
    for target in names:
        above = nx.ancestors(flow.graph, target) | {target}
        assert {name for name in names if flow.feeds(name, target)} == above


def test_module_calls_know_the_values_inside_them():
    block = Residual(Mlp())
    flow = build_dataflow(capture(Stack(block, block).eval(), example()))
    calls = flow.calls_of["blocks.0.inner"]
    assert calls == [ModuleCall("blocks.0.inner", 0), ModuleCall("blocks.0.inner", 1)]
    ops = [sorted(flow.values[name].op for name in flow.inside[call]) for call in calls]
    assert ops == [["gelu", "linear", "linear"]] * 2


def test_every_reader_of_a_parameter_is_known_with_the_rows_it_reads():
    flow = flow_of(lambda m, x: F.linear(x, m.packed[:OUT]).sum() + m.packed[OUT:].norm())
    reads = {flow.values[read.reader].op: read.view.spans[0] for read in flow.reads["packed"]}
    assert reads == {"linear": (0, OUT), "norm": (OUT, 3 * OUT)}
