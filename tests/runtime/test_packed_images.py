"""Batches of several images, of any sizes, whose patches are packed into one axis."""

import copy

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import acm_compiler as acm
from acm_compiler.calibration.examples import Options
from acm_compiler.calibration.observe import observe
from acm_compiler.calibration.records import SiteRecord
from acm_compiler.errors import LayoutUnknown
from acm_compiler.passes.rewrite.conversion import rewritten
from acm_compiler.passes.rewrite.dense_region import read_dense
from acm_compiler.site import Layout
from tests.helpers.pictured import Pictured, one_by_one, pictured_batch

EXAMPLES = [[4], [9, 4], [6]]
EVERY = [*(f"{part}.{name}" for part in ("see", "read") for name in "qkvo"), "tower", "text"]


@pytest.fixture(scope="module")
def original():
    torch.manual_seed(1)
    return Pictured().eval()


@pytest.fixture(scope="module")
def calibrated(original):
    model = acm.rewrite(original, acm.plan(original, pictured_batch([[4]]), learners=2))
    acm.calibrate(model, [pictured_batch(EXAMPLES, seed=seed) for seed in range(8)], tokens=200)
    return model


@pytest.mark.parametrize("examples", [[[4]], [[4], [4], [4]], EXAMPLES])
def test_patches_are_packed_and_texts_are_told_apart_whatever_the_plan_was_made_for(original, examples):
    plan = acm.plan(original, pictured_batch(examples))
    layouts = {site.name: site.layout for site in plan.sites}
    packed = Layout(batch_axis=0, folds=0)
    assert layouts == {name: packed if name.startswith(("see", "tower")) else Layout() for name in EVERY}
    assert acm.Plan.from_json(plan.to_json()) == plan


def test_no_example_depends_on_the_others_and_records_add_up_to_those_of_each_alone(original, calibrated):
    batch = pictured_batch(EXAMPLES, seed=50)
    for budget in (0.5, 0.75, 1.0):
        acm.set_budget(calibrated, budget)
        with torch.no_grad(), acm.record(calibrated) as usage:
            together = calibrated(**batch)["logits"]
        assert usage.macs.shape == usage.shares.shape == (3,) and usage.k["tower"].shape == (1, 23)
        macs = []
        for row, one in enumerate(one_by_one(batch, EXAMPLES)):
            with torch.no_grad(), acm.record(calibrated) as alone:
                logits = calibrated(**one)["logits"]
            torch.testing.assert_close(logits[0], together[row, : logits.shape[1]])
            macs.append(torch.stack([alone.macs, alone.dense_macs, alone.kept_macs, *alone.learner_macs]).sum(1))
        found = torch.stack([usage.macs, usage.dense_macs, usage.kept_macs, *usage.learner_macs]).sum(1)
        torch.testing.assert_close(found, sum(macs), rtol=1e-12, atol=0)
    flops = 0
    for one in one_by_one(batch, EXAMPLES):
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            original(**one)
        flops += counter.get_total_flops()
    assert float(usage.dense_macs.sum()) == pytest.approx(flops / 2, rel=1e-12)


def test_statistics_of_a_batch_are_those_of_its_examples_one_after_the_other(calibrated):
    batch = pictured_batch(EXAMPLES, seed=51)
    model = copy.deepcopy(calibrated)
    found = rewritten(model)
    dense, seen = read_dense(found), []
    for data in ([batch], one_by_one(batch, EXAMPLES)):
        records = {site.name: SiteRecord(site, dense[site.name], sample=99, seed=3) for site in found.plan.sites}
        totals = observe(found, [(inputs, None) for inputs in data], records, Options())
        assert totals.examples == 3
        seen.append(records)
    for name, record in seen[0].items():
        other, places = seen[1][name], (record.site.d_out, torch.device("cpu"))
        assert record.tokens == other.tokens == (23 if name.startswith(("see", "tower")) else 33)
        torch.testing.assert_close(record.moments.mean, other.moments.mean)
        torch.testing.assert_close(record.moments.covariance, other.moments.covariance, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(record.metric.value(*places), other.metric.value(*places), rtol=1e-5, atol=1e-6)
    tower = found.plan.site("tower")
    records = {"tower": SiteRecord(tower, dense["tower"], sample=99, seed=3)}
    assert observe(found, [(batch, None)], records, Options()).examples == 3, "the tower alone tells of one"


def test_budgets_and_masks_by_example_are_refused_where_patches_are_packed(calibrated):
    batch = pictured_batch(EXAMPLES)
    budgets, mask = {"budgets": [0.5, 0.75, 1.0]}, {"mask": batch["attention_mask"]}
    for said, words in ((budgets, "packed into one axis"), (mask, "patches of images")):
        with acm.batch(calibrated, **said), pytest.raises(LayoutUnknown, match=words) as caught:
            calibrated(**batch)
        assert caught.value.where == "see.q" and caught.value.fix


def test_gates_are_trained_on_packed_patches_too(calibrated):
    model = copy.deepcopy(calibrated)
    acm.relax(model.train(), temperature=1.0)
    model(**pictured_batch(EXAMPLES))
    taken = acm.losses(model, 0.5)
    assert all(value.isfinite() and value.requires_grad for value in taken.values())


def test_saved_and_loaded_they_are_still_packed(original, calibrated, tmp_path):
    acm.save(calibrated, tmp_path / "saved")
    loaded, batch = acm.load(tmp_path / "saved", base_model=original), pictured_batch(EXAMPLES)
    with torch.no_grad(), acm.record(loaded) as usage:
        torch.testing.assert_close(loaded(**batch)["logits"], calibrated(**batch)["logits"])
    assert usage.macs.shape == (3,)


class Shared(Pictured):
    """Images of one size, as a batch of their own."""

    def forward(self, input_ids, attention_mask, patches):
        images = self.tower(self.patch(patches))
        x = self.embed(input_ids).masked_scatter((input_ids == 1)[..., None], images)
        return {"logits": self.head(x + self.text(x))}


def test_images_that_are_a_batch_of_their_own_are_packed_where_the_example_inputs_have_more_of_them():
    torch.manual_seed(2)
    batch, original = pictured_batch([[4], [4, 4], [4]]), Shared().eval()
    inputs = {**batch, "patches": batch["patches"].unflatten(0, (-1, 4))}
    del inputs["sizes"]
    model = acm.rewrite(original, acm.plan(original, inputs, learners=2))
    acm.calibrate(model, [inputs] * 6, tokens=100)
    with torch.no_grad(), acm.record(model) as usage:
        model(**inputs)
    assert usage.k["tower"].shape == (1, 16) and usage.k["text"].shape[0] == 3
    # 16 patches and 26 real words, at each the two layers of an MLP
    assert usage.learner_macs[1].sum() == (16 + 26) * 2 * 8 * 16 and usage.dense_macs.shape == (3,)
