"""The three phases: what each trains, by which loss, and what it leaves behind."""

import copy
import itertools
import logging
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from acm_compiler import progress
from acm_compiler.acm.reference import prefix_output
from acm_compiler.errors import NoBudgetTable, SitesNotFitted, TrainingFailed, UsageError
from acm_compiler.passes.rewrite.conversion import conversion, sites
from acm_compiler.recipe.phases import CalibratePhase
from acm_compiler.runtime.batch_context import batch as batch_context
from acm_compiler.runtime.control import relax, set_budget
from acm_compiler.runtime.measure_budgets import measure_budgets
from acm_compiler.training.loop import learning_rate
from acm_compiler.training.loss_terms import losses
from acm_compiler.training.machine import open_machine
from acm_compiler.training.schedule import make_phase, run_schedule
from acm_compiler.training.site_phases import start_projections
from tests.helpers.training_runs import (
    changed,
    distill,
    examples,
    finetune,
    fitted,
    gate,
    job_in,
    metrics,
    parts_of,
    run_once,
)
from tests.helpers.training_tiny import Task, make_model, make_teacher

pytestmark = pytest.mark.usefixtures("rough_budgets")

PARTS = ("gate", "learners")


@pytest.mark.parametrize(
    ("config", "group", "term"),
    [
        pytest.param(distill(steps=40), {"learners"}, "loss", id="distill"),
        pytest.param(distill(steps=40, detach=True), {"learners"}, "loss", id="distill-detached"),
        pytest.param(gate(steps=40), {"gate"}, "loss", id="gate"),
        pytest.param(finetune(steps=40), {"learners", "gate", "rest"}, "task", id="finetune"),
    ],
)
def test_a_phase_lowers_its_loss_and_changes_exactly_its_parameters(config, group, term, tmp_path):
    model = make_model()
    if config.phase != "distill":
        fitted(model)
    before = parts_of(model)
    run_schedule(model, [config], job_in(tmp_path))
    lines = metrics(tmp_path)
    first, last = ([line[term] for line in part] for part in (lines[:5], lines[-5:]))
    assert sum(last) < 0.9 * sum(first)
    assert changed(before, model) == group


def test_projections_begin_to_distill_as_the_best_factors_of_their_weights():
    model, x_TD = make_model(), torch.randn(20, 8)
    found = sites(model)
    projections = {site.name: site for site in conversion(model).plan.sites if site.kind == "linear"}
    before = {name: copy.deepcopy(acm.learners) for name, acm in found.items()}
    start_projections(model)
    assert projections
    for name, acm in found.items():
        unchanged = all(map(torch.equal, acm.learners.parameters(), before[name].parameters()))
        assert unchanged == (name not in projections)
    for name in projections:
        learners, weight = found[name].learners, found[name].dense.weight
        u, s, v = torch.linalg.svd(weight.double())
        for k in range(1, learners.w_in.shape[0] + 1):
            rank = k * learners.w_in.shape[1]
            expected = x_TD.double() @ ((u[:, :rank] * s[:rank]) @ v[:rank]).T + found[name].dense.bias.double()
            y = prefix_output(x_TD[:, : weight.shape[1]], learners.weights(), k)
            torch.testing.assert_close(y, expected.float(), rtol=1e-4, atol=1e-5)
    found[name].state, before = "learners", learners.w_in.clone()
    learners.w_in.data.add_(1)
    start_projections(model)
    assert torch.equal(learners.w_in, before + 1)


@pytest.mark.parametrize("config", [distill(), gate(), finetune()], ids=lambda c: c.phase)
def test_a_phase_leaves_no_trace_but_what_it_trained(config, tmp_path):
    model = fitted(make_model())
    model.head.weight.requires_grad_(False)
    flags = [p.requires_grad for p in model.parameters()]
    model.blocks[0].train()
    modes = [m.training for m in model.modules()]
    run_schedule(model, [config], job_in(tmp_path))
    assert [p.requires_grad for p in model.parameters()] == flags
    assert [m.training for m in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())
    assert all(a.tap is None and a.temperature is None for a in sites(model).values())
    assert not any(acm.choices for acm in sites(model).values())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_phase_that_breaks_leaves_no_trace_either(tmp_path):
    class Broken(Task):
        def inputs(self, batch):
            raise RuntimeError("unreadable")

    model = fitted(make_model())
    for config in (distill(), finetune()):
        with pytest.raises(RuntimeError, match="unreadable"):
            run_schedule(model, [config], job_in(tmp_path, task=Broken()))
    assert not model.training
    assert all(a.tap is None and a.temperature is None for a in sites(model).values())
    assert all(p.requires_grad == (".dense." not in n) for n, p in model.named_parameters())


