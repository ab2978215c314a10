"""Learners split over processes: outputs and gradients at every k are those of one process."""

import copy

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import acm_compiler as acm
from acm_compiler.errors import SitesNotFitted, UsageError
from tests.helpers.build import planned_site, sliced_site, stack_of
from tests.helpers.launch import launch
from tests.helpers.models import Mlp, Residual, Stack, example
from tests.helpers.split_ranks import FORMS, model_of, split, tokens

SPLIT = "tests.helpers.split_ranks"
QUICK = ("gated", "mlp_top", "linear_top")


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return launch(SPLIT, tmp_path_factory.mktemp("two"), *QUICK)


def check(ranks, *, form=None):
    """Compare every tensor of a split model in every process with that of the whole model."""
    names = [name for name in ranks[0] if name.startswith(f"whole/{form}/" if form else "whole/")]
    assert names
    for name in names:
        expected = ranks[0][name]
        exact = expected.dtype == torch.float64
        # the sum of parts is rounded once more than the sum in one process
        near = {"rtol": 1e-9, "atol": 1e-9} if exact else {"rtol": 2e-2, "atol": 5e-2}
        for rank in ranks:
            torch.testing.assert_close(rank[name.replace("whole", "split", 1)], expected, equal_nan=True, **near)


@pytest.mark.parametrize("form", QUICK)
def test_two_processes_equal_one_at_every_k(form, two):
    check(two, form=form)
    gradients = [name for name in two[0] if name.startswith(f"whole/{form}/relaxed/") and "gate" in name]
    assert any(two[0][name].abs().max() > 0 for name in gradients)


def test_half_precision_and_tokens_that_are_no_numbers(two):
    for name in ("bf16", "autocast", "nan"):
        expected = two[0][f"whole/{name}"]
        for rank in two:
            torch.testing.assert_close(rank[f"split/{name}"], expected, rtol=2e-2, atol=5e-2, equal_nan=True)
    assert two[0]["split/nan"].isnan().any() and not two[0]["split/nan"].isnan().all()


def test_a_split_model_is_saved_by_all_and_loaded_whole_or_split(two):
    for rank in two:
        assert rank["loaded/y"].equal(rank["calibrated/y"])
        torch.testing.assert_close(rank["parts/y"], rank["calibrated/y"])
        assert rank["again/y"].equal(rank["parts/y"])


@pytest.mark.slow
def test_four_processes_equal_one_and_shard_what_is_split(tmp_path):
    ranks = launch(SPLIT, tmp_path, *FORMS, processes=4)
    check(ranks)
    names = [name.removeprefix("both/") for name in ranks[0] if name.startswith("both/")]
    assert any("learners" in name for name in names)
    for rank in ranks:
        for name in names:
            torch.testing.assert_close(rank[f"both/{name}"], rank[f"both_whole/{name}"], rtol=1e-9, atol=1e-9)


@pytest.fixture
def mesh(tmp_path):
    """A mesh of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_parameters_are_cut_along_the_hidden_width(mesh):
    model = split(model_of("gated"), mesh)
    learners = model.acms[0].learners
    cut = {name: p.placements for name, p in learners.named_parameters() if name != "b_out"}
    assert cut == {
        "w_in": (Shard(1),), "b_in": (Shard(1),), "w_up": (Shard(1),), "b_up": (Shard(1),), "w_out": (Shard(2),)
    }  # fmt: skip
    assert type(learners.b_out) is nn.Parameter
    assert "acms.0" in str(acm.status(model))


def test_a_split_model_is_copied_and_trained(mesh):
    one = model_of("mlp")
    model = copy.deepcopy(split(copy.deepcopy(one), mesh))
    for found in (one, model):
        acm.relax(found.train(), 0.8)
        optimizer = torch.optim.AdamW(found.parameters(), lr=1e-2, foreach=False)
        torch.manual_seed(0)
        for _ in range(3):
            optimizer.zero_grad()
            (found(tokens()).square().mean() + acm.losses(found, 0.5)["budget"]).backward()
            optimizer.step()
        acm.relax(found.eval(), None)
    torch.testing.assert_close(model(tokens()), one(tokens()))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: stack_of(sliced_site("acms.0")), r"they are slices.*\n.*form: svd"),
        (lambda: acm.quantize(model_of("mlp", torch.float32)), "they are quantised"),
    ],
    ids=["slices", "int8"],
)
def test_what_cannot_be_split_is_refused_with_what_to_do(make, message, mesh):
    with pytest.raises(UsageError, match=message):
        split(make(), mesh)


def test_a_second_split_is_refused(mesh):
    model = split(model_of("mlp"), mesh)
    with pytest.raises(UsageError, match="split already"):
        split(model, mesh)


def test_too_few_neurons_are_refused(mesh, monkeypatch):
    model = stack_of(planned_site("acms.0", width=6))
    monkeypatch.setattr(type(mesh), "size", lambda self: 4)  # two each would leave the last process none
    with pytest.raises(UsageError, match=r"of 6 hidden neurons 4 processes cannot have some each"):
        split(model, mesh)


def test_learners_that_were_never_fitted_are_refused(mesh):
    original = Stack(Residual(Mlp())).eval()
    model = acm.rewrite(original, acm.plan(original, example(), sites=[{"match": "mlp"}]))
    for site in acm.sites(model).values():
        site.state = "dense"
    with pytest.raises(SitesNotFitted, match=r"SplitLearners needs learners.*\n.*calibrate"):
        split(model, mesh)


def test_other_modules_and_other_styles_are_refused(mesh):
    model = model_of("mlp")
    with pytest.raises(UsageError, match=r"SplitLearners is for ACMs.*found Gate"):
        parallelize_module(model, mesh, {"acms.0.gate": acm.SplitLearners()})
    parallelize_module(model, mesh, {"acms.0.gate.inner": ColwiseParallel()})
    with pytest.raises(UsageError, match=r"each process holds a part.*\n.*SplitLearners"):
        model(tokens())


@pytest.mark.parametrize("call", [acm.quantize, acm.revert], ids=["quantize", "revert"])
def test_what_needs_whole_learners_is_refused(call, mesh):
    model = split(model_of("mlp", torch.float32), mesh)
    with pytest.raises(UsageError, match="needs whole parameters"):
        call(model)
