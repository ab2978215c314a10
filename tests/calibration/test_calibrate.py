"""`calibrate` as users call it: what it leaves in the model, and that it leaves nothing when it fails."""

import copy
import dataclasses
import itertools
import math
import re

import pytest
import torch

import acm_compiler
import acm_compiler.calibration.calibrate as process
import acm_compiler.runtime.measure_budgets as measure
from acm_compiler.acm.context import observers_of
from acm_compiler.acm.reference import prefix_output
from acm_compiler.calibration import choose_gates
from acm_compiler.calibration.calibrate import calibrate, calibrate_on
from acm_compiler.calibration.damage import evened
from acm_compiler.calibration.examples import Options, masked
from acm_compiler.calibration.fit_all import fit_all, in_memory
from acm_compiler.calibration.gates import fit_gates
from acm_compiler.calibration.learners import candidates
from acm_compiler.calibration.recalibrate import Sensitivity, recalibrate, sensitivity
from acm_compiler.errors import (
    BudgetUnreachable,
    CompiledModelError,
    DataError,
    LayoutUnknown,
    NoBudgetTable,
    NoDenseRegion,
    NothingRecorded,
    TrainingFailed,
    UsageError,
)
from acm_compiler.passes.rewrite.conversion import conversion, sites
from acm_compiler.runtime.budgets import setting_of
from acm_compiler.runtime.control import FixedK, run_mode, set_budget, set_k
from acm_compiler.runtime.usage import record
from acm_compiler.site import Layout
from tests.helpers import tour_model
from tests.helpers.calibration_tiny import N, make_tiny, texts

DATA = texts(40, batch=8)


@pytest.fixture(autouse=True)
def coarse(monkeypatch):
    """Tables of few rows: every row costs many forwards."""
    monkeypatch.setattr(measure, "GRID", (0.4, 0.7))


def quick(**changes) -> Options:
    return Options(**{"tokens": 200, "gate_steps": 2, "sample": 1000} | changes)


@pytest.fixture(scope="module")
def shared():
    model = make_tiny()
    calibrate_on(model, masked(DATA), options=quick(tokens=700, gate_steps=100))
    return model


def answer(model, batch):
    with torch.no_grad():
        return model(**batch)[batch["attention_mask"].bool()]


def damage(model, batches):
    dense = make_tiny()
    return sum(float((answer(model, b) - answer(dense, b)).square().sum()) for b in batches)


def everything_of(model):
    """State that a failed calibration must leave as it was."""
    owner = conversion(model)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = {name: (module.training, len(module._forward_pre_hooks)) for name, module in model.named_modules()}
    flags = {name: (p.requires_grad, p.grad is None) for name, p in model.named_parameters()}
    acms = {
        name: (acm.state, acm.tap, acm.gate.rule, acm.knob_value, int(acm.k_lo), int(acm.k_hi))
        for name, acm in sites(model).items()
    }
    return tensors, modes, flags, acms, (owner.plan, owner.table, owner.budget, owner.damage)


def assert_unchanged(before, model):
    after = everything_of(model)
    assert before[0].keys() == after[0].keys()
    assert all(torch.equal(tensor, after[0][name]) for name, tensor in before[0].items())
    assert before[1:] == after[1:]


def test_the_plan_comes_back_resolved(shared):
    plan = conversion(shared).plan
    for site in plan.sites:
        assert site.state == "learners" and sites(shared)[site.name].state == "learners"
        assert site.form == ("svd" if site.kind == "linear" else "auto")
        assert sites(shared)[site.name].gate.rule == "damage"
    undecided = dataclasses.replace(plan, sites=tuple(dataclasses.replace(s, form="auto") for s in plan.sites))
    (told,) = set(str(plan).splitlines()) - set(str(undecided).splitlines())
    assert told.startswith("forms: ") and f"linear svd x{sum(s.kind == 'linear' for s in plan.sites)}" in told


def test_more_learners_come_nearer_to_the_original(shared):
    model, errors = shared, []
    for k in range(N + 1):
        set_k(model, k)
        errors.append(damage(model, DATA[-4:]))
    assert all(worse > better for worse, better in itertools.pairwise(errors))
    assert errors[N] < 0.05 * errors[1]


