"""Distillation and gate training site by site: the losses, their gradients, and what is alive meanwhile."""

import functools
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import default_collate

from acm_compiler import plan, rewrite, tasks
from acm_compiler.acm.reference import all_outputs, prefix_output
from acm_compiler.data import BatchStream
from acm_compiler.passes.rewrite.conversion import BudgetPoint, BudgetTable, conversion, sites
from acm_compiler.recipe.phases import LabelRule
from acm_compiler.training.machine import open_machine
from acm_compiler.training.schedule import run_schedule
from acm_compiler.training.site_phases import Distill, GateLabels
from acm_compiler.training.tapped import TappedPhase, prefix_errors
from tests.helpers.build import acm_for, planned_site
from tests.helpers.models import hf_wav2vec2
from tests.helpers.training_runs import distill, examples, finetune, fitted, gate, job_in, run_once
from tests.helpers.training_tiny import Task, make_model


def tapped(model, objective):
    return TappedPhase(model, objective, Task(), open_machine(), batch=4)


def dense_pass(model, batch):
    """Inputs and outputs of every site in the unmodified network: (x, o) per call."""
    seen = {name: [] for name in sites(model)}
    for acm in sites(model).values():
        acm.tap = lambda acm, x, o: seen[acm.name].append((x.flatten(0, -2), o.flatten(0, -2)))
    with torch.no_grad():
        model(batch["x"])
    for acm in sites(model).values():
        acm.tap = None
    return seen


def test_the_distill_loss_is_the_mean_over_tokens_and_k_of_the_squared_error():
    model, batch = make_model(), examples(4)
    seen = dense_pass(model, batch)
    figures, grads = run_once(tapped(model, Distill()), batch)
    expected = []
    for name, acm in sites(model).items():
        ((x, o),) = seen[name]
        ks = range(acm.k_min, acm.count + 1)
        errors = [(prefix_output(x, acm.learners.weights(), k) - o).square().sum(-1).mean() for k in ks]
        loss = torch.stack(errors).mean()
        expected.append(loss.item())
        for parameter, grad in zip(
            acm.learners.parameters(), torch.autograd.grad(loss, list(acm.learners.parameters())), strict=True
        ):
            torch.testing.assert_close(grads[id(parameter)], grad, rtol=1e-4, atol=1e-6)
    assert figures.terms["loss"] == pytest.approx(sum(expected) / len(expected), rel=1e-5)


def test_a_shared_site_learns_from_the_tokens_of_all_its_calls():
    model, batch = make_model(depth=1, calls=3), examples(4)
    seen = dense_pass(model, batch)
    _, grads = run_once(tapped(model, Distill()), batch)
    for name, acm in sites(model).items():
        assert len(seen[name]) == 3
        x, o = (torch.cat(part) for part in zip(*seen[name], strict=True))
        loss = (all_outputs(x, acm.learners.weights(), acm.k_min) - o).square().sum(-1).mean()
        (grad,) = torch.autograd.grad(loss, acm.learners.w_out)
        torch.testing.assert_close(grads[id(acm.learners.w_out)], grad, rtol=1e-4, atol=1e-6)


def test_padding_has_no_part_in_the_site_losses():
    model, batch = make_model(), examples(4, padded=True)
    real = batch["mask"].flatten()
    assert 0 < real.sum() < real.numel()
    seen = dense_pass(model, batch)
    _, grads = run_once(tapped(model, Distill()), batch)
    for name, acm in sites(model).items():
        x, o = (part[real] for part in seen[name][0])
        loss = (all_outputs(x, acm.learners.weights(), acm.k_min) - o).square().sum(-1).mean()
        (grad,) = torch.autograd.grad(loss, acm.learners.w_out)
        torch.testing.assert_close(grads[id(acm.learners.w_out)], grad, rtol=1e-4, atol=1e-6)


