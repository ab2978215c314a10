"""Tensors in files, and weights in host memory, computed with elsewhere: meta stands for that, a GPU, or the CPU."""

import re
import sys

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from acm_compiler.passes.rewrite import offload
from acm_compiler.passes.rewrite.offload import (
    device_of,
    hosted,
    kept,
    let_go,
    offloading,
    streamed_to,
    working_device,
)
from acm_compiler.passes.rewrite.offload import streaming as streamed

META, CPU = torch.device("meta"), torch.device("cpu")


@pytest.fixture(autouse=True)
def every_tensor(monkeypatch):
    """Stream tensors of all sizes."""
    monkeypatch.setattr(offload, "_SMALL", 1)


@pytest.fixture
def on_meta(monkeypatch):
    """Compute on a device without values, which says where each result is."""
    monkeypatch.setattr(offload, "working_device", lambda model: META)


def resident_kb(tensor) -> int:
    """Memory of this process that the mapping of a tensor takes."""
    with open("/proc/self/smaps") as maps:
        for line in maps:
            if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                here = int(found[1], 16) <= tensor.data_ptr() < int(found[2], 16)
            elif here and line.startswith("Rss:"):
                return int(line.split()[1])
    raise AssertionError("no such mapping")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere the system decides")
def test_a_tensor_in_a_file_takes_memory_only_where_it_is_used(tmp_path):
    with offloading(tmp_path):
        tensor = kept(torch.arange(2**18))
        assert resident_kb(tensor) == 0
        tensor[:8] += 1
        assert tensor.sum() == 2**17 * (2**18 - 1) + 8 and resident_kb(tensor) == 2048
        let_go([tensor, torch.zeros(4)])
        assert resident_kb(tensor) == 0
        assert torch.equal(tensor[:9], torch.tensor([1, 2, 3, 4, 5, 6, 7, 8, 8]))


def test_operators_run_on_the_working_device_and_leave_weights_where_they_are(on_meta):
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 6), nn.LayerNorm(6))
    before = [parameter.clone() for parameter in model.parameters()]
    with streamed(model):
        ids = torch.tensor([[1, 2, 3]])
        assert model(ids).device == META  # ids come along
        assert model[1].weight.device == CPU and device_of(model[1].weight) == META
        assert (model[1].weight.double() @ torch.ones(4).double()).device == META
        assert (model[1].weight[:, 1:].T + 1).device == META
        assert torch.cat([model[1].weight, model[1].weight]).device == META
        assert (ids + 1).device == CPU  # nothing of it is streamed
    assert all(map(torch.equal, model.parameters(), before))
    assert not any(map(streamed_to, model.parameters()))


def test_what_is_written_to_in_host_memory_is_computed_there(on_meta):
    with streamed(nn.Linear(2, 2)):
        total = kept(torch.zeros(3, 2))
        assert device_of(total) == META
        total += torch.ones(3, 2)
        total[torch.tensor([0])] = torch.full((1, 2), 5.0)
    assert total.tolist() == [[5, 5], [1, 1], [1, 1]]


def test_a_backward_pass_keeps_no_copy_of_a_weight(monkeypatch):
    model = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 3)).requires_grad_(False)
    x = torch.randn(4, 5, requires_grad=True)
    wanted = torch.autograd.grad(model(x).square().sum(), x)[0]
    saved, copies = [], []
    copy = offload.onto
    monkeypatch.setattr(offload, "onto", lambda *args: copies.append(args) or copy(*args))
    with streamed(model), saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        y = model(x).square().sum()
        forward = len(copies)
        found = torch.autograd.grad(y, x)[0]
    assert torch.equal(found, wanted) and len(copies) > forward
    assert {model[0].weight.data_ptr(), model[1].weight.data_ptr()} <= set(saved)


def test_tied_and_new_tensors_come_home(on_meta):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    with streamed(model):
        model.append(nn.Linear(4, 2))
        kept(model)
        assert streamed_to(model[2].weight) == META
    assert model[0].weight is model[1].weight
    assert all(parameter.device == CPU and streamed_to(parameter) is None for parameter in model.parameters())


def test_small_tensors_lie_whole_on_the_working_device(monkeypatch):
    monkeypatch.setattr(offload, "_SMALL", 64)
    assert hosted(torch.zeros(15), META).device == META
    assert hosted(torch.zeros(16), META).device == CPU


def test_models_are_computed_where_most_of_them_is():
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    assert working_device(nn.Linear(2, 2)) == (accelerator or CPU)
    assert working_device(nn.Linear(2, 2, device="meta")) == META
