"""Projections cut into slices: which pairs can be, that the change of basis is exact, and what is refused."""

import dataclasses
import json
import logging

import pytest
import torch
from torch import nn

import acm_compiler as acm
from acm_compiler.calibration.calibrate import calibrate_on
from acm_compiler.calibration.examples import Options, masked
from acm_compiler.calibration.learners.candidates import Learned, choose_forms
from acm_compiler.calibration.learners.slices import bases_of_scores, bases_of_values, head_blocks
from acm_compiler.errors import StorageError, UsageError
from acm_compiler.passes.rewrite.conversion import conversion, sites
from acm_compiler.passes.survey import analyze
from acm_compiler.planning.cost import site_cost
from acm_compiler.recipe.phases import LabelRule
from acm_compiler.recipe.schema import GateConfig, SiteRule
from acm_compiler.runs.pipeline import decide
from acm_compiler.tasks.classify import Classify
from acm_compiler.training.machine import open_machine
from acm_compiler.training.site_phases import Distill, GateLabels
from acm_compiler.training.tapped import TappedPhase
from tests.helpers import models
from tests.helpers.models import WIDTH, Stack, example
from tests.passes.find import test_attention_roles as test_roles
from tests.passes.find.test_attention_roles import Projected


class Biased(nn.Module):
    """torch's attention with learned rows appended to keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, add_bias_kv=True, batch_first=True)

    def forward(self, x):
        return x + self.attention(x, x, x, need_weights=False)[0]


class Packed(nn.Module):
    """x + attention of four heads of width 4 whose queries, keys and values come of one linear, split by `way`."""

    def __init__(self, way, rows=48) -> None:
        super().__init__()
        self.way, self.qkv, self.o = way, nn.Linear(16, rows), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.way(self.qkv(x))
        y = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=k.shape[1] < 4)
        return x + self.o(y.transpose(1, 2).flatten(2))


def chunked(qkv):
    return [part.unflatten(-1, (4, 4)).transpose(1, 2) for part in qkv.chunk(3, -1)]


def permuted(qkv):
    qkv = qkv.reshape(*qkv.shape[:2], 3, 4, 4).permute(2, 0, 3, 1, 4)
    return qkv[0] * 2, qkv[1], qkv[2]


def head_by_head(qkv):
    return qkv.unflatten(-1, (4, 3, 4)).movedim(1, 2).unbind(-2)


def in_groups(qkv):
    """Two groups of two heads of queries, one of keys and one of values."""
    q, k, v = qkv.unflatten(-1, (2, 4, 4)).split([2, 1, 1], dim=-2)
    return [part.flatten(2, 3).transpose(1, 2) for part in (q, k, v)]


def packed(way, **options):
    return lambda: (Packed(way, **options), torch.randn(2, 5, 16))


def projected(way, **options):
    return lambda: (Stack(Projected(way, **options)), example())


CASES = {
    "torch": lambda: models.torch_encoder(batch_first=True),
    "torch_sequence_first": lambda: models.torch_encoder(batch_first=False),
    "torchvision_vit": models.torchvision_vit,
    "hf_bert": models.hf_bert,
    "hf_vit": models.hf_vit,
    "hf_wav2vec2": models.hf_wav2vec2,
    "hf_llama": models.hf_llama,
    "sdpa": projected(test_roles.sdpa),
    "written_out": projected(test_roles.written_out),
    "keys_first": projected(test_roles.keys_first),
    "by_einsum": projected(test_roles.by_einsum),
    "by_baddbmm": projected(test_roles.by_baddbmm),
    "rotary": projected(test_roles.rotary),
    "grouped": projected(test_roles.grouped, kv_width=WIDTH // 2),
    "gated_output": projected(test_roles.gated_output),
    "bias_kv": lambda: (Stack(Biased()), example()),
    "packed": packed(chunked),
    "packed_permuted": packed(permuted),
    "packed_head_by_head": packed(head_by_head),
    "packed_in_groups": packed(in_groups, rows=32),
    "packed_written_out": lambda: (models.FusedQkv(), torch.randn(2, 5, 16)),
    "hf_gpt2": models.hf_gpt2,
}
ALL = {"q", "k", "v", "o"}
SLICED = (
    dict.fromkeys(CASES, ALL)
    | {
        "hf_llama": {"v", "o"},
        "rotary": {"v", "o"},
        "keys_first": {"q", "k"},
        "by_einsum": set(),
        "gated_output": {"q", "k"},
        "bias_kv": set(),
    }
    | {name: {"qkv", "o"} for name in CASES if name.startswith("packed") or name == "hf_gpt2"}
)
EXACT = [
    *(name for name in CASES if name.startswith("packed") or name == "hf_gpt2"),
    "torch",
    "hf_bert",
    "hf_llama",
    "written_out",
    "keys_first",
    "by_baddbmm",
    "rotary",
    "grouped",
]


def opened(case):
    return models.in_float64(CASES[case])


@torch.no_grad()
def answer(model, x):
    output = model(**x) if isinstance(x, dict) else model(x)
    for name in ("logits", "last_hidden_state"):
        output = getattr(output, name, output)
    return output


def plan_of(model, x, *, learners=2, **rule):
    rules = [SiteRule(match=("attn",), learners=learners, **rule)]
    return decide(analyze(model, x), rules, GateConfig())


def calibrated(model, x, **rule):
    converted = acm.rewrite(model, plan_of(model, x, **rule))
    calibrate_on(converted, masked([x] * 3), options=Options(tokens=10, gate_steps=5))
    return converted


def relative(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("case", CASES)
def test_pairs_are_found_where_only_moves_lie_between_projection_and_attention(case):
    model, x = opened(case)
    plan = plan_of(model, x)
    assert {site.role for site in plan.sites if site.pair} == SLICED[case]
    for site in plan.sites:
        if site.pair is None:
            assert site.unpaired
        else:
            partner = plan.site(site.pair.partner)
            assert partner.pair.partner == site.name and site.role + partner.role in (
                "qk",
                "kq",
                "vo",
                "ov",
                "qkvo",
                "oqkv",
            )
    assert acm.Plan.from_json(plan.to_json()) == plan


class Reordered(nn.Module):
    """x + attention of four heads, of which some are moved: queries, values, or what is read of the result."""

    def __init__(self, *, q=None, v=None, result=None) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.moved = [move or (lambda heads: heads) for move in (q, v, result)]

    def forward(self, x):
        q, k, v = (part(x).unflatten(-1, (4, 4)).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(self.moved[0](q), k, self.moved[1](v)).transpose(1, 2)
        return x + self.o(self.moved[2](y).flatten(2))


REORDERED = {
    "queries": ({"q": lambda heads: heads.flip(1)}, "qk", "its heads do not meet the partner's in order"),
    "values": ({"v": lambda heads: heads.roll(1, 1)}, "vo", "its heads do not meet the partner's in order"),
    "features": ({"result": lambda y: y.mT}, "vo", "the attention's result is not read head by head"),
}


@pytest.mark.parametrize("what", REORDERED)
def test_projections_whose_heads_meet_in_another_order_are_no_pair(what):
    moves, roles, reason = REORDERED[what]
    found = plan_of(Reordered(**moves).eval(), torch.randn(2, 3, 16)).sites
    assert {site.role: site.unpaired for site in found if site.pair is None} == dict.fromkeys(roles, reason)


def normed(qkv):
    q, k, v = chunked(qkv)
    return nn.functional.normalize(q, dim=-1), k, v


def flipped(qkv):
    q, k, v = chunked(qkv)
    return q, k, v.flip(1)


def keys_for_values(qkv):
    q, k, v = chunked(qkv)
    return q, k, k + 0 * v


UNPAIRED = {
    "normed": (normed, "normalize (test_slices.py:"),
    "flipped": (flipped, "its heads do not meet the partner's in order"),
    "keys_for_values": (keys_for_values, "its output is read by"),
}


@pytest.mark.parametrize("name", UNPAIRED)
def test_a_packed_projection_is_no_pair_where_a_part_of_it_is_not_read_as_a_pair_is(name):
    way, reason = UNPAIRED[name]
    found = plan_of(Packed(way).eval(), torch.randn(2, 3, 16)).sites
    assert {site.role: site.pair for site in found} == {"qkv": None, "o": None}
    assert reason in found[0].unpaired


class Exchanged(nn.Module):
    """Two packed projections, and two attentions in each of which the queries of one meet the keys of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.o, self.p = nn.Linear(16, 48), nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = chunked(self.a(x))
        others, keys, values = chunked(self.b(x))
        attend = nn.functional.scaled_dot_product_attention
        first, second = (y.transpose(1, 2).flatten(2) for y in (attend(q, keys, v), attend(others, k, values)))
        return x + self.o(first) + self.p(second)


