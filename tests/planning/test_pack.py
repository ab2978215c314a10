"""q, k and v planned as one site: which can be, what the plan says of them, and what is refused."""

import dataclasses

import pytest
import torch
from torch import nn

import acm_compiler as acm
from acm_compiler.errors import StorageError, UsageError
from acm_compiler.evaluation.advice import advise
from acm_compiler.passes.survey import analyze
from acm_compiler.recipe.schema import GateConfig, SiteRule
from acm_compiler.runs.pipeline import decide
from tests.helpers import models
from tests.helpers.models import Stack, example
from tests.passes.find import test_attention_roles as test_roles
from tests.passes.find.test_attention_roles import Projected

PACK = {"match": "attn", "learners": 2, "pack": True}


def grouped():
    return Stack(Projected(test_roles.grouped, kv_width=8)), example()


CASES = {
    "hf_bert": models.hf_bert,
    "hf_vit": models.hf_vit,
    "hf_wav2vec2": models.hf_wav2vec2,
    "torchvision_vit": models.torchvision_vit,
    "torch": lambda: models.torch_encoder(batch_first=True),
    "grouped": grouped,
}


@pytest.mark.parametrize("case", CASES)
def test_q_k_and_v_become_one_site_that_costs_what_they_cost(case):
    model, x = CASES[case]()
    model.eval()
    apart, plan = (acm.plan(model, x, sites=[PACK | {"pack": pack}]) for pack in (False, True))
    roles = [site.role for site in plan.sites]
    assert roles == ["qkv", "o"] * (len(apart.sites) // 4) and acm.Plan.from_json(plan.to_json()) == plan
    for site, partner in zip(plan.sites[::2], plan.sites[1::2], strict=True):
        parts = [apart.site(name) for name in site.graft.modules]
        assert {part.role for part in parts} == {*"qkv"} and site.name == parts[0].name
        assert site.graft.widths == tuple(part.d_out for part in parts) and site.d_out == sum(site.graft.widths)
        assert site.pair.partner == partner.name and partner.pair.partner == site.name and not site.unpaired
        heads = {part.role: part.pair.heads for part in parts}
        assert [len(own) for own in site.pair.roles] == [heads[role] for role in "qkv"]
        assert sorted(sum(site.pair.roles, ())) == list(range(site.pair.heads))
    for key in ("dense_macs", "dense_params"):
        totals = [sum(getattr(site, key) for site in made.cost.sites) for made in (apart, plan)]
        assert totals[0] == totals[1], key
    assert sum(skip.macs for skip in plan.kept) == sum(skip.macs for skip in apart.kept)
    assert {skip.name for skip in plan.skipped} == {skip.name for skip in apart.skipped}
    assert plan.cost.gate_macs < apart.cost.gate_macs


def test_where_heads_cannot_change_their_basis_the_packed_site_says_why():
    model, x = models.hf_llama()
    plan = acm.plan(model.eval(), x, sites=[PACK])
    assert {site.role: site.pair for site in plan.sites} == {"qkv": None, "o": None}
    reasons = {site.role: site.unpaired for site in plan.sites}
    assert "not by attention alone" in reasons["qkv"] and "packed" in reasons["o"]
    with pytest.raises(UsageError, match="cannot be cut into slices"):
        acm.plan(model, x, sites=[PACK | {"form": "slices"}])


class Crossed(nn.Module):
    """Attention of the tokens to themselves, then to others."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.cross = Projected(test_roles.sdpa), nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x, memory):
        x = x + self.own(x)
        return x + self.cross(x, memory, memory, need_weights=False)[0]


def test_projections_that_read_other_tokens_stay_apart():
    model = Crossed().eval()
    plan = acm.plan(model, (torch.randn(2, 5, 16), torch.randn(2, 4, 16)), sites=[PACK])
    assert [site.role for site in plan.sites] == ["qkv", "o", "q", "k", "v", "o"]
    assert all(site.pair for site in plan.sites)


def test_a_rule_that_finds_nothing_to_pack_is_refused():
    model, x = CASES["grouped"]()
    for rules in (
        [PACK | {"match": "attn.q"}],
        [PACK, {"match": "attn.k", "learners": 2}],
        [PACK | {"match": "attn.o"}],
    ):
        with pytest.raises(UsageError, match=r"nothing to pack[\s\S]*read the same tokens"):
            acm.plan(model.eval(), x, sites=rules)
    with pytest.raises(UsageError, match="pack is for projections"):
        SiteRule(match=("mlp",), pack=True)


def test_parts_of_a_packed_site_are_no_advice():
    model, x = models.hf_bert()
    found, rules = analyze(model.eval(), x), [SiteRule(**PACK)]
    given = advise(found, decide(found, rules, GateConfig()), rules, GateConfig())
    assert [advice.match for advice in given] == ["mlp"]


@pytest.mark.parametrize("widths", [(), (16, 8, 9)], ids=["none", "other"])
def test_widths_that_do_not_add_up_are_refused(widths):
    model, x = CASES["grouped"]()
    plan = acm.plan(model.eval(), x, sites=[PACK])
    site = plan.sites[0]
    assert site.graft.widths == (16, 8, 8)
    wrong = dataclasses.replace(site, graft=dataclasses.replace(site.graft, widths=widths))
    with pytest.raises(StorageError, match=r"sites\[0\]\.(graft\.widths|first)"):
        acm.Plan.from_json(dataclasses.replace(plan, sites=(wrong, *plan.sites[1:])).to_json())