class _Clips(torch.utils.data.Dataset):
    """Noise of two lengths, of class 0 or 1, with a mask of its samples."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        real = torch.arange(400) < (400, 250)[index % 2]
        audio = torch.randn(400, generator=torch.Generator().manual_seed(index)) * real
        return {"input_values": audio, "attention_mask": real.long(), "label": torch.tensor(index % 2)}


class _Hearing(Task):
    """Classifies clips by the mean of a CTC model's logits; inputs and mask are those of any task."""

    inputs, mask = tasks.Task.inputs, tasks.Task.mask

    def answer(self, output, mask=None):
        return output.logits[..., :2].mean(1)

    def loss(self, output, batch):
        return F.cross_entropy(self.answer(output), batch["label"])


def test_masks_of_audio_count_the_frames_that_the_model_makes_of_it(tmp_path):
    dense = hf_wav2vec2()[0].eval()
    dense.config.feat_extract_norm = "layer"  # models that are given a mask
    batch = default_collate([_Clips()[index] for index in range(4)])
    given = {name: value for name, value in batch.items() if name != "label"}
    model = rewrite(dense, plan(dense, given, sites="mlp", learners=2))
    frames = dense._get_feat_extract_output_lengths(batch["attention_mask"].sum(1)).sum()
    phase = TappedPhase(model, Distill(), _Hearing(), open_machine(), batch=4)
    with phase.opened():
        phase.run(batch, backward=lambda loss: loss.backward(), last=True)
        assert {int(sums[1]) for sums in phase.sums.values()} == {int(frames)}
    data = functools.partial(BatchStream, dataset=_Clips(), shuffle=True, drop_last=True)
    short = {"steps": 2, "batch": 4}
    job = job_in(tmp_path, task=_Hearing(), data=data)
    run_schedule(model, [distill(**short), gate(**short), finetune(**short)], job)
    assert conversion(model).padding is None


def test_accumulated_batches_are_one_larger_batch(tmp_path):
    found = []
    for name, changes in {"whole": {"batch": 8}, "parts": {"batch": 8, "accumulate": 2}}.items():
        model = make_model()
        run_schedule(model, [distill(steps=3, **changes)], job_in(tmp_path / name))
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    # one step moves a parameter by about the learning rate, 1e-2
    assert (found[0] - found[1]).abs().max() < 1e-5


@pytest.mark.parametrize("form", ["mlp", "gated", "linear", "per_k", "top", "linear_top"])
def test_detached_prefixes_have_the_same_values_and_train_their_last_learner(form):
    changes = {
        "gated": {"kind": "gated_mlp"},
        "linear": {"kind": "linear", "dense_width": None, "last": None, "learner_act": "identity"},
        "per_k": {"second_layer": "per_k"},
        "top": {"second_layer": "shared_top"},
    }.get(form, {})
    if form == "linear_top":
        changes = {"kind": "linear", "dense_width": None, "last": None, "learner_act": "identity", "lossless": True}
    acm = acm_for(planned_site(**changes), dtype=torch.float64)
    weights = acm.learners.weights()
    x, o = torch.randn(2, 7, 8, dtype=torch.float64)
    expected = torch.stack([prefix_output(x, weights, k) - o for k in range(5)])
    torch.testing.assert_close(torch.stack(list(prefix_errors(x, o, weights, 0))), expected)
    found = torch.stack(list(prefix_errors(x, o, weights, 0, last_only=True)))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.stack(list(prefix_errors(x, o, weights, 2))), expected[2:])
    (grad,) = torch.autograd.grad(found[3].square().sum(), weights.w_in, retain_graph=True)
    assert [bool(row.abs().sum() > 0) for row in grad] == [False, False, True, False]
    (whole,) = torch.autograd.grad(expected[3].square().sum(), weights.w_in)
    torch.testing.assert_close(grad[2], whole[2])
    (bias,) = torch.autograd.grad(found[0].sum(), weights.b_out)
    assert bias.abs().sum(1).tolist() == [7.0 * 8, 0, 0, 0, 0]


def test_after_distillation_the_learners_answer(tmp_path):
    model = make_model()
    run_schedule(model, [distill()], job_in(tmp_path))
    assert {acm.state for acm in sites(model).values()} == {"learners"}
    # nobody chose a k yet: all learners run
    assert all(int(a.k_lo) == int(a.k_hi) == a.count for a in sites(model).values())


