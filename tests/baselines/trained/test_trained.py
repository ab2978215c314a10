"""Methods that are trained: what they learn, what they cost, and how their training goes on."""

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from acm_compiler.baselines.choose_methods import METHODS
from acm_compiler.baselines.measure import measure
from acm_compiler.baselines.trained import early_exit, experts, halted_tokens, train
from acm_compiler.baselines.trained.thin import ThinSites
from acm_compiler.progress import Progress
from tests.helpers.small_vit import small_vit
from tests.helpers.training_tiny import Tiny


def copies(module: nn.Module):
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def test_a_thinner_model_costs_its_budget_and_all_that_runs_learns(subject):
    before, models = copies(subject.dense), []
    for budget in (0.4, 0.75):
        models.append(ThinSites(subject))
        models[-1].convert((budget,), print)
        start = copies(models[-1].host)
        models[-1].learn(f"thin at {budget}", lr=1e-3, say=print)
        batch = next(iter(subject.held_out()))
        share = models[-1].run(batch, budget).macs_B / subject.plan.model.dense_macs
        assert share.tolist() == pytest.approx([budget] * 64, abs=0.03)
        after = copies(models[-1].host)
        still = {name for name in start if torch.equal(start[name], after[name])}
        assert all(".gate." in name or ".learners." in name or name == "heads.head.bias" for name in still), still
        assert any(".dense.weights" in name for name in start.keys() - still)
    assert all(torch.equal(before[name], value) for name, value in copies(subject.dense).items())


def test_training_brings_a_thinner_model_nearer_to_the_dense_one(subject):
    method, (batch, *_) = ThinSites(subject), subject.fit()
    method.convert((0.4,), print)
    wanted = subject.dense(batch["image"])

    def error():
        method.run(batch, 0.4)
        with torch.no_grad():
            return (method.host(batch["image"]) - wanted).norm().item()

    start = error()
    method.learn("nearer", lr=1e-3, say=print)
    assert error() < 0.9 * start


ADAPTIVE = ("moefication", "d2dmoe", "ztw", "avit")


