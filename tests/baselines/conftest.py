"""The model and data that tests of trained methods share."""

import pytest


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    """A small vision transformer on random images, which a training of a few steps sees."""
    pytest.importorskip("torchvision")
    # not before a test asks: pytest reads this file wherever tests are collected, a bare machine's too
    import torch

    import acm_compiler as acm
    from acm_compiler.baselines.method import Subject
    from acm_compiler.data.loading import BatchStream
    from acm_compiler.recipe.schema import RunConfig
    from acm_compiler.tasks.classify import Classify
    from acm_compiler.training.phase import Job
    from tests.helpers.small_vit import Images, small_vit

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
        held_out=lambda: BatchStream(dataset=Images(), batch=64).epoch(),
        steps=20,
        job=job,
    )