def test_parameters_the_user_froze_stay_as_they_are(tmp_path):
    model = fitted(make_model())
    model.embed.requires_grad_(False)
    before = model.embed.weight.clone()
    run_schedule(model, [finetune()], job_in(tmp_path))
    assert model.embed.weight.equal(before)


def test_the_three_phases_follow_each_other(tmp_path):
    model, ended, measured = make_model(), [], []
    job = job_in(
        tmp_path,
        measure=lambda m: measured.append({a.state for a in sites(m).values()}),
        on_phase_end=lambda m, config, seconds: ended.append(config.phase),
        evaluate=lambda m: {"accuracy": 0.5},
    )
    run_schedule(model, [distill(), gate(), finetune()], job)
    assert ended == ["distill", "gate", "finetune"]
    assert measured == [{"learners"}]  # finetune lets the gates go, whatever budgets they had
    lines = metrics(tmp_path)
    steps = [line for line in lines if "eval" not in line]
    assert [(s["phase"], s["step"]) for s in steps] == [(p, i + 1) for p in ended for i in range(6)]
    assert [(e["phase"], e["step"]) for e in lines if "eval" in e] == [("finetune", s) for s in (2, 4, 6)]
    common = {"phase", "step", "epoch", "loss", "lr", "grad_norm"}
    assert all(common <= set(step) for step in steps)
    last = steps[-1]
    assert last["budget_asked"] == 0.6
    assert 0 < last["budget_reached"] <= 1
    assert last["loss"] == pytest.approx(
        last["task"] + 0.1 * last["budget"] + 0.05 * last["entropy"] + 0.05 * last["diversity"], rel=1e-5
    )
    assert last["budget"] == pytest.approx(abs(last["budget_reached"] - 0.6), abs=1e-6)


def test_a_long_phase_says_how_far_it_has_come(tmp_path, monkeypatch):
    ticks = itertools.count(0, 40)
    monkeypatch.setattr(progress, "monotonic", lambda: float(next(ticks)))
    said: list[str] = []
    run_schedule(make_model(), [distill()], job_in(tmp_path, say=said.append))
    told = r"distill: step \d of 6, loss \S+, \S+ examples/s, \d+% of the time waiting for data, \d+ \w+ left"
    assert len(said) == 6 and all(re.fullmatch(told, line) for line in said)


@pytest.mark.parametrize(
    ("changes", "times"), [({}, 1), ({"budget_range": (0.3, 0.9)}, 2), ({"update": "learners"}, 2)]
)
def test_gates_are_measured_where_the_next_phase_or_the_user_asks_them_for_budgets(changes, times, tmp_path):
    model, measured = make_model(), []

    def measure(m):
        measured.append(m)
        measure_budgets(m, [(examples(8)["x"], None)])

    schedule = [distill(steps=2), gate(steps=2), finetune(steps=2, **changes)]
    run_schedule(model, schedule, job_in(tmp_path, measure=measure))
    assert measured == [model] * times
    measured.clear()
    run_schedule(make_model(), schedule, job_in(tmp_path, measure=measure), until="gate")
    assert len(measured) == 1


def test_until_names_the_last_phase(tmp_path):
    model = make_model()
    run_schedule(model, [distill(), gate(), finetune()], job_in(tmp_path), until="gate")
    assert {line["phase"] for line in metrics(tmp_path)} == {"distill", "gate"}
    run_schedule(model, [distill(), gate(), finetune()], job_in(tmp_path), resume=True)
    assert [line["phase"] for line in metrics(tmp_path)] == ["distill"] * 6 + ["gate"] * 6 + ["finetune"] * 6
    with pytest.raises(UsageError, match="did you mean 'finetune'"):
        run_schedule(model, [finetune()], job_in(tmp_path), until="fintune")