def test_one_model_serves_every_budget(shared):
    model, errors, reached = shared, [], []
    budgets = (0.35, 0.5, 0.7, 0.85)
    for budget in budgets:
        set_budget(model, budget)
        with torch.no_grad(), record(model) as usage:
            for batch in DATA[:12]:
                model(**batch)
        reached.append(usage.budget)
        errors.append(damage(model, DATA[:12]))
    assert reached == pytest.approx(budgets, abs=0.05)
    assert errors == sorted(errors, reverse=True)


def test_it_starts_with_all_learners_or_at_its_own_budget():
    model = make_tiny()
    calibrate_on(model, masked(DATA), options=quick())
    assert {(int(a.k_lo), int(a.k_hi)) for a in sites(model).values()} == {(N, N)}
    model = make_tiny()
    conversion(model).default_budget = 0.6
    calibrate_on(model, masked(DATA), options=quick())
    assert conversion(model).budget == 0.6 and int(sites(model)["blocks.0.mlp"].k_lo) < N


@pytest.mark.parametrize("kind", ["shared_top", "per_k", "original"])
def test_lossless_sites_answer_exactly_at_the_top(kind):
    model = make_tiny(second_layer=kind, lossless=True)
    dense = make_tiny()
    calibrate_on(model, masked(DATA), options=quick())
    x = torch.randn(20, 12)
    for name, acm in sites(model).items():
        with torch.no_grad():
            weights = acm.learners.weights()
            torch.testing.assert_close(prefix_output(x, weights, N), sites(dense)[name].dense(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["shared_top", "per_k", "original"])
def test_every_second_layer_beats_the_neurons_in_their_given_order(kind):
    fresh, fitted = make_tiny(second_layer=kind), make_tiny(second_layer=kind)
    calibrate_on(fitted, masked(DATA), options=quick())
    for acm in sites(fresh).values():
        if acm.state == "dense":
            acm.learners, acm.state = sites(fitted)[acm.name].learners, "learners"
    for k in (1, 2, 3):
        set_k(fresh, k)
        set_k(fitted, k)
        assert damage(fitted, DATA[-4:]) < damage(fresh, DATA[-4:])


def test_sensitivity_says_what_calibration_expects(shared):
    found = sensitivity(shared)
    assert found.sites.keys() == sites(shared).keys()
    assert list(found.sites["blocks.0.proj"]) == [1, 2, 3, 4] and list(found.sites["blocks.0.mlp"]) == [0, 1, 2, 3, 4]
    for damages in found.sites.values():
        values = list(damages.values())
        assert values == sorted(values, reverse=True) and values[-1] >= 0
    assert "k = 4" in str(found) and "blocks.0.glu" in str(found)
    with pytest.raises(NothingRecorded, match="calibrate"):
        sensitivity(make_tiny())


def test_what_rounding_does_is_printed_as_no_damage():
    table = str(Sensitivity(sites={"a": {1: 3.2e-3, 2: 4.7e-16}}))
    assert table.splitlines()[-1].split() == ["a", "3.2e-03", "0"]


def test_an_answer_without_gradients_is_warned_of():
    model = make_tiny()
    detached = Options(tokens=200, gate_steps=2, sample=1000, answer=lambda output, mask: output.detach())
    with pytest.warns(UserWarning, match=r"answer has no gradient, as if it were made under torch\.no_grad"):
        calibrate_on(model, masked(DATA), options=detached)
    assert all(damages[1] > 0 for damages in sensitivity(model).sites.values())


def test_budgets_to_come_and_progress_are_refused_in_words():
    model = make_tiny()
    with pytest.raises(BudgetUnreachable, match=r"found 1%, expected [\d.]+% to [\d.]+%"):
        calibrate(model, DATA, budgets=["1%"])
    with pytest.raises(UsageError, match="such as print"):
        calibrate(model, DATA, progress=3)


def test_expected_damage_is_what_happens_to_the_output():
    model = make_tiny()
    calibrate_on(model, masked(DATA), options=quick())
    expected = sensitivity(model).sites["blocks.0.glu"]
    dense = make_tiny()
    energy = sum(float(answer(dense, b).square().sum()) for b in DATA)
    set_k(model, N)
    for k in (1, 2):
        for name, acm in sites(model).items():
            acm.state = "learners" if name == "blocks.0.glu" else "dense"
        sites(model)["blocks.0.glu"].set_choices(knob=0.0, k_lo=k, k_hi=k)
        assert damage(model, DATA) / energy == pytest.approx(expected[k], rel=0.35)


def test_the_same_data_gives_the_same_model_in_one_pass_or_in_three():
    once, thrice = make_tiny(), make_tiny()
    said = []
    calibrate_on(once, masked(DATA), options=quick(gate_steps=5))
    calibrate_on(thrice, masked(DATA), options=quick(gate_steps=5, memory_bytes=1), progress=said.append)
    sites_told = [line.split(",")[0] for line in said if ": site " in line]
    assert sites_told == [f"calibrate: site {number} of 3" for number in (1, 2, 3)]
    assert sum("pass 3 of 3" in line for line in said) == 1
    for (name, a), b in zip(once.state_dict().items(), thrice.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, msg=name)


def test_sites_are_grouped_by_the_memory_they_need():
    planned = conversion(make_tiny(depth=2)).plan.sites
    assert [len(g) for g in in_memory(planned, quick())] == [6]
    assert [len(g) for g in in_memory(planned, quick(memory_bytes=1))] == [1] * 6

    def passes(memory: int, where: str | None = None) -> int:
        return len(list(in_memory(planned, quick(memory_bytes=memory, offload=where))))

    most = next(2**power for power in range(40, 0, -1) if passes(2**power) > 1)
    assert passes(most, "disk") == 1 < passes(most, "cpu") == passes(most)  # files may hold four times as much


def test_every_site_is_reported():
    said = []
    calibrate(make_tiny(), DATA, tokens=100_000, progress=said.append)
    assert any(re.match(r"calibrate: token [\d,]+ of 100,000, 10 batches, ", line) for line in said)
    assert any(re.match(r"calibrate: budget \d+ of \d+, ", line) for line in said)
    assert any("tokens, fewer than the 100,000 asked for, at each of 3 sites" in line for line in said)
    assert [line.split(":")[1].split()[0] for line in said if re.fullmatch(r"calibrate: .*, \d+ s", line)] == [
        "read",
        "learners",
        "lowest",
        "fewest",
        "budget",
    ]
    for name in sites(make_tiny()):
        assert any(re.match(rf"calibrate: site \d of 3, {re.escape(name)}", line) for line in said)


def test_it_can_be_called_in_inference_mode_and_in_training():
    model = make_tiny().train()
    with torch.inference_mode():
        calibrate_on(model, masked(DATA), options=quick())
    assert model.training and all(acm.learners.training for acm in sites(model).values())
    model(DATA[0]["x"]).sum().backward()
    assert model.embed.weight.grad is not None


def test_autocast_around_a_calibration_changes_nothing():
    plain, cast = make_tiny(), make_tiny()
    calibrate_on(plain, masked(DATA), options=quick())
    with torch.autocast("cpu", torch.bfloat16):
        calibrate_on(cast, masked(DATA), options=quick())
        assert torch.is_autocast_enabled("cpu")
    assert conversion(cast).table == conversion(plain).table
    wanted = plain.state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in cast.state_dict().items())


