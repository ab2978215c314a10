"""Rules to decisions: selection, widths, k_min, gates."""

import dataclasses

import pytest
import torch

import acm_compiler as acm
from acm_compiler.errors import SelectionError, UsageError
from acm_compiler.planning.planner import choose_rules, matched_width, matches_name, plan_sites, select, too_narrow
from acm_compiler.recipe.schema import GateConfig, SiteRule
from acm_compiler.site import Graft, LinearRef, Pair, Site
from tests.helpers import tour_model
from tests.helpers.models import Stack, example
from tests.helpers.training_tiny import Tiny
from tests.passes.find.test_attention_roles import Projected, by_einsum

REF = LinearRef(weight="w")
MLP = Site(
    name="layers.0.mlp",
    kind="mlp",
    d_in=768,
    d_out=768,
    dense_width=3072,
    act="gelu",
    first=(REF,),
    last=REF,
    residual=True,
    tokens=197,
    graft=Graft(kind="W", modules=("layers.0.mlp",)),
)
Q = dataclasses.replace(
    MLP,
    name="layers.0.attn.q_proj",
    kind="linear",
    role="q",
    dense_width=None,
    act="identity",
    last=None,
    residual=False,
)
O_PROJ = dataclasses.replace(Q, name="layers.0.attn.out_proj", role="o", residual=True)
MLP_1 = dataclasses.replace(MLP, name="layers.1.mlp", residual_norm=True)
FOUND = [Q, O_PROJ, MLP, MLP_1]
BOTH = [SiteRule(match="mlp"), SiteRule(match="attn")]


def planned_by(found, rules, gate):
    return plan_sites(found, choose_rules(found, rules), gate)


def test_a_rule_that_names_no_site_is_refused():
    with pytest.raises(UsageError, match="a rule must name the sites"):
        choose_rules(FOUND, [SiteRule(match=())])


def test_a_projection_that_costs_less_than_any_learners_stays_dense():
    """200 -> 1 is one product of 200 MACs; four learners of width 1 are 804, and their gate is more."""
    narrow = dataclasses.replace(Q, d_in=200, d_out=1)
    (reason,) = too_narrow([narrow, O_PROJ, MLP], choose_rules([narrow, O_PROJ, MLP], BOTH)).values()
    assert reason.startswith("too narrow: 4 learners of width 1 take 804 MACs for a token, and it takes 200")
    for rule in (SiteRule(match="attn", width=1), SiteRule(match="attn", form="slices"), SiteRule(match="mlp")):
        assert not too_narrow([narrow, MLP], choose_rules([narrow, MLP], [rule]))
    paired = dataclasses.replace(narrow, pair=Pair(partner="k", heads=1))
    assert not too_narrow([paired], choose_rules([paired], [SiteRule(match="attn")]))


def test_what_stays_dense_for_its_cost_is_a_skip_of_the_plan():
    model, x = Stack(Projected(by_einsum)), example()
    assert len(acm.plan(model, x, sites="attn").sites) == 4
    plan = acm.plan(model, x, sites="attn", learners=16)
    assert not plan.sites
    assert sum(skip.reason.startswith("too narrow: 16 learners") for skip in plan.skipped) == 4


def test_vit_b_sizes_match_the_paper():
    planned = planned_by([MLP, Q], BOTH, GateConfig())
    assert [(s.learners, s.width) for s in planned] == [(4, 768), (4, 96)]
    assert [s.gate_width for s in planned] == [64, 8]
    assert [s.k_min for s in planned] == [0, 1]
    assert [s.state for s in planned] == ["learners", "dense"]


def test_widths_round_up_so_that_the_split_stays_lossless():
    assert matched_width(dataclasses.replace(MLP, dense_width=10), 4) == 3
    assert matched_width(dataclasses.replace(Q, d_in=4, d_out=4), 16) == 1


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({"match": "layers.*.mlp", "form": "svd"}, "form is for projections, .*found 2 mlp"),
        ({"match": r"re:q_proj$", "second_layer": "per_k"}, "second_layer is for MLPs, .*found 1 linear"),
        ({"match": ("mlp", "attn"), "exclude": "*.mlp", "second_layer": "shared"}, "found 2 linear"),
    ],
)
def test_a_key_that_is_for_none_of_a_rules_sites_is_refused(rule, words):
    with pytest.raises(UsageError, match=words) as caught:
        planned_by(FOUND, [SiteRule(**rule)], GateConfig())
    assert f"sites, match {rule['match'] if isinstance(rule['match'], str) else 'mlp, attn'}: " in str(caught.value)


