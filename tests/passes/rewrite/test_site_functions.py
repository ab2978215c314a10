"""A plan is refused by a model of equal sizes that computes something else between the linears of a site."""

import dataclasses
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import acm_compiler as acm
from acm_compiler.errors import PlanMismatch
from acm_compiler.planning.plan import Plan
from tests.helpers.models import FEATURES


class _Block(nn.Module):
    """x + dropout(b(act(a(x))))."""

    def __init__(self, act, p: float = 0.0) -> None:
        super().__init__()
        self.a, self.act, self.b = nn.Linear(FEATURES, 64), act, nn.Linear(64, FEATURES)
        self.drop = nn.Dropout(p)

    def branch(self, x):
        return self.b(self.act(self.a(x)))

    def forward(self, x):
        return x + self.drop(self.branch(x))


def _scaled(_: object, x):
    return F.silu(x)


class _Whole(_Block):
    """The same without the sum."""

    def forward(self, x):
        return self.drop(self.branch(x))


class _Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


class _Scaled(_Block):
    """A slope as a plain number."""

    def __init__(self, slope: float) -> None:
        super().__init__(None)
        self.slope = slope

    def branch(self, x):
        return self.b(F.leaky_relu(self.a(x), self.slope))


class _Written(_Block):
    """The activation by name in the code alone."""

    def forward(self, x):
        return x + self.b(F.gelu(self.a(x)))


class _WrittenOtherwise(_Block):
    def forward(self, x):
        return x + self.b(F.relu(self.a(x)))


class _Bare(nn.Module):
    def __init__(self, act) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(64, FEATURES)), nn.Parameter(torch.randn(FEATURES, 64))
        self.act = act

    def forward(self, x):
        return x + F.linear(self.act(F.linear(x, self.a)), self.b)


def _encoder(act: str) -> nn.Module:
    layer = nn.TransformerEncoderLayer(FEATURES, 2, 64, activation=act, batch_first=True)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)


CASES = {
    "tiles": (lambda: _Block(nn.GELU()), lambda: _Block(nn.GELU("tanh")), r"act: GELU\(approximate='tanh'\)"),
    "module": (lambda: _Around(_Whole(nn.GELU())), lambda: _Around(_Whole(nn.ReLU())), r"inner\.act: ReLU\(\)"),
    "functions": (lambda: _Block(F.gelu), lambda: _Block(F.relu), "act: relu, expected gelu"),
    "lambdas": (lambda: _Block(lambda x: F.gelu(x)), lambda: _Block(lambda x: F.relu(x)), "of relu"),
    "parameters": (lambda: _Bare(F.silu), lambda: _Bare(F.gelu), "act: gelu, expected silu"),
    "encoder": (lambda: _encoder("gelu"), lambda: _encoder("relu"), r"layers\.0\.activation: relu"),
    "number": (lambda: _Scaled(0.2), lambda: _Scaled(0.3), "slope: nothing, expected 0.2"),
    "code": (lambda: _Written(None), lambda: _WrittenOtherwise(None), "forward: relu, expected gelu"),
    "graph": (
        lambda: fx.symbolic_trace(_Block(nn.GELU())),
        lambda: fx.symbolic_trace(_Block(nn.ReLU())),
        r"ReLU\(\), expected GELU",
    ),
    "dropout": (
        lambda: _Around(_Whole(nn.GELU(), 0.1)),
        lambda: _Around(_Whole(nn.GELU(), 0.3)),
        r"p=0\.3\), expected Dropout\(p=0\.1",
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_model_of_equal_sizes_that_computes_something_else_is_refused(case):
    planned, other, found = case
    model, x = planned().eval(), torch.randn(2, 5, FEATURES)
    plan = Plan.from_json(acm.plan(model, x).to_json())
    with pytest.raises(PlanMismatch, match=found) as caught:
        acm.rewrite(other().eval(), plan)
    assert caught.value.where == next(site.name for site in plan.sites if site.last is not None)
    again = planned().eval()
    torch.testing.assert_close(acm.rewrite(again, plan)(x), again(x))


def test_what_changes_no_output_is_the_same_model():
    x = torch.randn(2, 5, FEATURES)
    plan = acm.plan(_Around(_Whole(nn.ReLU())).eval(), x)
    acm.rewrite(_Around(_Whole(nn.ReLU(inplace=True), 0.4)), plan)
    without = _Around(_Whole(nn.ReLU()))
    without.inner.drop = nn.Identity()
    acm.rewrite(without, plan)
    hooked = _Around(_Whole(nn.ReLU()))
    hooked.inner._checkpointing = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    acm.rewrite(hooked, plan)
    plan = acm.plan(_Block(functools.partial(_scaled, object())).eval(), x)
    acm.rewrite(_Block(functools.partial(_scaled, object())), plan)


def test_a_plan_that_says_nothing_of_functions_is_taken_at_its_word():
    x = torch.randn(2, 5, FEATURES)
    plan = acm.plan(_Block(nn.GELU()).eval(), x)
    old = dataclasses.replace(plan, sites=tuple(dataclasses.replace(site, functions={}) for site in plan.sites))
    acm.rewrite(_Block(nn.ReLU()), old)
