"""Grafts of ACMs into the live model: the modules replaced, what has to be put back, the place of the ACM."""

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from acm_compiler.passes.capture.capture import capture
from acm_compiler.passes.capture.export import capture_exported
from acm_compiler.passes.find.dataflow import build_dataflow
from acm_compiler.passes.find.find_sites import match_sites
from acm_compiler.site import Graft
from tests.helpers import models
from tests.helpers.captures import find_sites
from tests.helpers.models import HIDDEN, WIDTH, Mlp, Residual, Stack, example


class Plain(nn.Module):
    """Linears `up` and `down` to build blocks of."""

    def __init__(self, *, width: int = WIDTH, packed: int = 1) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, packed * HIDDEN), nn.Linear(HIDDEN, width)
        self.act, self.drop = nn.GELU(), nn.Dropout(0.25)


class Wrapped(Plain):
    def forward(self, x):
        return self.drop(self.down(self.drop(self.act(self.up(x)))))


class Bare(Plain):
    """The block itself holds the linears and the residual."""

    def forward(self, x):
        return x + self.drop(self.down(self.act(self.up(x))))


class FunctionBetween(Plain):
    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class DropoutBetween(Plain):
    """A functional dropout between modules would fall on x if the modules before it passed x on."""

    def forward(self, x):
        return x + self.down(F.dropout(self.act(self.up(x)), 0.1, self.training))


class ActivationShared(Plain):
    """One activation module used in the MLP and elsewhere."""

    def forward(self, x):
        return x + self.down(self.act(self.up(self.act(x))))


class Packed(Plain):
    def __init__(self):
        super().__init__(packed=2)

    def forward(self, x):
        a, b = self.up(x).chunk(2, -1)
        return x + self.down(F.silu(a) * b)


class Gated(Plain):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, HIDDEN)

    def forward(self, x):
        return x + self.down(self.act(self.gate(x)) * self.up(x))


class TwoArguments(nn.Module):
    """A module that equals the region but takes more than the value."""

    def __init__(self):
        super().__init__()
        self.inner = Shaped()

    def forward(self, x):
        return x + self.inner(x, x.shape[1])


class Shaped(Plain):
    def forward(self, x, _tokens):
        return self.down(self.act(self.up(x)))


class ByKeyword(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Mlp()

    def forward(self, x):
        return x + self.inner(x=x)


class WithNorm(nn.Module):
    """A module with more in it than the region: the norm stays alive."""

    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU())
        self.out = nn.Sequential(nn.Linear(HIDDEN, WIDTH), nn.Dropout(0.3))

    def forward(self, x):
        return x + self.out(self.mlp(self.norm(x)))


class LeadingDropout(Plain):
    def forward(self, x):
        return self.down(self.act(self.up(self.drop(x))))


class NeverCalled(Plain):
    """Linears whose weights are used, but which are not called."""

    def forward(self, x):
        hidden = F.gelu(F.linear(x, self.up.weight, self.up.bias))
        return x + F.linear(hidden, self.down.weight, self.down.bias)


class Flattening(Plain):
    """The module flattens the tokens and gives them back flat; an ACM would keep the axes."""

    def forward(self, x):
        return self.down(self.act(self.up(x.flatten(0, 1))))