def test_a_rule_for_both_kinds_may_have_the_keys_of_both():
    rule = SiteRule(match="layers.*", form="svd", second_layer="per_k")
    assert {(s.kind, s.form, s.second_layer) for s in planned_by(FOUND, [rule], GateConfig())} == {
        ("linear", "svd", "shared"),
        ("mlp", "svd", "per_k"),
    }


@pytest.mark.parametrize(("more", "told"), [({}, True), ({"zero": "mean"}, False)])
def test_a_report_says_where_k_zero_was_asked_for_in_vain(more, told):
    model, example = tour_model.model()
    plan = acm.plan(model, example, sites=[{"match": ["mlp", "attn"], "k_min": 0, **more}])
    raised = [site.name for site in plan.sites if site.k_min == 1]
    (note,) = plan.notes if told else [""]
    assert len(raised) == (6 if told else 0) and plan.notes == acm.Plan.from_json(plan.to_json()).notes
    if told:
        assert f"not 0 as asked, at {raised[0]} and 5 more: " in note and f"\nnote: {note}\n" in str(plan)
    assert not acm.plan(model, example).notes


@pytest.mark.filterwarnings("ignore:.*nested tensors")  # torch says it once a process
def test_a_plan_says_where_padded_positions_were_zero():
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model = torch.nn.Sequential(torch.nn.TransformerEncoder(layer, 1).eval(), torch.nn.Linear(16, 16))
    x, padding = torch.randn(2, 5, 16), torch.arange(5) >= torch.tensor([[5], [3]])
    plan = acm.plan(model, x)
    (note,) = plan.notes
    assert note.startswith("padded positions of 0 hold values") and acm.Plan.from_json(plan.to_json()) == plan
    with torch.no_grad():
        before, after = (m[0](x, src_key_padding_mask=padding) for m in (model, acm.rewrite(model, plan)))
    assert not before[padding].any() and after[padding].any()
    model[0].use_nested_tensor = False
    assert not acm.plan(model, x).notes


def test_k_zero_needs_a_bypass_without_a_norm():
    by_name = {s.name: s for s in planned_by(FOUND, BOTH, GateConfig())}
    assert by_name["layers.0.mlp"].k_min == 0 and by_name["layers.1.mlp"].k_min == 1
    assert by_name["layers.0.attn.out_proj"].k_min == 1
    asked = planned_by(FOUND, [SiteRule(match="attn", k_min=0)], GateConfig())
    assert [s.k_min for s in asked] == [1, 0]


def test_k_zero_anywhere_is_the_mean_output_where_a_rule_says_so():
    asked = planned_by(FOUND, [SiteRule(match="mlp"), SiteRule(match="attn", zero="mean")], GateConfig())
    assert {s.name: s.k_min for s in asked} == {Q.name: 0, O_PROJ.name: 0, MLP.name: 0, MLP_1.name: 1}
    assert [s.k_min for s in planned_by([Q], [SiteRule(match="attn", k_min=0, zero="mean")], GateConfig())] == [0]
    assert [s.k_min for s in planned_by([Q], [SiteRule(match="attn", k_min=2, zero="mean")], GateConfig())] == [2]


@pytest.mark.parametrize(
    ("match", "count"),
    [
        ("mlp", 2),
        ("attn", 2),
        ("attn.q", 1),
        ("layers.0", 3),
        ("layers.*.mlp", 2),
        ("re:1[.]mlp$", 1),
        ("layers.0.mlp", 1),
    ],
)
def test_every_way_to_select(match, count):
    assert len(select(FOUND, match)) == count


@pytest.mark.parametrize("match", ["layers.0.mpl", "attn.qkv", "re:nothing", "re:(", "blocks.*"])
def test_what_matches_nothing_is_refused(match):
    with pytest.raises(SelectionError):
        select(FOUND, match)