def test_too_few_tokens_keep_the_second_layer_and_say_so():
    model = make_tiny(second_layer="per_k")
    with pytest.warns(UserWarning, match="too few tokens to refit the second layer of 2 MLP sites"):
        calibrate_on(model, masked(DATA), options=quick(tokens=30))
    assert {s.second_layer for s in conversion(model).plan.sites if s.kind != "linear"} == {"original"}
    assert sites(model)["blocks.0.mlp"].learners.w_out.dim() == 3
    # what k = N answers is the dense region's answer
    x = torch.randn(5, 12)
    acm, dense = sites(model)["blocks.0.mlp"], sites(make_tiny())["blocks.0.mlp"].dense
    with torch.no_grad():
        torch.testing.assert_close(prefix_output(x, acm.learners.weights(), N), dense(x), rtol=1e-4, atol=1e-5)


class Interrupt:
    """Progress that is interrupted at the line that holds `text`."""

    def __init__(self, text):
        self.text = text

    def __call__(self, line):
        if self.text in line:
            raise KeyboardInterrupt


@pytest.mark.parametrize("at", ["token ", "read ", "blocks.0.mlp", "lowest k", "budget 3"])
def test_an_interrupt_leaves_the_model_as_it_was(at):
    model = make_tiny().train()
    set_k(model, N)
    before = everything_of(model)
    with pytest.raises(KeyboardInterrupt):
        calibrate_on(model, masked(DATA), options=quick(), progress=Interrupt(at))
    assert_unchanged(before, model)