def test_phases_that_need_learners_refuse_sites_without(tmp_path):
    for config in (gate(), finetune()):
        with pytest.raises(SitesNotFitted, match="distill"):
            run_schedule(make_model(), [config], job_in(tmp_path))


def test_a_phase_this_version_lacks_is_refused(tmp_path):
    with pytest.raises(UsageError, match="calibrate"):
        run_schedule(make_model(), [CalibratePhase(phase="calibrate")], job_in(tmp_path))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precision_trains_too(precision, tmp_path):
    model = make_model()
    schedule = [distill(steps=20), gate(steps=20), finetune(steps=20)]
    run_schedule(model, schedule, job_in(tmp_path, precision=precision))
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in model.parameters())
    for phase in ("distill", "gate", "finetune"):
        found = [line["loss"] for line in metrics(tmp_path) if line["phase"] == phase]
        assert sum(found[-4:]) < sum(found[:4])


def test_the_learning_rate_follows_half_a_cosine():
    config = distill(steps=4, lr=1.0, lr_min=0.0)
    rates = [learning_rate(config, 1.0, step, 4) for step in range(4)]
    assert rates == pytest.approx([1.0, 0.8535534, 0.5, 0.1464466])
    assert learning_rate(distill(schedule="constant"), 0.3, 3, 4) == 0.3


def test_gates_may_learn_faster_than_the_rest(tmp_path):
    def steps(**changes) -> tuple[float, float]:
        model = fitted(make_model())
        before = parts_of(model)
        run_schedule(model, [finetune(steps=1, lr=1e-3, **changes)], job_in(tmp_path))
        after = parts_of(model)
        # the first step of Adam moves every weight by the learning rate
        return tuple(max(float((after[part][n] - v).abs().max()) for n, v in before[part].items()) for part in PARTS)

    assert steps() == pytest.approx((1e-3, 1e-3), rel=0.01)
    assert steps(gate_lr=0.02) == pytest.approx((0.02, 1e-3), rel=0.01)


def test_epochs_are_counted_in_optimizer_steps(tmp_path):
    run_schedule(make_model(), [distill(steps=None, epochs=2, batch=16, accumulate=2)], job_in(tmp_path))
    # 48 examples, 16 per step
    assert [line["epoch"] for line in metrics(tmp_path)] == [0, 0, 0, 1, 1, 1]


def test_the_gradient_norm_is_limited(tmp_path):
    free, limited = make_model(), make_model()
    run_schedule(free, [distill(steps=1, clip_norm=None)], job_in(tmp_path / "a"))
    run_schedule(limited, [distill(steps=1, clip_norm=1e-9)], job_in(tmp_path / "b"))
    assert metrics(tmp_path / "a")[0]["grad_norm"] == metrics(tmp_path / "b")[0]["grad_norm"] > 1
    # gradients far below Adam's epsilon move nothing much
    start, a, b = (sites(m)["blocks.0.mlp"].learners.w_out for m in (make_model(), free, limited))
    assert (a - start).abs().max() > 50 * (b - start).abs().max() > 0


def test_the_task_alone_reaches_every_gate():
    model = fitted(make_model())
    config = finetune(budget=0.0, entropy=0.0, diversity=0.0)
    phase = make_phase(model, config, job_in(None), open_machine())
    _, grads = run_once(phase, examples(8))
    for acm in sites(model).values():
        assert grads[id(acm.gate.outer.weight)].abs().sum() > 0