@pytest.fixture(scope="module")
def fitted(subject):
    """Each adaptive method fitted to two budgets, with what its training had before and after."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "_ROUTER_STEPS", 100)
        for name in ADAPTIVE:
            seen = []

            def watched(name, model, *given, learn=train.train, seen=seen, **named):
                seen.append(copies(model))
                learn(name, model, *given, **named)
                seen.append(copies(model))

            for place in (train, early_exit, halted_tokens):
                patch.setattr(place, "train", watched)
            torch.manual_seed(0)
            low = METHODS[name].floor(subject.dense, subject.plan)
            budgets = (low + 0.25 * (1 - low), low + 0.6 * (1 - low))
            method = METHODS[name](subject)
            method.convert(budgets, print)
            found[name] = method, budgets, seen
            patch.undo()
            patch.setattr(experts, "_ROUTER_STEPS", 100)
    return found


@pytest.mark.parametrize("name", ADAPTIVE)
def test_macs_are_those_executed_and_rise_with_the_budget(subject, fitted, name):
    method, budgets, _ = fitted[name]
    ran = []
    for budget in budgets:
        for batch in subject.held_out():
            with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as flops:
                macs = method.run(batch, budget).macs_B
            assert float(macs.sum()) == flops.get_total_flops() / 2
        found = measure(method, (budget,), Progress(name, shown=False))
        ran.append(float(found.macs[budget].mean()) / subject.plan.model.dense_macs)
    assert ran[0] < ran[1]
    assert all(share == pytest.approx(budget, abs=0.06) for share, budget in zip(ran, budgets, strict=True))


@pytest.mark.parametrize(
    ("name", "still"),
    [
        ("moefication", (".gate.", ".learners.", ".choices")),
        ("d2dmoe", (".gate.", ".learners.", ".choices")),
        ("ztw", ("log_weights.0",)),
        ("avit", ("prior_L",)),
    ],
)
def test_gradients_reach_all_that_should_learn(fitted, name, still):
    before, after = fitted[name][2][:2]
    same = {key for key in before if torch.equal(before[key], after[key])}
    assert not [key for key in same if not any(part in key for part in still)]
    if name == "avit":
        assert before["offset_L"][:-1].ne(after["offset_L"][:-1]).all()


def test_the_dense_model_is_as_it_was(subject, fitted):
    assert fitted
    for found, wanted in zip(subject.dense.parameters(), small_vit().parameters(), strict=True):
        assert torch.equal(found, wanted)


def test_images_leave_where_an_exit_is_sure_enough(subject, fitted):
    method, budgets, _ = fitted["ztw"]
    (batch, *_), threshold = subject.fit(), method.thresholds[budgets[0]]
    with torch.no_grad():
        after = method._after(batch)
        logits = method._logits(after, method.steps.answer(after[-1]))
        exits = [method.exits.together(place, logits[: place + 1]) for place in range(3)]
    given = []
    method.score, score = lambda output, batch: given.append(output) or score(output, batch), method.score
    macs = method.run(batch, budgets[0]).macs_B
    del method.score
    costs, left = method._exits(batch)[1], set()
    assert costs[:, -1].tolist() == [subject.plan.model.dense_macs] * len(macs)
    for image in range(len(macs)):
        sure = [bool(part[image].softmax(-1).max() >= threshold) for part in exits[:-1]] + [True]
        assert macs[image] == costs[image, sure.index(True)]
        torch.testing.assert_close(given[0][image], exits[sure.index(True)][image])
        left.add(sure.index(True))
    assert len(left) > 1


def test_halted_tokens_are_left_out_as_the_mask_of_training_says(subject, fitted):
    method, budgets, _ = fitted["avit"]
    model, (batch, *_) = method.models[budgets[0]], subject.fit()
    with torch.no_grad():
        masked = model(batch["image"])[0]
    logits, macs = model.execute(batch["image"])
    torch.testing.assert_close(logits, masked)
    torch.testing.assert_close(macs, model.costs_B.double())
    assert len(macs.unique()) > 1


@pytest.mark.parametrize("name", ["moefication", "d2dmoe"])
def test_a_token_runs_the_experts_that_its_router_names(fitted, name):
    method, budgets, _ = fitted[name]
    region = next(iter(method.regions.values()))
    region.share = method.share_of(budgets[0], method.subject.plan)
    x = region.seen[0][:40]
    scores, limit = region.router(x), region.limits[region.share]
    if name == "moefication":
        runs = torch.stack([torch.isin(torch.arange(16), row.topk(int(limit)).indices) for row in scores])
    else:
        runs = scores.abs() >= limit * scores.abs().amax(1, keepdim=True)
        assert len(runs.sum(1).unique()) > 1
    keep = torch.zeros(40, 64)
    for expert, rows in enumerate(region.members):
        keep[:, rows] = runs[:, expert, None].float()
    wanted = (region._hidden(x) * keep) @ region.last_OF.T + region.bias_O
    torch.testing.assert_close(region(x), wanted)
    assert sorted(torch.cat(region.members).tolist()) == list(range(64))


def test_a_router_of_d2dmoe_tells_the_norms_of_its_experts(fitted):
    region = next(iter(fitted["d2dmoe"][0].regions.values()))
    x = region.seen[0]
    norms = torch.stack([region._worth(x, rows) for rows in region.members], dim=1)
    told = region.router(x).abs()
    assert torch.corrcoef(torch.stack([norms.flatten(), told.flatten()]))[0, 1] > 0.7


def test_sparsity_is_what_d2dmoe_learns_beside_the_outputs(subject, fitted):
    region = next(iter(fitted["d2dmoe"][0].regions.values()))
    hidden = torch.zeros(4, 64)
    hidden[:, 3] = 2.0
    region._hidden, router, region.router = lambda x: hidden, region.router, None
    region.compute(torch.zeros(4, 16))
    assert region.hoyer == pytest.approx(1 / 64)
    hidden[:] = 2.0
    region.compute(torch.zeros(4, 16))
    assert region.hoyer == pytest.approx(1.0)
    region.router = router
    del region._hidden


@pytest.mark.parametrize(("name", "reason"), [("ztw", "this is a Tiny"), ("avit", "this is a Tiny")])
def test_models_that_are_no_vision_transformers_are_refused(subject, name, reason):
    assert reason in METHODS[name].refuses(Tiny(), subject.plan)
    assert METHODS[name].refuses(subject.dense, subject.plan) is None