class Unflattening(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Flattening()

    def forward(self, x):
        return x + self.inner(x).view_as(x)


GRAFTS = {
    "one module": (Residual(Mlp()), "inner", Graft(kind="W", modules=("inner",))),
    "one module with dropout": (Residual(Wrapped()), "inner", Graft(kind="W", modules=("inner",), dropout=0.25)),
    "modules in a row": (Bare(), "down", Graft(kind="T", modules=("up", "act", "down"))),
    "function between": (FunctionBetween(), "down", Graft(kind="S", modules=("up", "down"))),
    "functional dropout between": (DropoutBetween(), "down", Graft(kind="S", modules=("up", "down"))),
    "shared activation": (ActivationShared(), "down", Graft(kind="S", modules=("up", "down"))),
    "packed": (Packed(), "down", Graft(kind="S", modules=("up", "down"), stash_width=2 * HIDDEN)),
    "gated": (Gated(), "down", Graft(kind="S", modules=("gate", "up", "down"))),
    "other arguments": (TwoArguments(), "inner.down", Graft(kind="T", modules=("inner.up", "inner.act", "inner.down"))),
    "called by keyword": (
        ByKeyword(),
        "inner.down",
        Graft(kind="T", modules=("inner.up", "inner.act", "inner.down")),
    ),
    "norm in front": (WithNorm(), "out.0", Graft(kind="T", modules=("mlp", "out.0"))),
    "dropout in front": (
        Residual(LeadingDropout()),
        "inner.down",
        Graft(kind="T", modules=("inner.up", "inner.act", "inner.down")),
    ),
    "linears never called": (NeverCalled(), "down", Graft(kind="R", modules=("",))),
    "bare parameters": (models.Functional(), "w2_acm", Graft(kind="R", modules=("",))),
    "other axes": (
        Unflattening(),
        "inner.down",
        Graft(kind="T", modules=("inner.up", "inner.act", "inner.down")),
    ),
}


class InputOverwritten(Plain):
    """An MLP whose input, which an ACM in the last linear's place reads, is written to before, through a view."""

    def forward(self, x):
        z = self.norm(x)
        h = self.up(z)
        z[:, 1:].mul_(2)
        return x + self.down(self.act(h)) + z


class CopyOverwritten(InputOverwritten):
    """The same computation, with z as it was for whoever reads it."""

    def forward(self, x):
        z = self.norm(x)
        h = self.up(z)
        scaled = z.clone()
        scaled[:, 1:].mul_(2)
        return x + self.down(self.act(h)) + scaled


@pytest.mark.parametrize("traced", [False, True])
def test_an_input_that_is_overwritten_before_the_last_linear_is_no_sites(traced):
    for block, found in ((InputOverwritten(), 0), (CopyOverwritten(), 1)):
        block.norm = nn.LayerNorm(WIDTH)
        model = Stack(block).eval()
        model = fx.symbolic_trace(model) if traced else model
        sites, skips = find_sites(model, capture(model, example()))
        assert len(sites) == found
        told = "its input is overwritten"
        assert found or [s.name for s in skips if s.reason.startswith(told)] == ["blocks.0.up", "blocks.0.down"]


def placed(graft: Graft) -> Graft:
    """The graft of a block on its own, as it is inside a `Stack`."""
    modules = tuple(f"blocks.0.{name}".rstrip(".") for name in graft.modules)
    return Graft(kind=graft.kind, modules=modules, dropout=graft.dropout, stash_width=graft.stash_width)


@pytest.mark.parametrize("name", GRAFTS)
def test_the_graft_replaces_as_little_as_it_can(name):
    block, place, graft = GRAFTS[name]
    model = Stack(block).eval()
    (site,), _ = find_sites(model, capture(model, example()))
    assert site.graft == placed(graft)
    assert site.name == f"blocks.0.{place}"


def test_a_dropout_module_shared_by_the_region_and_the_rest_is_not_passed_through():
    """Passing x through the shared dropout's other call would take it away from training."""

    class Shared(Plain):
        def forward(self, x):
            return self.drop(x) + self.down(self.drop(self.act(self.up(x))))

    model = Stack(Shared()).eval()
    (site,), _ = find_sites(model, capture(model, example()))
    assert site.graft.kind == "S" and "blocks.0.drop" not in site.graft.modules


def test_projections_are_replaced_as_modules_with_the_dropout_that_belongs_to_them():
    attention = models.Attention()
    attention.o = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2))
    model = Stack(Residual(attention)).eval()
    sites, _ = find_sites(model, capture(model, example()))
    assert [(site.name, site.graft.kind, site.graft.dropout) for site in sites] == [
        ("blocks.0.inner.q", "W", 0.0),
        ("blocks.0.inner.k", "W", 0.0),
        ("blocks.0.inner.v", "W", 0.0),
        ("blocks.0.inner.o", "W", 0.2),
    ]


def test_a_users_graph_module_is_rewritten_in_its_own_graph():
    model = fx.symbolic_trace(Stack(Residual(Mlp()), models.Functional()).eval())
    sites, _ = find_sites(model, capture(model, example()))
    assert [(site.name, site.graft) for site in sites] == [
        ("blocks.0.inner.down", Graft(kind="R", modules=("",))),
        ("blocks.1.w2_acm", Graft(kind="R", modules=("",))),
    ]


def test_an_exported_graph_module_is_rewritten_at_the_paths_of_its_weights():
    program = torch.export.export(Stack(Residual(Mlp())).eval(), (example(),), strict=False)
    model = program.module()
    (site,), _ = find_sites(model, capture(model, example()))
    assert (site.name, site.graft) == ("blocks.0.inner.down", Graft(kind="R", modules=("",)))


def test_an_export_does_not_pass_x_through_dropout_modules_it_cannot_see():
    model = Stack(Bare()).eval()
    (site,), _ = find_sites(model, capture_exported(model, example()))
    assert site.graft.kind == "S"


def test_a_match_tells_the_value_that_the_acm_will_read():
    model, inputs = models.hf_gpt2()
    graph = capture(model.eval(), inputs)
    shapes = {node.name: node.meta["shape"] for node in graph.graph.nodes if node.op != "output"}
    matches, _ = match_sites(model, build_dataflow(graph))
    # the linears themselves read [batch * tokens, width]
    assert {shapes[run.x] for match in matches for run in match.runs} == {(2, 7, 32)}