def peak_saved(depth):
    """The most tensors that autograd kept at one time in one batch of distillation."""
    alive, peak = [0], [0]

    class Kept:
        def __init__(self, tensor):
            self.tensor = tensor
            alive[0] += 1
            peak[0] = max(peak[0], alive[0])

        def __del__(self):
            alive[0] -= 1

    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
        run_once(tapped(make_model(depth=depth), Distill()), examples(4))
    assert alive[0] == 0
    return peak[0]


def test_one_site_keeps_its_graph_at_a_time_whatever_the_depth():
    assert peak_saved(6) == peak_saved(1) > 0


def test_no_site_keeps_what_it_saw(monkeypatch):
    seen = []

    def loss(self, acm, x_TD, o_TO, *, real_T):
        alive = [x for x in seen if x() is not None]
        # the outputs of the dense regions die with their taps; nothing but the trunk's own locals is left
        assert len(alive) <= 1
        seen.append(weakref.ref(o_TO))
        return original(self, acm, x_TD, o_TO, real_T=real_T)

    original = Distill.loss
    monkeypatch.setattr(Distill, "loss", loss)
    run_once(tapped(make_model(depth=3), Distill()), examples(4))
    assert len(seen) == 6
    assert not [x for x in seen if x() is not None]


def labelled(model, **changes):
    facts = {"labels": LabelRule(tau=1.2), "temperature": 0.8, "plan": conversion(model).plan}
    return GateLabels(**facts | changes)


def test_the_gate_loss_is_the_cross_entropy_of_noisy_choices_with_the_labels():
    model, batch = fitted(make_model(depth=1)), examples(4)
    seen = dense_pass(model, batch)
    torch.manual_seed(7)
    figures, grads = run_once(tapped(model, labelled(model)), batch)
    torch.manual_seed(7)
    expected = []
    for name, acm in sites(model).items():
        ((x, o),) = seen[name]
        noise = -torch.empty(x.shape[0], acm.count - acm.k_min + 1).exponential_().log()
        errors = (all_outputs(x, acm.learners.weights(), acm.k_min) - o).norm(dim=-1)
        ratio = errors[:-1] / errors[1:]
        label = [next((i for i, r in enumerate(row) if r < 1.2), len(row)) for row in ratio.T.tolist()]
        loss = F.cross_entropy((acm.gate(x) + noise) / 0.8, torch.tensor(label))
        expected.append(loss.item())
        (grad,) = torch.autograd.grad(loss, acm.gate.outer.weight)
        torch.testing.assert_close(grads[id(acm.gate.outer.weight)], grad, rtol=1e-4, atol=1e-6)
    assert figures.terms["loss"] == pytest.approx(sum(expected) / 2, rel=1e-5)


def test_the_share_shown_in_the_gate_phase_is_that_of_its_choices():
    model = fitted(make_model())
    objective = labelled(model)
    plan = conversion(model).plan
    choices = {site.name: [0.0] * site.columns for site in plan.sites}
    for site in plan.sites:
        choices[site.name][2 - site.k_min] = 10.0  # everyone runs two of four
    sums = {name: [10.0, 5.0, *counts] for name, counts in choices.items()}
    figures = objective.figures(sums, dict.fromkeys(choices, 1.0))
    assert figures.reached == pytest.approx(0.5)
    assert figures.terms["agreement"] == 0.5


def test_trained_gates_decide_and_an_older_budget_table_is_void(tmp_path):
    model = fitted(make_model())
    owner = conversion(model)
    owner.table = BudgetTable(rule="logits", points=(BudgetPoint(share=0.5, knob=1.0, k_lo=0),), examples=1)
    owner.budget = 0.5
    run_schedule(model, [gate()], job_in(tmp_path))
    assert owner.table is None and owner.budget is None
    assert all((int(a.k_lo), int(a.k_hi), a.knob_value) == (a.k_min, a.count, 0.0) for a in sites(model).values())


def test_gates_of_another_rule_become_logits(tmp_path):
    model = fitted(make_model())
    for acm in sites(model).values():
        acm.gate.rule = "damage"
    run_schedule(model, [gate()], job_in(tmp_path))
    assert {acm.gate.rule for acm in sites(model).values()} == {"logits"}
