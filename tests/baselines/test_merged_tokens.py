"""ToMe: what merges, what it costs, and which models it refuses."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import acm_compiler as acm
from acm_compiler.baselines.merged_tokens import MergingTransformer, ToMe, merge
from acm_compiler.baselines.method import Subject
from acm_compiler.shipped import DIGITS_VIT
from acm_compiler.tasks.classify import Classify
from tests.helpers.training_tiny import Tiny

BUDGETS = (0.5, 0.6, 0.75, 0.9)


@pytest.fixture(scope="module")
def subject():
    vit = DIGITS_VIT.trained()
    batch = {"image": torch.rand(4, 3, 36, 36), "label": torch.tensor([0, 1, 2, 3])}
    plan = acm.plan(vit, batch["image"][:1])
    return Subject(dense=vit, plan=plan, task=Classify(), fit=lambda: [batch], held_out=lambda: [batch])


def test_the_nearest_pairs_become_means_weighted_by_size():
    x = torch.arange(12.0).view(1, 6, 2)
    size = torch.tensor([[1.0, 1.0, 3.0, 1.0, 1.0, 1.0]])
    keys = torch.tensor([[[1.0, 0], [1, 0], [0, 1], [0.1, 1], [-1, 0.4], [0, -1]]])
    merged, sizes = merge(x, size, keys, 1)
    # token 2, of three patches, is nearest to token 3; the class token 0 stays, though it is token 1's very copy
    assert sizes.tolist() == [[1, 1, 1, 4, 1]]
    assert torch.equal(merged[0, 3], (3 * x[0, 2] + x[0, 3]) / 4)
    assert torch.equal(merged[0, [0, 1, 2, 4]], x[0, [0, 4, 1, 5]])
    torch.testing.assert_close((merged * sizes[..., None]).sum(1), (x * size[..., None]).sum(1))


def test_without_merging_it_is_the_model(subject):
    (batch,) = subject.held_out()
    torch.testing.assert_close(MergingTransformer(subject.dense)(batch["image"]), subject.dense(batch["image"]))


def test_macs_are_those_executed_and_stay_below_the_budget(subject):
    method, (batch,) = ToMe(subject), subject.held_out()
    method.convert(BUDGETS, print)
    ran = []
    for budget in BUDGETS:
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as flops:
            macs = method.run(batch, budget).macs_B
        assert macs.tolist() == [flops.get_total_flops() / 8] * 4
        ran.append(float(macs[0]) / subject.plan.model.dense_macs)
    assert ran == sorted(ran)
    assert all(budget - 0.03 < share <= budget for budget, share in zip(BUDGETS, ran, strict=True))


def test_its_floor_is_what_merging_half_of_the_tokens_costs(subject):
    method, (batch,) = ToMe(subject), subject.held_out()
    low = ToMe.floor(subject.dense, subject.plan)
    method.convert((0.01, low), print)
    least = float(method.run(batch, 0.01).macs_B[0]) / subject.plan.model.dense_macs
    assert low == pytest.approx(least, abs=0.03)


def test_other_models_are_refused(subject):
    assert "and this is a Tiny" in ToMe.refuses(Tiny(), subject.plan)
    assert ToMe.refuses(subject.dense, subject.plan) is None