def test_a_users_own_loop_needs_three_lines():
    model, batch = fitted(make_model()), examples(16)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    relax(model, temperature=0.8)
    model.train()
    found = []
    for _ in range(40):
        loss = F.cross_entropy(model(batch["x"]), batch["label"])
        aux = losses(model, budget=0.3)
        loss = loss + aux["budget"] + 0.05 * aux["entropy"] + 0.05 * aux["diversity"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append((loss.item(), aux["budget"].item()))
    assert sum(f[0] for f in found[-5:]) < 0.8 * sum(f[0] for f in found[:5])
    assert sum(f[1] for f in found[-5:]) < sum(f[1] for f in found[:5])
    model.eval()
    with batch_context(model, mask=batch["mask"]):
        assert model(batch["x"]).equal(model(batch["x"]))


def test_forwards_whose_losses_nobody_takes_are_warned_about(monkeypatch):
    monkeypatch.setattr("acm_compiler.acm.context._MANY", 3)
    model = fitted(make_model())
    relax(model.train(), 0.8)
    batch = examples(2)
    for _ in range(2):
        model(batch["x"])
    with pytest.warns(UserWarning, match="no acm.losses"):
        model(batch["x"])


def test_a_site_loss_that_is_not_finite_stops_the_run_before_any_damage(tmp_path):
    model = make_model()
    acm = sites(model)["blocks.1.mlp"]
    with torch.no_grad():
        acm.learners.w_in[0, 0, 0] = torch.nan
    start_projections(model)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with pytest.raises(TrainingFailed, match=r"distill, step 1: the loss of site blocks\.1\.mlp") as caught:
        run_schedule(model, [distill()], job_in(tmp_path))
    assert "lower lr" in str(caught.value)
    assert all(torch.equal(p.nan_to_num(), before[n].nan_to_num()) for n, p in model.named_parameters())
    assert metrics(tmp_path) == []


def test_a_task_loss_that_is_not_finite_is_named(tmp_path):
    class Odd(Task):
        def loss(self, output, batch):
            return super().loss(output, batch) / 0.0

    with pytest.raises(TrainingFailed, match="finetune, step 1: the task loss is not finite"):
        run_schedule(fitted(make_model()), [finetune()], job_in(tmp_path, task=Odd()))


def test_a_gradient_that_is_not_finite_is_named_by_its_parameter(tmp_path):
    class Steep(Task):
        def loss(self, output, batch):
            # finite, with an infinite slope
            return super().loss(output, batch) + (output * 0).abs().sqrt().sum()

    with pytest.raises(TrainingFailed, match="the gradient is not finite; first seen at"):
        run_schedule(fitted(make_model()), [finetune()], job_in(tmp_path, task=Steep()))


def test_collapsed_gates_are_reported_with_a_remedy(tmp_path, caplog):
    model = fitted(make_model())
    for acm in sites(model).values():
        with torch.no_grad():
            acm.gate.outer.weight.zero_()
            acm.gate.outer.bias.copy_(torch.arange(acm.count - acm.k_min + 1) * 50.0)
    with caplog.at_level(logging.WARNING):
        run_schedule(model, [finetune(steps=2, lr=1e-6, lr_min=0.0)], job_in(tmp_path))
    assert "4 of 4 gates run the same k for every token" in caplog.text
    assert "blocks.0.proj (k = 4)" in caplog.text
    assert "raise entropy" in caplog.text
    assert "the gates spend 1.000 of the learner MACs in training, asked for 0.600" in caplog.text
    assert "raise the weight `budget`" in caplog.text


def test_a_budget_that_was_met_is_no_warning(tmp_path, caplog):
    model = fitted(make_model())
    with caplog.at_level(logging.WARNING):
        run_schedule(model, [finetune(steps=2, lr=1e-6, lr_min=0.0)], job_in(tmp_path))
        reached = sum(line["budget_reached"] for line in metrics(tmp_path)) / 2
        caplog.clear()
        run_schedule(model, [finetune(steps=2, lr=1e-6, lr_min=0.0)], job_in(tmp_path, budget=reached))
    assert caplog.text == ""


def test_finetune_can_draw_a_budget_for_every_step():
    model, batch = fitted(make_model()), examples(8)
    config = finetune(budget_range=(0.5, 0.9))
    job = job_in(Path("unused"))
    with pytest.raises(NoBudgetTable), make_phase(model, config, job, open_machine()).opened():
        pass
    measure_budgets(model, [(batch["x"], None)])
    phase = make_phase(model, config, job, open_machine())
    budgets, knobs, losses_of = [], set(), []
    for seed in range(5):
        torch.manual_seed(seed)
        figures, _ = run_once(phase, batch)
        budgets.append(phase.step.budget)
        knobs |= {next(iter(sites(model).values())).knob_value}
        losses_of.append((figures.terms["budget"], figures.reached))
        assert figures.asked == phase.step.budget
    assert all(0.5 <= budget <= 0.9 for budget in budgets) and len(set(budgets)) == len(knobs) == 5
    for budget, (loss, reached) in zip(budgets, losses_of, strict=True):
        assert loss == pytest.approx(abs(reached - budget), abs=1e-5)


def far_from(teacher, model) -> float:
    """KL of the model's answers at its budget from the teacher's, on what was not trained on."""
    x = torch.randn(64, 5, 6, generator=torch.Generator().manual_seed(99))
    with torch.no_grad():
        found, wanted = model.eval()(x).log_softmax(1), teacher.eval()(x).log_softmax(1)
    return float(F.kl_div(found, wanted, log_target=True, reduction="batchmean"))


@pytest.mark.parametrize("budget_range", [None, (0.4, 0.8)])
def test_learners_alone_come_nearer_to_the_original_s_answers(budget_range, tmp_path):
    model, teacher = fitted(make_model()), make_teacher()
    measure_budgets(model, [(examples(8)["x"], None)])
    set_budget(model, 0.6)
    before, far = parts_of(model), far_from(teacher, model)
    config = finetune(update="learners", objective="distillation", steps=40, budget_range=budget_range)
    run_schedule(model, [config], job_in(tmp_path, teacher=teacher))
    lines = metrics(tmp_path)
    assert changed(before, model) == {"learners"}
    assert {"loss", "task"} <= set(lines[0]) and not {"budget", "entropy", "diversity"} & set(lines[0])
    assert all(0 < line["budget_reached"] <= 1 for line in lines if "eval" not in line)
    set_budget(model, 0.6)
    assert far_from(teacher, model) < 0.8 * far
    assert not any(p.requires_grad for p in teacher.parameters()) and all(p.grad is None for p in teacher.parameters())


def test_the_whole_network_may_learn_the_original_s_answers(tmp_path):
    model, teacher = fitted(make_model()), make_teacher()
    job = job_in(tmp_path, teacher=teacher)
    run_schedule(model, [finetune(objective="distillation", steps=40, entropy=0.0, diversity=0.0)], job)
    lines = [line["task"] for line in metrics(tmp_path)]
    assert sum(lines[-5:]) < 0.7 * sum(lines[:5])


def test_labels_have_no_part_in_distillation(tmp_path):
    class Unlabelled(Task):
        def loss(self, output, batch):
            raise AssertionError

    config = finetune(objective="distillation")
    run_schedule(fitted(make_model()), [config], job_in(tmp_path, task=Unlabelled(), teacher=make_teacher()))
    with pytest.raises(UsageError, match="needs that model"):
        run_schedule(fitted(make_model()), [config], job_in(tmp_path / "again"))


def test_a_task_that_judges_by_the_original_s_answers_trains_too(tmp_path):
    class Vectors(Task):
        answers_logits = False

        def remember(self, output, batch):
            return {**batch, "teacher": output}

        def loss(self, output, batch):
            return (output - batch["teacher"]).square().mean()

    for objective in ("task", "distillation"):
        job = job_in(tmp_path / objective, task=Vectors(), teacher=make_teacher())
        run_schedule(fitted(make_model()), [finetune(objective=objective, steps=40, entropy=0.0)], job)
        lines = [line["task"] for line in metrics(tmp_path / objective)]
        assert sum(lines[-5:]) < 0.7 * sum(lines[:5]), objective


def test_distilling_under_measured_gates_measures_them_again(tmp_path):
    model, measured = fitted(make_model()), []
    job = job_in(tmp_path, measure=measured.append)
    run_schedule(model, [distill(steps=2)], job)
    assert not measured
    measure_budgets(model, [(examples(8)["x"], None)])
    run_schedule(model, [distill(steps=2)], job)
    assert measured == [model]