def test_an_interrupted_second_calibration_keeps_the_first(monkeypatch):
    model = make_tiny(second_layer="per_k")
    calibrate_on(model, masked(DATA), options=quick())
    set_budget(model, 0.5)
    before = everything_of(model)

    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(process, "spend", stop)
    with pytest.raises(KeyboardInterrupt), pytest.warns(UserWarning, match="too few tokens"):
        calibrate_on(model, masked(DATA), options=quick(tokens=30))
    assert_unchanged(before, model)


def refused(error, match, model=None, data=DATA, **changes):
    model = make_tiny(**changes) if model is None else model
    before = everything_of(model)
    with pytest.raises(error, match=match):
        calibrate_on(model, masked(data), options=quick())
    assert_unchanged(before, model)


def test_no_batches_is_refused():
    refused(DataError, "no batches", data=[])


def test_nothing_but_padding_to_measure_budgets_on_is_refused():
    empty = {**DATA[0], "attention_mask": torch.zeros_like(DATA[0]["attention_mask"])}
    refused(DataError, "no real token", data=[empty if place % 6 == 5 else b for place, b in enumerate(DATA)])


def test_a_site_that_never_ran_is_named():
    model = make_tiny()
    model.blocks[0].__class__ = type(
        "Half", (type(model.blocks[0]),), {"forward": lambda self, x, mask: x + self.proj(x) + self.mlp(x)}
    )
    refused(DataError, r"blocks\.0\.glu: .*never saw a token", model=model)


def test_an_answer_that_is_not_finite_is_refused():
    broken = quick(answer=lambda output, mask: output + torch.tensor([0.0] * 11 + [math.nan]))
    with pytest.raises(TrainingFailed, match="answer is not finite"):
        calibrate_on(make_tiny(), masked(DATA), options=broken)


def test_values_that_are_not_finite_are_named_by_site():
    poisoned = [{**b, "x": torch.where(torch.rand(b["x"].shape) > 0.99, torch.nan, b["x"])} for b in DATA]
    refused(TrainingFailed, r"blocks\.0\.proj: .*not finite", data=poisoned)


def test_a_model_that_overwrites_what_gradients_need_is_told_so():
    model = make_tiny()

    def forward(self, x, mask):
        x = x + self.proj(self.norms[0](x))
        z = self.norms[1](x)
        x += self.mlp(z)
        return x + self.glu(z.mul_(2))

    model.blocks[0].__class__ = type("InPlace", (type(model.blocks[0]),), {"forward": forward})
    refused(UsageError, "the model overwrites values that its gradients need", model=model)


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("blocks.0.mlp.dense.2.weight", r"blocks\.0\.mlp\.2\.weight"),
        ("blocks.0.glu.dense.c.weight", r"blocks\.0\.glu\.c\.weight"),
        ("blocks.1.norms.0.bias", r"blocks\.1\.norms\.0\.bias"),
    ],
)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_named_and_not_the_site_that_saw_it(name, where, value):
    model = make_tiny(depth=2)
    with torch.no_grad():
        model.get_parameter(name)[..., 0] = value
    refused_names = rf"^{where}: the model's own weights are not finite \(found nan or infinity in \d+ of \d+ values\)"
    with pytest.raises(TrainingFailed, match=refused_names):
        calibrate_on(model, masked(DATA), options=quick())


def test_broken_weights_that_no_example_uses_do_no_harm():
    model = make_tiny()
    model.unused = torch.nn.Parameter(torch.full((2,), torch.nan))
    calibrate_on(model, masked(DATA), options=quick(tokens=700))


