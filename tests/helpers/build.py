"""Small ACMs and plans for tests, built by hand."""

from __future__ import annotations

import torch
from torch import nn

from acm_compiler.acm import ACM, Gate
from acm_compiler.passes.rewrite.build_acm import new_learners
from acm_compiler.passes.rewrite.conversion import Conversion
from acm_compiler.planning.cost import learner_unit, macs_per_learner
from acm_compiler.planning.decisions import ModelFacts, PlannedSite
from acm_compiler.planning.plan import Plan
from acm_compiler.site import Graft, Layout, LinearRef, Pair


def planned_site(name: str = "mlp", **changes) -> PlannedSite:
    """An MLP site of 8 -> 32 -> 8 as 4 learners, with a bypass; `changes` replace fields."""
    first = LinearRef(weight=f"{name}.0.weight", bias=f"{name}.0.bias")
    values = {
        "name": name,
        "kind": "mlp",
        "d_in": 8,
        "d_out": 8,
        "dense_width": 32,
        "act": "gelu",
        "first": (first,) * (2 if changes.get("kind") == "gated_mlp" else 1),
        "last": LinearRef(weight=f"{name}.2.weight", bias=f"{name}.2.bias"),
        "residual": True,
        "tokens": 5,
        "layout": Layout(),
        "graft": Graft(kind="W", modules=(name,)),
        "learners": 4,
        "width": 8,
        "k_min": 0,
        "gate_width": 8,
        "learner_act": "gelu",
    }
    return PlannedSite(**values | changes)


def sliced_site(name: str = "proj", role: str = "q", **changes) -> PlannedSite:
    """A projection of 8 -> 8 with 2 heads, as 4 slices."""
    pair = Pair(partner=f"{name}_other", heads=2)
    values = {"kind": "linear", "act": "identity", "learner_act": "identity", "dense_width": None, "last": None}
    return planned_site(name, **values | {"role": role, "form": "slices", "pair": pair, "width": 2} | changes)


def plan_of(*sites: PlannedSite, dense_macs: int | None = None, batch: int = 1) -> Plan:
    """A plan of these sites, for a model of nothing else unless `dense_macs` says more."""
    from acm_compiler.planning.cost import site_cost

    total = sum(site_cost(site).dense_macs for site in sites)
    facts = ModelFacts(
        fingerprint="0" * 16, cls="tests.Model", dense_macs=dense_macs or total, dense_params=1000, batch=batch
    )
    return Plan(model=facts, sites=tuple(sites))


def acm_for(site: PlannedSite, *, dtype: torch.dtype = torch.float32, cost: float = 1.0) -> ACM:
    """A randomly started ACM of that site, gates free to choose."""
    learners = new_learners(site, like=torch.empty(0, dtype=dtype))
    learners.start_random()
    with torch.no_grad():
        learners.b_out.normal_()
        if learners.w_top is not None:
            learners.w_top.normal_()
    gate = Gate(site.d_in, site.gate_width, site.columns, dtype=dtype)
    acm = ACM(gate, learners, name=site.name, k_min=site.k_min, layout=site.layout, cost=cost, dropout=0.0)
    acm.set_choices(knob=0.0, k_lo=site.k_min, k_hi=site.learners)
    return acm


class Stack(nn.Module):
    """ACMs one after the other, each with a bypass."""

    def __init__(self, acms: list[ACM]) -> None:
        super().__init__()
        self.acms = nn.ModuleList(acms)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for acm in self.acms:
            x = x + acm(x)
        return x


def stack_of(*sites: PlannedSite, dtype: torch.dtype = torch.float32) -> Stack:
    """A model of ACMs with their shared conversion."""
    plan = plan_of(*sites)
    unit = learner_unit(plan.sites)
    model = Stack([acm_for(site, dtype=dtype, cost=macs_per_learner(site) / unit) for site in sites])
    owner = Conversion(plan=plan)
    for acm in model.acms:
        acm.conversion = owner
    return model
