"""Which tokens are padding, as a call says it: by name, by place, in torch's way."""

import pytest
import torch
from torch import nn

import acm_compiler as acm
import acm_compiler.measure as measure
from acm_compiler.calibration import Options, calibrate_on, recalibrate
from acm_compiler.calibration.examples import masked
from acm_compiler.conversion import conversion
from acm_compiler.inputs import by_name
from tests.calibration_tiny import make_tiny, texts

QUICK = Options(tokens=200, gate_steps=2, sample=1000)
DATA = texts(12, batch=8)
PLACED = [(b["x"], b["attention_mask"]) for b in DATA]


@pytest.fixture(autouse=True)
def coarse(monkeypatch):
    """Tables of few rows: every row costs many forwards."""
    monkeypatch.setattr(measure, "GRID", (0.4, 0.7))


class Takes(nn.Module):
    def forward(self, x, mask=None, *more, scale=1.0, **others): ...


class Anything(nn.Module):
    def forward(self, *args, **kwargs): ...


def test_arguments_get_the_names_of_the_forward():
    x, mask = object(), object()
    assert by_name(Takes(), (x, mask), {"scale": 2, "other": 3}) == ((), {"x": x, "mask": mask, "scale": 2, "other": 3})
    assert by_name(Takes(), (x, mask, 1, 2), {}) == ((1, 2), {"x": x, "mask": mask})
    assert by_name(Anything(), (x, mask), {"a": 1}) == ((x, mask), {"a": 1})
    for wrong in ((), {"x": x}), ((x,), {"x": x}):
        assert by_name(Takes(), *wrong) == wrong
    assert by_name(nn.Linear(2, 2), (x, mask), {}) == ((x, mask), {})


def same(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_a_mask_given_by_its_place_calibrates_as_one_given_by_its_name():
    named, placed = make_tiny(), make_tiny()
    calibrate_on(named, masked(DATA), options=QUICK)
    calibrate_on(placed, masked(PLACED), options=QUICK)
    same(named.state_dict(), placed.state_dict())
    assert conversion(named).table == conversion(placed).table
    assert recalibrate(named, DATA, tokens=100).points == recalibrate(placed, PLACED, tokens=100).points


def test_a_mask_given_by_its_place_counts_in_a_record():
    model, (inputs,) = make_tiny(), texts(1)
    model.eval()
    with torch.no_grad(), acm.record(model) as named:
        model(**inputs)
    with torch.no_grad(), acm.record(model) as placed:
        model(inputs["x"], inputs["attention_mask"])
    assert placed.masked and (named.k["blocks.0.mlp"] == -1).any()
    same(named.k, placed.k)
    assert torch.equal(named.macs, placed.macs) and torch.equal(named.dense_macs, placed.dense_macs)