def test_where_the_answer_is_zero_damage_is_that_of_the_sites_outputs():
    model = make_tiny()
    with pytest.warns(UserWarning, match="the model's answer is zero on all of the data"):
        calibrate_on(model, masked(DATA), options=quick(tokens=700, answer=lambda output, mask: output * 0))
    damages = sensitivity(model).sites
    assert all(0 <= damage < 100 for site in damages.values() for damage in site.values())
    assert all(site[1] > site[2] > 0 for site in damages.values())
    assert set_budget(model, 0.5) == pytest.approx(0.5, abs=0.05)


def test_a_model_without_its_dense_weights_is_refused():
    model = make_tiny()
    sites(model)["blocks.0.mlp"].dense = None
    with pytest.raises(NoDenseRegion, match=r"blocks\.0\.mlp"):
        calibrate(model, DATA)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"learner_act": "relu"}, UsageError, "activation of their own"),
        ({"layout": None}, LayoutUnknown, "which example"),
    ],
)
def test_what_has_no_closed_form_is_refused_before_any_data_is_read(changes, error, match):
    model = make_tiny()
    owner = conversion(model)
    owner.plan = dataclasses.replace(
        owner.plan, sites=tuple(dataclasses.replace(site, **changes) for site in owner.plan.sites)
    )

    def untouched():
        raise AssertionError("data was read")
        yield

    with pytest.raises(error, match=match):
        calibrate(model, untouched())


def test_sites_whose_weights_are_on_meta_are_refused_before_any_data_is_read():
    model = make_tiny()
    model.blocks[0].to("meta")
    with pytest.raises(UsageError, match=r"^blocks\.0\.\S+: calibration needs the weights of every.*\n.*offload="):
        calibrate(model, iter(()))


def test_where_a_plan_holds_for_one_example_batches_of_several_are_refused():
    model = make_tiny()
    owner = conversion(model)
    whole = tuple(dataclasses.replace(site, layout=Layout(batch_axis=None)) for site in owner.plan.sites)
    owner.plan = dataclasses.replace(owner.plan, sites=whole)
    with pytest.raises(LayoutUnknown, match=r"found a batch of 8[\s\S]*batches of one example"):
        calibrate(model, DATA)


def test_budgets_that_will_be_asked_for_stay_reachable(monkeypatch):
    monkeypatch.setattr(choose_gates, "_WORTH", -100.0)
    model = make_tiny()
    calibrate_on(model, masked(DATA), options=quick())
    with pytest.raises(BudgetUnreachable):
        set_budget(model, 0.1)
    model = make_tiny()
    calibrate_on(model, masked(DATA), options=quick(budgets=(0.1,)))
    assert set_budget(model, 0.1) == pytest.approx(0.1)
    assert {point.k_lo for point in conversion(model).table.points} == {0}


def test_gates_are_compared_on_no_more_examples_than_tell(monkeypatch):
    def tried(enough):
        batches, whole = [], choose_gates._try
        with monkeypatch.context() as patch:
            patch.setattr(choose_gates, "_COMPARED", enough)
            patch.setattr(choose_gates, "_try", lambda *args: batches.append(args[1]) or whole(*args))
            calibrate_on(make_tiny(), masked(DATA), options=quick(tokens=600))
        return len(batches)

    assert tried(1) == 1 < tried(10**6)


def test_recalibrate_measures_the_table_alone(shared):
    model = copy.deepcopy(shared)
    set_budget(model, 0.5)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    louder = [{**b, "x": 3 * b["x"]} for b in DATA]
    old = conversion(model).table
    table = recalibrate(model, louder, tokens=200, budgets=(0.37,))
    new, cost = conversion(model).table, conversion(model).plan.cost
    assert table.points == new.points and table.examples == new.examples and new is not old
    lines = [line.split() for line in str(table).splitlines()]
    measured = [point for point in new.points if point.measured]
    shown = [[f"{p.share:.3f}", f"{cost.model_share(p.share):.1%}", f"{p.knob:+.3g}"] for p in measured]
    assert lines[2:-1] == shown and "BudgetPoint" not in str(table)
    assert str(table).splitlines()[0].split("  ")[-1].strip() == "knob"
    assert any(abs(point.share - 0.37) < 0.02 for point in table.points)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert conversion(model).budget == 0.5
    with torch.no_grad(), record(model) as usage:
        for batch in louder[:5]:
            model(**batch)
    assert usage.budget == pytest.approx(0.5, abs=0.06)
    with pytest.raises(DataError):
        recalibrate(model, [])


