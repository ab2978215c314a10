"""Bare parameters of a site, however the model's own code looks at them: what the analysis lets pass still runs."""

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import acm_compiler as acm
from acm_compiler.errors import AcmError
from acm_compiler.site import Graft

WAYS = {
    "view": lambda w: w.view(w.shape[0], -1),
    "reshape by a function": lambda w: torch.reshape(w, w.shape),
    "reshape to and fro": lambda w: w.reshape(w.numel() // w.shape[1], w.shape[1]),
    "view_as itself": lambda w: w.view_as(w),
    "squeeze": lambda w: w.squeeze(),
    "data": lambda w: w.data,
    "cpu": lambda w: w.cpu(),
    "type": lambda w: w.type(torch.float32),
    "a type by name": lambda w: w.double().float(),
    "another's type": lambda w: w.type_as(w) if not w.is_cuda else None,
    "requires_grad_": lambda w: w.requires_grad_(),
    "an alias": lambda w: torch.ops.aten.alias(w),
    "dropout that is off": lambda w: F.dropout(w, 0.1, False),
    "contiguous": lambda w: w.t().contiguous().t(),
    "swapdims": lambda w: w.swapdims(0, 1).swapaxes(0, 1),
    "a part of its own length": lambda w: w[: len(w)],
    "one part": lambda w: w.split(w.size(0))[0].chunk(1)[0].narrow(0, 0, w.shape[0]),
    "questions": lambda w: w if w.layout == torch.strided and w.is_floating_point() and w.element_size() == 4 else None,
}


class Bare(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.up, self.up_bias = nn.Parameter(torch.randn(16, 8)), nn.Parameter(torch.randn(16))
        self.down, self.down_bias = nn.Parameter(torch.randn(8, 16)), nn.Parameter(torch.randn(8))
        self.way = way

    def forward(self, x):
        h = F.gelu(F.linear(x, self.way(self.up), self.up_bias))
        return x + h @ self.way(self.down).t() + self.down_bias


def planned(way):
    torch.manual_seed(0)
    model, x = Bare(way).eval(), torch.randn(2, 5, 8)
    plan = acm.plan(model, x, sites="mlp")
    assert [site.graft for site in plan.sites] == [Graft(kind="R", modules=("",))]
    return model, x, plan


@pytest.mark.parametrize("way", WAYS)
def test_a_weight_may_be_looked_at_in_any_way_that_the_analysis_takes_for_the_same(way):
    model, x, plan = planned(WAYS[way])
    torch.testing.assert_close(acm.rewrite(model, plan)(x), model(x))


@pytest.mark.parametrize("way", ["view", "data", "cpu", "a type by name", "contiguous", "one part", "keywords"])
def test_a_graph_of_the_users_own_looks_at_it_in_these_ways_too(way):
    torch.manual_seed(0)
    keywords = {"keywords": lambda w: w.transpose(dim0=0, dim1=1).transpose(dim0=0, dim1=1)}
    model, x = fx.symbolic_trace(Bare((WAYS | keywords)[way]).eval()), torch.randn(2, 5, 8)
    plan = acm.plan(model, x, sites="mlp")
    assert len(plan.sites) == 1
    torch.testing.assert_close(acm.rewrite(model, plan)(x), model(x))


def test_what_the_plan_does_not_show_is_refused_with_the_remedy():
    model, x, plan = planned(lambda w: w)
    converted = acm.rewrite(model, plan)
    for other, what in ((lambda w: w.view(-1), "view"), (torch.relu, "relu"), (lambda w: w[0], "index 0")):
        converted.way = other
        with pytest.raises(
            AcmError, match=rf"in a way that its plan does not show .found {what}[^$]*exclude this site"
        ):
            converted(x)


PARTS = {
    "slices": lambda w: (w[:8], w[8:-8], w[-8:]),
    "narrow from the end": lambda w: (w.narrow(0, -24, 8), w.narrow(0, -16, 8), w.narrow(0, -8, 8)),
    "narrow by keywords": lambda w: tuple(torch.narrow(w, dim=0, start=start, length=8) for start in (0, 8, 16)),
    "chunk": lambda w: w.clone().chunk(chunks=3, dim=-w.dim()),
    "split": lambda w: w.split(split_size=8),
    "a function's split": lambda w: torch.split(w, split_size_or_sections=[8, 8, 8]),
    "split_with_sizes": lambda w: torch.split_with_sizes(w, [8, 8, 8]),
    "split_with_sizes by keywords": lambda w: w.split_with_sizes(split_sizes=[8, 8, 8], dim=0),
    "tensor_split": lambda w: w.tensor_split(3),
    "tensor_split by places": lambda w: torch.tensor_split(w, (8, 16), dim=0),
    "parts of parts": lambda w: (w[:16][:8], w[:16][8:], w[8:].narrow(0, 8, 8)),
}


class Packed(nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.qkv, self.bias = nn.Parameter(torch.randn(24, 8)), nn.Parameter(torch.randn(24))
        self.parts = parts

    def forward(self, x):
        q, k, v = (
            F.linear(x, *part)[:, None] for part in zip(self.parts(self.qkv), self.parts(self.bias), strict=True)
        )
        return x + F.scaled_dot_product_attention(q, k, v)[:, 0]


@pytest.mark.parametrize("roles", [("attn.q", "attn.k", "attn.v"), ("attn.v",)])
@pytest.mark.parametrize("parts", PARTS)
def test_rows_of_a_packed_weight_are_those_that_torch_gives(parts, roles):
    torch.manual_seed(0)
    model, x = Packed(PARTS[parts]).eval(), torch.randn(2, 5, 8)
    converted = acm.rewrite(model, acm.plan(model, x, sites=roles))
    with torch.no_grad(), acm.record(converted) as usage:
        torch.testing.assert_close(converted(x), model(x))
    assert len(usage.k) == len(roles) and all(k.numel() == 10 for k in usage.k.values())


class BiasOutside(nn.Module):
    """The bias of a linear that is no call of it is added by itself."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + F.linear(F.gelu(self.up(x)), self.down.weight) + self.down.bias


@pytest.mark.parametrize("traced", [False, True])
def test_a_module_of_which_more_is_read_than_the_weight_stays(traced):
    torch.manual_seed(0)
    model, x = BiasOutside().eval(), torch.randn(2, 5, 8)
    model = fx.symbolic_trace(model) if traced else model
    converted = acm.rewrite(model, acm.plan(model, x, sites="mlp"))
    torch.testing.assert_close(converted(x), model(x))
    assert torch.equal(converted.down.bias, model.down.bias)
    assert acm.revert(converted).state_dict().keys() == model.state_dict().keys()