def test_a_pattern_means_a_name_a_part_of_the_model_a_glob_or_an_expression():
    name = "layers.10.mlp.up"
    assert all(matches_name(pattern, name) for pattern in (name, "layers.10", "layers.*.up", r"re:[.]1\d[.]", "re:up$"))
    assert not any(matches_name(pattern, name) for pattern in ("layers.1", "mlp", "re:^mlp", "LAYERS.*"))
    with pytest.raises(SelectionError, match="not a regular expression"):
        matches_name("re:[", name)


def test_the_nearest_names_are_offered():
    with pytest.raises(SelectionError, match=r"layers\.0\.mlp"):
        select(FOUND, "layers.0.mpl")


def test_parts_of_the_model_are_offered_too():
    with pytest.raises(SelectionError, match=r"nearest: layers\.1, "):
        select(FOUND, "layer.1")


def test_learners_too_narrow_to_start_from_the_weights_are_refused():
    narrow = [SiteRule(match="mlp"), SiteRule(match="layers.1.mlp", learners=2, width=1500)]
    with pytest.raises(UsageError, match=r"layers\.1\.mlp: .*found 2 learners x width 1500 = 3000, expected .* 3072"):
        planned_by(FOUND, narrow, GateConfig())
    for rule in (SiteRule(match="mlp", learners=2, width=1536), SiteRule(match="mlp", width=5, init="random")):
        assert [s.width for s in planned_by([MLP], [rule], GateConfig())] == [rule.width]


def test_three_names_are_offered_however_little_they_are_alike():
    with pytest.raises(SelectionError) as error:
        select(FOUND, "zzz")
    assert len(str(error.value).partition("nearest: ")[2].split(", ")) == 3


def test_a_role_that_the_model_has_packed_is_offered():
    packed = dataclasses.replace(FOUND[-1], role="qkv", name="layers.0.attn.qkv")
    with pytest.raises(SelectionError, match=r"nearest: attn\.qkv"):
        select([packed], "attn.q")


def test_later_rules_win_and_can_exclude():
    rules = [
        SiteRule(match="mlp"),
        SiteRule(match="attn", exclude="attn.q"),
        SiteRule(match="layers.0.mlp", learners=8),
    ]
    planned = {s.name: s for s in planned_by(FOUND, rules, GateConfig(hidden=16))}
    assert set(planned) == {"layers.0.mlp", "layers.1.mlp", "layers.0.attn.out_proj"}
    assert planned["layers.0.mlp"].width == 384 and planned["layers.0.mlp"].gate_width == 16


def test_a_nonlinear_activation_at_a_linear_site_implies_the_random_start():
    planned = planned_by([Q], [SiteRule(match="attn", activation="gelu")], GateConfig())[0]
    assert planned.init == "random" and planned.state == "learners" and planned.has_bias_in
    with pytest.raises(UsageError, match="init: random"):
        planned_by([MLP], [SiteRule(match="mlp", activation="relu")], GateConfig())


def test_lossless_keeps_what_all_learners_need():
    planned = {s.name: s for s in planned_by(FOUND, [SiteRule(match=("mlp", "attn"), lossless=True)], GateConfig())}
    assert planned["layers.0.mlp"].second_layer == "shared_top"
    assert all(site.has_top for site in planned.values())


def test_rules_can_be_written_as_in_a_recipe():
    model, x = Tiny(), torch.randn(2, 5, 6)
    for given in ({"match": "mlp", "learners": 2}, [{"match": ["mlp"], "learners": 2}]):
        assert [site.learners for site in acm.plan(model, x, sites=given).sites] == [2, 2]
    with pytest.raises(UsageError, match=r"learners: found 0, expected at least 1[\s\S]*such as {\"match\""):
        acm.plan(model, x, sites=[{"match": "mlp", "learners": 0}])
    with pytest.raises(UsageError, match=r"rule for sites: width: found 0, expected at least 1 or 'auto' \("):
        acm.plan(model, x, sites=[{"match": "mlp", "width": 0}])
    with pytest.raises(UsageError, match=r"rule for sites: match: missing \("):
        acm.plan(model, x, sites=[{"learners": 2}])
    with pytest.raises(UsageError, match=r"no such key .*did you mean 'learners'\?\) \(found learnerz"):
        acm.plan(model, x, sites=[{"match": "mlp", "learnerz": 2}])
