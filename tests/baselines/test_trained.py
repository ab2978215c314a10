"""Methods that are trained: what they learn, what they cost, and how their training goes on."""

import pytest
import torch
from torch import nn

import acm_compiler as acm
from acm_compiler.baselines.method import Subject
from acm_compiler.baselines.trained.thin import ThinSites
from acm_compiler.data.loading import BatchStream
from acm_compiler.recipe.schema import RunConfig
from acm_compiler.tasks.classify import Classify
from acm_compiler.training.job import Job


class Images(torch.utils.data.Dataset):
    """Random images with labels, 9 patches each, of which some are bright."""

    def __len__(self):
        return 128

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        bright = 1 + 2 * torch.rand(3, 3, generator=generator).repeat_interleave(4, 0).repeat_interleave(4, 1)
        return {"image": bright * torch.randn(3, 12, 12, generator=generator), "label": torch.tensor(index % 5)}


def small_vit():
    """A vision transformer of three layers of width 16 with a head that tells images apart."""
    from torchvision.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    vit = VisionTransformer(
        image_size=12, patch_size=4, num_layers=3, num_heads=2, hidden_dim=16, mlp_dim=64, num_classes=5
    )
    nn.init.normal_(vit.heads.head.weight, std=0.5)
    return vit.eval()


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    """A small vision transformer on random images, which a training of a few steps sees."""
    pytest.importorskip("torchvision")
    vit, folder, task = small_vit(), tmp_path_factory.mktemp("trained"), Classify()

    def job(name):
        def data(**sizes):
            return BatchStream(dataset=Images(), shuffle=True, drop_last=True, **sizes)

        return Job(task=task, data=data, run=RunConfig(seed=1), directory=folder / name, budget=0.5, teacher=vit)

    return Subject(
        dense=vit,
        plan=acm.plan(vit, torch.zeros(1, 3, 12, 12), learners=2),
        task=task,
        fit=lambda: BatchStream(dataset=Images(), batch=64).epoch(),
        held_out=lambda: BatchStream(dataset=Images(), batch=8).epoch(),
        steps=20,
        job=job,
    )


def copies(module: nn.Module):
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def test_a_thinner_model_costs_its_budget_and_all_that_runs_learns(subject):
    before, models = copies(subject.dense), []
    for budget in (0.4, 0.75):
        models.append(ThinSites(subject))
        models[-1].convert((budget,), print)
        start = copies(models[-1].host)
        models[-1].learn("thin", lr=1e-3, say=print)
        batch = next(iter(subject.held_out()))
        share = models[-1].run(batch, budget).macs_B / subject.plan.model.dense_macs
        assert share.tolist() == pytest.approx([budget] * 8, abs=0.03)
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
    method.learn("thin", lr=1e-3, say=print)
    assert error() < 0.9 * start