def test_packed_projections_that_exchange_their_keys_are_no_pairs():
    found = plan_of(Exchanged().eval(), torch.randn(2, 3, 16)).sites
    reasons = {site.name: site.unpaired for site in found if site.role == "qkv"}
    assert reasons == dict.fromkeys("ab", "its queries meet the keys of another projection")


@pytest.mark.parametrize("roles", [[], [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 10]]], ids=["none", "twice"])
def test_heads_of_a_packed_projection_that_are_in_no_role_are_refused(roles):
    plan = json.loads(plan_of(Packed(chunked).eval(), torch.randn(2, 3, 16)).to_json())
    assert plan["sites"][0]["pair"]["roles"] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    plan["sites"][0]["pair"]["roles"] = roles
    with pytest.raises(StorageError, match=r"sites\[0\]\.pair\.roles[\s\S]*each of 12 heads in one of three roles"):
        acm.Plan.from_json(json.dumps(plan))


class FewHeads(nn.Module):
    """x + attention of four heads that meet the first two of four heads of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        q, k, v = (part(x).unflatten(-1, (4, 4)).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True)
        return x + self.o(y.transpose(1, 2).flatten(2))


def test_projections_with_heads_that_are_not_read_are_no_pair():
    model, x = FewHeads().eval(), torch.randn(2, 3, 16)
    reason = "the attention does not read all of its heads, or of its partner's"
    assert {site.role: site.unpaired for site in plan_of(model, x).sites} == dict.fromkeys("qkvo", reason)
    converted = calibrated(model, x)
    with torch.no_grad():
        assert relative(converted(x), model(x)) < 0.5


def test_a_layer_that_runs_often_has_no_pairs():
    found = plan_of(Stack(*[Projected(test_roles.sdpa)] * 3).eval(), example()).sites
    assert {site.unpaired for site in found} == {"it runs 3 times in one call of the model"} and len(found) == 4


def test_what_lies_in_between_is_named():
    model, x = opened("rotary")
    reasons = {site.role: site.unpaired for site in plan_of(model, x).sites}
    assert (
        "layer_norm (test_attention_roles.py:" in reasons["q"] and "lies between it and the attention" in reasons["q"]
    )
    model, x = opened("gated_output")
    assert "read by" in {site.role: site.unpaired for site in plan_of(model, x).sites}["v"]


@pytest.mark.parametrize("case", EXACT)
def test_a_change_of_basis_changes_no_answer_and_costs_nothing(case):
    model, x = opened(case)
    wanted = answer(model, x)
    plan = plan_of(model, x)
    rules = [
        SiteRule(match=(f"attn.{role}",), learners=2, form="slices" if role in SLICED[case] else "svd", lossless=True)
        for role in {site.role for site in plan.sites}
    ]
    converted = acm.rewrite(model, decide(analyze(model, x), rules, GateConfig()))
    calibrate_on(converted, masked([x] * 3), options=Options(tokens=10, gate_steps=5))
    plan = conversion(converted).plan
    assert {site.role for site in plan.sites if site.is_sliced} == SLICED[case]
    acm.set_k(converted, 2)
    assert relative(answer(converted, x), wanted) < 1e-9
    acm.set_k(converted, 1)
    assert relative(answer(converted, x), wanted) > 1e-6
    for site in plan.sites:
        if site.is_sliced:
            cost, learners = site_cost(site), sites(converted)[site.name].learners
            assert cost.learner_macs == cost.dense_macs and learners.w_top is None and learners.w_out is None
            assert learners.w_in.numel() == site.d_in * site.d_out
    assert relative(answer(acm.revert(converted), x), wanted) < 1e-14


def test_the_damage_expected_of_slices_does_not_depend_on_the_scale_of_their_basis():
    """Coordinates that v leaves out are those that o leaves out, however small values are."""
    model, x = opened("written_out")
    plan = plan_of(model, x)
    names = {site.role: site.name for site in plan.sites}
    with torch.no_grad():
        model.get_submodule(names["v"]).weight.mul_(1e-3)
        model.get_submodule(names["v"]).bias.mul_(1e-3)
        model.get_submodule(names["o"]).weight.mul_(1e3)
    found = acm.sensitivity(calibrated(model, x, form="slices")).sites
    assert 0.05 < found[names["v"]][1] / found[names["o"]][1] < 20


def test_sliced_models_are_saved_and_loaded(tmp_path):
    model, x = opened("grouped")
    converted = calibrated(model, x, form="slices")
    acm.save(converted, tmp_path / "out")
    loaded = acm.load(tmp_path / "out", base_model=model)
    for k in (1, 2):
        acm.set_k(converted, k)
        acm.set_k(loaded, k)
        assert torch.equal(answer(loaded, x), answer(converted, x))
    acm.set_budget(converted, 0.7)
    acm.set_budget(loaded, 0.7)
    assert torch.equal(answer(loaded, x), answer(converted, x))


@pytest.mark.parametrize("prefix", ["", "inner."])
@pytest.mark.parametrize("strict", [True, False])
def test_a_state_dict_of_slices_in_a_fresh_rewrite_names_the_plan_that_takes_it(strict, prefix):
    model, x = opened("grouped")
    source = converted = calibrated(model, x, form="slices")
    plan = conversion(converted).plan
    sliced = [site.name for site in plan.sites if site.form == "slices"]
    target = fresh = acm.rewrite(model, plan_of(model, x, form="auto"))
    if prefix:
        source, target = (torch.nn.ModuleDict({"inner": part}) for part in (converted, fresh))
    with pytest.raises(RuntimeError, match=r"plan that acm\.calibrate returned") as error:
        target.load_state_dict(source.state_dict(), strict=strict)
    assert f"the learners of {len(sliced)} sites" in str(error.value) and sliced[0] in str(error.value)
    assert str(error.value).count("acm.calibrate") == 1
    assert conversion(fresh).table is None, "nothing that belongs to other learners was taken"
    again = acm.rewrite(model, plan)
    again.load_state_dict(converted.state_dict(), strict=strict)
    assert torch.equal(answer(again, x), answer(converted, x))
    # what is only missing is torch's to judge
    part = {name: value for name, value in converted.state_dict().items() if not name.endswith("w_in")}
    assert again.load_state_dict(part, strict=False).missing_keys


def false_pairs(plan):
    """The plan of rotary attention, all of it slices, with queries and keys said to be a pair."""
    names = {site.role: site.name for site in plan.sites}
    v = plan.site(names["v"])
    like = dataclasses.replace(v, width=v.d_out // v.learners)

    def changed(site):
        if site.role not in "qk":
            return dataclasses.replace(site, form="slices", width=like.width)
        pair = dataclasses.replace(like.pair, partner=names["k" if site.role == "q" else "q"], heads=4)
        return dataclasses.replace(site, pair=pair, form="slices", width=like.width)

    return dataclasses.replace(plan, sites=tuple(changed(site) for site in plan.sites))


def test_a_pair_that_is_none_is_caught_on_the_model_itself(caplog):
    model, x = opened("rotary")
    plan = false_pairs(plan_of(model, x, lossless=True))
    converted = acm.rewrite(model, plan)
    with caplog.at_level(logging.INFO):
        plan = calibrate_on(converted, masked([x] * 3), options=Options(tokens=10, gate_steps=5))
    assert {site.role: site.form for site in plan.sites} == {"q": "svd", "k": "svd", "v": "slices", "o": "slices"}
    assert "a change of basis moves the model's answer" in caplog.text
    acm.set_k(converted, 2)
    assert relative(answer(converted, x), answer(model, x)) < 1e-9


@pytest.mark.parametrize(
    ("case", "learners", "match", "reason"),
    [
        ("rotary", 2, ("attn",), "lies between it and the attention"),
        ("sdpa", 3, ("attn",), "do not divide by 3 learners"),
        ("sdpa", 2, ("attn.q",), "stays dense"),
        ("bias_kv", 2, ("attn.k",), "cat"),
    ],
)
def test_slices_are_refused_with_the_reason(case, learners, match, reason):
    model, x = opened(case)
    with pytest.raises(UsageError, match=reason):
        decide(analyze(model, x), [SiteRule(match=match, learners=learners, form="slices")], GateConfig())


def unit_of(site, *damage, scale=1.0):
    """A unit of one site whose k = 1, 2, ... do this damage, times what listens to each token."""
    listens_T = torch.randn(400, generator=torch.Generator().manual_seed(0)).mul(2).exp() * scale
    damage_TC = listens_T[:, None] * torch.tensor([damage])
    known = dict.fromkeys(("weights", "x_TD", "gate", "evened_TC", "evened_gate"))
    known |= {"damage_TC": damage_TC, "expected_TC": damage_TC.double().numpy()}
    return [Learned(site=site, tokens=400, **known)]


def test_form_auto_takes_what_does_the_whole_less_damage():
    model, x = opened("hf_bert")
    plan = conversion(calibrated(model, x)).plan
    assert {site.form for site in plan.sites} <= {"svd", "slices"}
    a, b, c = plan.sites[:3]
    good, bad = unit_of(a, 0.1, 0.01), unit_of(a, 0.2, 0.02)
    assert choose_forms([[bad, good]])[0] is good and choose_forms([[bad]])[0] is bad
    # exact at the top is worth nothing where no budget pays for the top, and much where most tokens run it
    exact, nested = (0.2, 0.0), (0.1, 0.08)
    heard = [[unit_of(site, *exact, scale=1e4), unit_of(site, *nested, scale=1e4)] for site in (b, c)]
    idle = [unit_of(a, *exact), unit_of(a, *nested)]
    found = choose_forms([*heard, idle])
    assert found[0] is heard[0][0] and found[1] is heard[1][0] and found[2] is idle[1]


def spread(*shape):
    a = torch.randn(*shape, shape[-1], dtype=torch.float64)
    return a @ a.mT + 0.1 * torch.eye(shape[-1], dtype=torch.float64)


def test_bases_keep_scores_and_order_what_they_lose():
    torch.manual_seed(0)
    second_q, covariance_k = spread(4, 6), spread(2, 6)
    q, k = bases_of_scores(second_q, covariance_k)
    eye = torch.eye(6, dtype=torch.float64)
    torch.testing.assert_close(q.turn.mT @ k.turn.repeat_interleave(2, 0), eye.expand(4, 6, 6))
    torch.testing.assert_close(q.turn @ q.back, eye.expand(4, 6, 6))
    both = second_q.unflatten(0, (2, 2)).mean(1)
    turn = q.turn[::2]
    # in the new coordinates both moments are the same diagonal, the largest first
    for moments in (turn @ both @ turn.mT, k.turn @ covariance_k @ k.turn.mT):
        diagonal = moments.diagonal(dim1=1, dim2=2)
        assert (diagonal[:, :-1] >= diagonal[:, 1:]).all()
        torch.testing.assert_close(moments, torch.diag_embed(diagonal), rtol=1e-3, atol=1e-3)


def test_bases_keep_the_attention_s_result_and_order_what_they_lose():
    torch.manual_seed(0)
    covariance, weight, metric = spread(2, 6), torch.randn(5, 12, dtype=torch.float64), spread(5)
    v, o = bases_of_values(covariance, weight, metric, heads=2)
    x = torch.randn(7, 12, dtype=torch.float64)
    torch.testing.assert_close(v.turned(x) @ o.turned_columns(weight).T, x @ weight.T)
    gradient = torch.randn(7, 12, dtype=torch.float64)
    torch.testing.assert_close((v.turned_columns(gradient) * v.turned(x)).sum(1), (gradient * x).sum(1))
    rows = torch.randn(12, 3, dtype=torch.float64)
    torch.testing.assert_close(v.turned_rows(rows), v.turned(rows.T).T)
    turned = o.turned_columns(weight)
    losses = head_blocks(turned.T @ metric @ turned, 2)
    for h in range(2):
        turned_covariance = o.turn[h] @ covariance[h] @ o.turn[h].T
        torch.testing.assert_close(turned_covariance, torch.eye(6, dtype=torch.float64), rtol=1e-3, atol=1e-3)
        loss = losses[h].diagonal()
        assert (loss[:-1] >= loss[1:]).all()
        torch.testing.assert_close(losses[h], torch.diag(loss), rtol=1e-6, atol=1e-8)


def test_the_order_of_coordinates_is_worth_having():
    """Slices by damage against slices of the projections as they are."""
    model, x = opened("hf_bert")
    wanted = answer(model, x)
    converted = calibrated(model, x, form="slices")
    acm.set_k(converted, 1)
    found = relative(answer(converted, x), wanted)
    for site in conversion(converted).plan.sites:
        learners = sites(converted)[site.name].learners
        with torch.no_grad():  # the other half first
            learners.w_in.copy_(learners.w_in.flip(0))
            learners.b_out[1] += learners.b_out[2] - learners.b_out[1] if site.role == "o" else 0
    assert found < relative(answer(converted, x), wanted)


def test_phases_that_imitate_the_dense_network_leave_slices_as_they_are(caplog):
    model, x = opened("hf_bert")
    rules = [
        SiteRule(match=("mlp",), learners=2, second_layer="original"),
        SiteRule(match=("attn",), learners=2, form="slices"),
    ]
    converted = acm.rewrite(model, decide(analyze(model, x), rules, GateConfig()))
    calibrate_on(converted, masked([x] * 3), options=Options(tokens=10, gate_steps=5))
    with caplog.at_level(logging.INFO):
        phase = TappedPhase(converted, Distill(), Classify(), open_machine(), batch=2)
    assert set(phase.acms) == {site.name for site in conversion(converted).plan.sites if site.kind == "mlp"}
    assert "8 sites stay as calibrated" in caplog.text
    labels = GateLabels(labels=LabelRule(), temperature=1.0, plan=conversion(converted).plan)
    with pytest.raises(UsageError, match="slices in a basis of their own"):
        TappedPhase(converted, labels, Classify(), open_machine(), batch=2)
