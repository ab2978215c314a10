"""Activations as text: names where they are exactly that, else expressions that compute the same."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from acm_compiler.acm.activations import resolve
from acm_compiler.passes.capture.capture import capture
from acm_compiler.passes.capture.export import capture_exported
from tests.helpers.captures import find_sites
from tests.helpers.models import Mlp, Residual, Stack, example


def act_of(function, *, see=capture):
    """Activation of the site between two linears; the reason where there is no site."""
    model = Stack(Residual(Mlp(function))).eval()
    sites, skips = find_sites(model, see(model, example()))
    return sites[0].act if sites else next(skip.reason for skip in skips if "inner" in skip.name)


def new_gelu(x):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


NAMED = {
    "relu": [F.relu, nn.ReLU(), nn.ReLU(inplace=True), torch.relu, lambda x: x.clamp(min=0), lambda x: x.clamp_min(0)],
    "relu6": [F.relu6, lambda x: torch.clamp(x, 0, 6), nn.Hardtanh(0.0, 6.0)],
    "relu2": [lambda x: F.relu(x).square(), lambda x: F.relu(x) ** 2, lambda x: F.relu(x) * F.relu(x)],
    "gelu": [F.gelu, nn.GELU(), lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))],
    "gelu_tanh": [nn.GELU(approximate="tanh"), new_gelu],
    "quick_gelu": [lambda x: x * torch.sigmoid(1.702 * x)],
    "silu": [F.silu, nn.SiLU(inplace=True), lambda x: x * x.sigmoid(), lambda x: x / (1 + torch.exp(-x))],
    "tanh": [torch.tanh, nn.Tanh(), lambda x: 2 * torch.sigmoid(2 * x) - 1],
    "sigmoid": [torch.sigmoid, F.sigmoid, lambda x: 1 / (1 + torch.exp(-x))],
    "elu": [F.elu, nn.ELU(), nn.CELU()],
    "leaky_relu": [F.leaky_relu, nn.LeakyReLU()],
    "hardswish": [F.hardswish, lambda x: x * F.relu6(x + 3) / 6],
    "mish": [F.mish, lambda x: x * torch.tanh(F.softplus(x))],
    "softplus": [F.softplus, nn.Softplus()],
}


@pytest.mark.parametrize(("name", "function"), [(name, f) for name, ways in NAMED.items() for f in ways])
def test_a_known_activation_is_called_by_its_name(name, function):
    assert act_of(function) == name


WRITTEN = {
    "leaky_relu(x, 0.2)": nn.LeakyReLU(0.2),
    "elu(x, 0.5)": nn.ELU(0.5, inplace=True),
    "softplus(x, 2.0, 20.0)": nn.Softplus(beta=2),
    "selu(x)": nn.SELU(),
    "mul(elu(x, 2.0), 1.05)": lambda x: torch.ops.aten.elu(x, 2.0, 1.05),
    "clamp(gelu(x), -10.0, 10.0)": lambda x: torch.clip(F.gelu(x), -10, 10),
    "neg(clamp(neg(x), -3.0))": lambda x: x.clamp(max=3),
    "mul(x, sigmoid(mul(x, 1.5)))": lambda x: x * torch.sigmoid(x * 1.5),
    "sub(1.0, exp(neg(square(x))))": lambda x: 1 - torch.exp(-x.square()),
    "pow(2.0, x)": lambda x: 2**x,
    "div(x, add(abs(x), 1.0))": lambda x: x / (1 + x.abs()),
    "gelu(mul(x, 0.5))": lambda x: F.gelu(F.dropout(x, 0.1, training=False).contiguous() * 0.5).to(x.dtype),
    "add(relu(x), mul(tanh(x), 0.5))": lambda x: torch.add(F.relu(x), torch.tanh(x), alpha=0.5),
    "logsigmoid(x)": F.logsigmoid,
}


@pytest.mark.parametrize("expression", WRITTEN)
def test_any_other_pointwise_function_is_written_out_and_computes_the_same(expression):
    function = WRITTEN[expression]
    assert act_of(function) == expression
    x = torch.linspace(-5, 5, 41, dtype=torch.float64)
    torch.testing.assert_close(resolve(expression)(x), function(x.clone()))


@pytest.mark.parametrize("name", ["relu", "relu6", "gelu_tanh", "silu", "elu", "hardswish"])
def test_an_export_says_the_same(name):
    assert act_of(NAMED[name][0], see=capture_exported) == name


@pytest.mark.parametrize("expression", ["selu(x)", "leaky_relu(x, 0.2)"])
def test_an_export_of_a_written_out_activation_computes_the_same(expression):
    act = act_of(WRITTEN[expression], see=capture_exported)
    x = torch.linspace(-5, 5, 41, dtype=torch.float64)
    torch.testing.assert_close(resolve(act)(x), WRITTEN[expression](x.clone()))


class Learned(nn.Module):
    """Swish with a learned slope."""

    def __init__(self):
        super().__init__()
        self.beta = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x * torch.sigmoid(self.beta * x)


class Fixed(nn.Module):
    """Swish with its slope in a buffer."""

    def __init__(self, beta: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("beta", beta)

    def forward(self, x):
        return x * torch.sigmoid(self.beta * x)


def test_a_number_in_a_buffer_is_a_number():
    assert act_of(Fixed(torch.tensor(1.5))) == "mul(x, sigmoid(mul(1.5, x)))"
    assert act_of(Fixed(torch.tensor([1.702]))) == "quick_gelu"


REFUSED = {
    "learned parameter": (Learned(), "uses the learned parameter blocks.0.inner.act.beta"),
    "a number per channel": (Fixed(torch.ones(32)), "is not a plain number"),
    "no function we hold": (torch.sin, "is not a pointwise function that an ACM can hold"),
    "rounding": (lambda x: F.relu(x) + torch.div(x, 2, rounding_mode="floor"), "rounds"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_written_down_is_refused_with_the_operation(name):
    function, reason = REFUSED[name]
    told = act_of(function)
    assert told.startswith("activation cannot be written down: ") and reason in told


class Gated(nn.Module):
    """down(combine(a(x), b(x)))."""

    def __init__(self, combine) -> None:
        super().__init__()
        self.a, self.b, self.down, self.combine = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16), combine

    def forward(self, x):
        return self.down(self.combine(self.a(x), self.b(x)))


GATES = {
    "silu": (lambda a, b: F.silu(a) * b, "silu", "a"),
    "second branch": (lambda a, b: a * F.gelu(b), "gelu", "b"),
    "written out": (lambda a, b: a * torch.sigmoid(a) * b, "silu", "a"),
    "scaled": (lambda a, b: 0.5 * (F.relu(a) * b), "mul(0.5, relu(x))", "a"),
    "negated": (lambda a, b: -(F.relu(a) * b), "mul(-1.0, relu(x))", "a"),
    "bilinear": (lambda a, b: a * b, "identity", "a"),
    "glu of both": (lambda a, b: F.glu(torch.cat([a, b], -1), -1), None, None),
    "sum": (lambda a, b: F.silu(a) + b, None, None),
    "both activated": (lambda a, b: F.silu(a) * torch.tanh(b), None, None),
    "shifted": (lambda a, b: F.silu(a) * (b + 1), None, None),
}


@pytest.mark.parametrize("name", GATES)
def test_the_activated_branch_of_a_gated_mlp_comes_first(name):
    combine, act, activated = GATES[name]
    model = Stack(Residual(Gated(combine))).eval()
    sites, _ = find_sites(model, capture(model, example()))
    assert [(s.kind, s.act, s.first[0].weight) for s in sites] == (
        [] if act is None else [("gated_mlp", act, f"blocks.0.inner.{activated}.weight")]
    )


class Packed(nn.Module):
    """down(combine(up(x))) with twice the hidden width in `up`."""

    def __init__(self, combine) -> None:
        super().__init__()
        self.up, self.down, self.combine = nn.Linear(16, 64), nn.Linear(32, 16), combine

    def forward(self, x):
        return self.down(self.combine(self.up(x)))


FIRST, SECOND = (0, 32), (32, 64)
PACKS = {
    "chunk": (lambda h: (lambda a, b: F.silu(a) * b)(*h.chunk(2, -1)), "silu", [FIRST, SECOND]),
    "split": (lambda h: (lambda a, b: a * F.gelu(b))(*h.split(32, dim=-1)), "gelu", [SECOND, FIRST]),
    "glu": (lambda h: F.glu(h), "sigmoid", [SECOND, FIRST]),
    "slices": (lambda h: F.relu(h[..., 32:]) * h[..., :32], "relu", [SECOND, FIRST]),
    "indexed": (
        lambda h: (lambda p: torch.tanh(p[:, :, 0]) * p[:, :, 1])(h.view(2, 5, 2, 32)),
        "tanh",
        [FIRST, SECOND],
    ),
    "unbound": (lambda h: (lambda a, b: F.silu(a) * b)(*h.unflatten(-1, (2, 32)).unbind(-2)), "silu", [FIRST, SECOND]),
    "narrowed": (lambda h: h.narrow(-1, 0, 32) * F.silu(h.narrow(-1, 32, 32)), "silu", [SECOND, FIRST]),
    "flat tokens": (lambda h: F.glu(h.flatten(0, 1)).view(2, 5, 32), "sigmoid", [SECOND, FIRST]),
    "interleaved": (lambda h: F.silu(h[..., ::2]) * h[..., 1::2], None, "interleaved"),
    "a part only": (lambda h: F.silu(h[..., :32]), None, "only a part of the hidden value is used"),
    "overlapping": (lambda h: F.silu(h[..., :32]) * h[..., 16:48], None, "only a part of the hidden value is used"),
    "both activated": (lambda h: (lambda a, b: F.silu(a) * b)(*F.gelu(h).chunk(2, -1)), None, "cannot be written down"),
}


@pytest.mark.parametrize("name", PACKS)
def test_a_packed_gated_mlp_names_the_rows_of_its_branches(name):
    combine, act, rows = PACKS[name]
    model = Stack(Residual(Packed(combine))).eval()
    sites, skips = find_sites(model, capture(model, example()))
    if act is None:
        assert not sites and rows in next(skip.reason for skip in skips if skip.name.endswith("inner.up"))
    else:
        (site,) = sites
        assert (site.kind, site.act, [ref.rows for ref in site.first]) == ("gated_mlp", act, rows)
        assert (site.dense_width, site.d_in, site.d_out) == (32, 16, 16)
