"""The page about quantised models: its code runs, on a small decoder."""

import copy
import re
import warnings

import pytest
import torch
import torch._inductor.config
from torch import nn

import acm_compiler as acm
from tests.helpers import ROOT
from tests.helpers.decoders import drawn, llama

PAGE = (ROOT / "docs/quantise.md").read_text()
WHOLE, REST, TORCHAO, AROUND = re.findall(r"```py\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def names():
    """Names that the page's code calls: a decoder, its batches, the plan of its MLPs, the calibrated model."""
    original, batches = llama(), [{"input_ids": drawn(4, length)} for length in (18, 20, 22)]
    plan = acm.plan(original, batches[0], sites="mlp")
    model = acm.rewrite(original, plan)
    acm.calibrate(model, batches, tokens=200)
    return {"acm": acm, "nn": nn, "original": original, "batches": batches, "plan": plan, "model": model}


def ran(code, names):
    """The model after a block of the page, and what the float model gives beside it."""
    names = names | {"model": copy.deepcopy(names["model"])}
    floats = names["model"](**names["batches"][0]).logits
    exec(code, names)
    return names["model"], floats, names["model"](**names["batches"][0]).logits


@torch.no_grad()
def test_a_model_is_quantised_measured_and_saved(names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, floats, found = ran(WHOLE, names)
    loaded = acm.load("out/", base_model=names["original"])
    assert torch.equal(loaded(**names["batches"][0]).logits, found)
    assert 0 < (found - floats).abs().max() < 0.1 * floats.abs().max()


@torch.no_grad()
@pytest.mark.parametrize("line", REST.splitlines(), ids=range(len(REST.splitlines())))
def test_the_rest_is_quantised_in_each_way(line, names):
    model, floats, found = ran(line, names)
    kept = {name for name, module in model.named_modules() if isinstance(module, nn.Linear) and ".gate" not in name}
    attention = {name for name in kept if "self_attn" in name}
    assert bool(attention) == ("exclude" in line) and ("lm_head" in kept) == ("include" not in line)
    assert 0 < (found - floats).abs().max() < 0.1 * floats.abs().max()


@torch.no_grad()
@pytest.mark.parametrize("code", [TORCHAO, TORCHAO + AROUND], ids=["learners", "learners and the rest"])
def test_torchao_takes_learners_and_the_linears_around_them(code, names):
    settings = torch._inductor.config
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what torchao deprecates itself, and torch among its settings
        pytest.importorskip("torchao.quantization")
        with settings.patch(settings.get_config_copy()):  # which torchao changes
            model, floats, found = ran(code, names)
    changed = {name for name, weight in model.named_parameters() if type(weight).__module__.startswith("torchao")}
    assert any(".learners." in name for name in changed) and not any(".gate" in name for name in changed)
    assert any("self_attn" in name for name in changed) == (code != TORCHAO)
    assert 0 < (found - floats).abs().max() < 0.1 * floats.abs().max()