def test_gates_that_nothing_trained_are_not_measured(tmp_path):
    dense, example = tour_model.model()
    model = acm_compiler.rewrite(dense, acm_compiler.plan(dense, example, sites="mlp"))
    acm_compiler.save(model, tmp_path / "out")
    for fresh in (model, acm_compiler.load(tmp_path / "out", base_model=dense)):
        with pytest.raises(NoBudgetTable, match=r"acm\.calibrate\(model, batches\), or a recipe's gate phase"):
            recalibrate(fresh, [torch.randn(4, *example.shape[1:])])
        assert conversion(fresh).table is None
    for site in sites(model).values():
        torch.nn.init.zeros_(site.gate.outer.bias)  # as a loop of the user's own would change it
    recalibrate(model, [torch.randn(4, *example.shape[1:])])


def test_frozen_learners_and_gates_stay_frozen():
    model = make_tiny()
    model.requires_grad_(False)
    calibrate_on(model, masked(DATA), options=quick())
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_cap_holds_through_a_recalibration(shared):
    model = copy.deepcopy(shared)
    set_budget(model, 0.5, cap=0.5)
    recalibrate(model, DATA, tokens=100)
    assert max(int(acm.k_hi) for acm in sites(model).values()) == N // 2


def test_what_was_set_holds_through_a_recalibration(shared):
    model, louder = copy.deepcopy(shared), [{**b, "x": 3 * b["x"]} for b in DATA]

    def modes():
        return [run_mode(acm) for acm in sites(model).values()]

    set_budget(model, 0.5)
    set_k(model, 2)
    recalibrate(model, louder, tokens=100)
    assert modes() == [FixedK(2)] * 3 and conversion(model).budget == 0.5
    set_k(model, None)
    by_table = modes()
    set_budget(model, 0.5)
    assert modes() == by_table != [FixedK(2)] * 3
    set_k(sites(model)["blocks.0.mlp"], 3)  # a part of the model
    recalibrate(model, DATA, tokens=100)
    assert [isinstance(mode, FixedK) for mode in modes()] == [False, True, False]
    assert modes()[0].knob == pytest.approx(setting_of(conversion(model), 0.5).knob)
    assert modes()[0].knob != pytest.approx(by_table[0].knob)


def test_a_fixed_k_without_a_budget_holds_through_a_recalibration(shared):
    model = copy.deepcopy(shared)
    conversion(model).budget = None
    set_k(model, 1)
    recalibrate(model, DATA, tokens=100)
    assert {run_mode(acm) for acm in sites(model).values()} == {FixedK(1)} and conversion(model).budget is None


def test_data_without_tokens_leaves_the_budget_table_as_it_was(shared):
    model = copy.deepcopy(shared)
    empty = {name: value[:0] for name, value in DATA[0].items()}
    with pytest.raises(DataError, match="no real token"):
        recalibrate(model, [empty])
    assert conversion(model).table == conversion(shared).table


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_data_that_is_not_finite_is_refused_and_changes_nothing(shared, broken):
    model = copy.deepcopy(shared)
    set_budget(model, 0.6)
    before = [acm.run_time() for acm in sites(model).values()]
    mask = DATA[1]["attention_mask"]
    real = int(mask.sum())
    bad = DATA[1] | {"x": torch.where(mask[..., None].bool(), broken, DATA[1]["x"])}
    with pytest.raises(TrainingFailed, match=rf"blocks\.0\.proj.*{real} of {real} tokens of batch 2 of 3 to measure"):
        recalibrate(model, [DATA[0], bad, DATA[2]], tokens=200)
    assert conversion(model).table == conversion(shared).table and conversion(model).budget == 0.6
    assert [acm.run_time() for acm in sites(model).values()] == before
    assert not observers_of(conversion(model))


def test_a_held_out_batch_that_is_not_finite_ends_a_calibration(shared):
    bad = [{**b, "x": b["x"] * math.nan} if number % 6 == 5 else b for number, b in enumerate(DATA)]
    model = copy.deepcopy(shared)
    with pytest.raises(TrainingFailed, match="batch 1 of"):
        calibrate_on(model, masked(bad), options=quick())
    assert conversion(model).table == conversion(shared).table


def test_budgets_that_will_be_asked_for_are_spelt_as_for_set_budget(shared):
    model = copy.deepcopy(shared)
    plan = conversion(model).plan
    recalibrate(model, DATA, tokens=100, budgets=[f"{100 * plan.cost.model_share(0.37)}%"])
    assert any(abs(point.share - 0.37) < 0.02 for point in conversion(model).table.points)
    for wrong in (0.4, "40%", [40], ["abc"]):
        with pytest.raises(UsageError):
            recalibrate(model, DATA, budgets=wrong)
        with pytest.raises(UsageError):
            calibrate(model, DATA, budgets=wrong)
    with pytest.raises(UsageError, match=r"did you mean '40%'"):
        calibrate(model, DATA, budgets=[0.4, 40])


def test_a_calibration_draws_nothing_from_the_generator_of_the_user():
    model, before = make_tiny(), torch.get_rng_state()
    calibrate_on(model, masked(DATA), options=quick())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_batch_that_the_model_does_not_take_is_refused_in_words(shared):
    model = copy.deepcopy(shared)
    labelled = [(batch["x"], batch["attention_mask"], torch.zeros(8, 3, 2)) for batch in DATA]
    words = r"float32 \[8, .*TypeError: .* positional arguments.*\n.*labels"
    for act in (calibrate, recalibrate):
        with pytest.raises(UsageError, match=words) as caught:
            act(model, labelled)
        assert isinstance(caught.value.__cause__, TypeError)


def test_a_compiled_model_is_refused_before_it_runs(shared):
    compiled = torch.compile(copy.deepcopy(shared), backend="eager")
    for act in (calibrate, recalibrate):
        with pytest.raises(CompiledModelError, match="eager model"):
            act(compiled, iter([]))


def test_gates_of_sites_that_read_the_same_input_are_trained_together(monkeypatch):
    trained = []

    def fit(gates, x_TD, damages, **options):
        trained.append(len(gates))
        fit_gates(gates, x_TD, damages, **options)

    monkeypatch.setattr(candidates, "fit_gates", fit)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    data = list(torch.randn(12, 8, 5, 16))
    converted = acm_compiler.rewrite(model, acm_compiler.plan(model, data[0]))
    calibrate_on(converted, masked(data), options=quick())
    # q, k and v, each in two forms, then o in its own basis and in that of slices, then the MLP; two gates each
    assert trained == [12, 2, 2, 2]


@pytest.mark.parametrize("better", [0, 1])
def test_the_kind_of_gates_that_changes_outputs_less_is_installed(monkeypatch, better):
    fitted, said = [], []

    def fit(*given):
        fitted.extend(fit_all(*given))
        for site in fitted:  # one learner for all, whatever it costs
            site.gates[1 - better].gate.outer.weight.data.zero_()
            site.gates[1 - better].gate.outer.bias.data.fill_(0)
            site.gates[1 - better].scores.fill_(0)
        return fitted

    monkeypatch.setattr(process, "fit_all", fit)
    model = make_tiny()
    calibrate_on(model, masked(DATA), options=quick(), progress=said.append)
    for site in fitted:
        assert sites(model)[site.site.name].gate is site.gates[better].gate
        assert site.gates[better].gate.outer.weight.any()
    told = ("as gradients do", "nearly alike")[better]
    assert any(f"gates weigh tokens {told}" in line for line in said)
    assert sum("budget table 0." in line for line in said) == 1


def test_evened_weights_of_tokens_keep_their_mean_and_order():
    weight_T = torch.tensor([0.0, 1.0, 5.0, 10.0])
    found = evened(weight_T)
    assert float(found.mean()) == pytest.approx(4.0) and bool((found.diff() > 0).all())
    assert float(found.min()) > 3
