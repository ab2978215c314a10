"""Checkpoints of a fixed k: ordinary ones, which load where this package is not there."""

import json
import subprocess
import sys

import pytest
import torch

import acm_compiler as acm
from acm_compiler.errors import UsageError
from tests.helpers.rewrite_cases import ALL, PUBLISHED, answer, assert_close, give_budgets, rewritten

LOAD = """
import sys
sys.modules["acm_compiler"] = None  # importing it raises
import torch, transformers
model = getattr(transformers, sys.argv[1]).from_pretrained("out")
with torch.no_grad():
    torch.save(model.eval()(torch.load("x.pt")).logits, "y.pt")
"""


def learned(case, **options):
    """A converted model all of whose output biases are something."""
    _, x, model = rewritten(PUBLISHED[case], sites="mlp", **options)
    give_budgets(model)
    with torch.no_grad():
        for module in acm.sites(model).values():
            module.learners.b_out.add_(0.1 * torch.randn_like(module.learners.b_out))
    return model, x


@torch.no_grad()
@pytest.mark.parametrize(("case", "k"), [("hf_llama", 1), ("hf_gpt2", 3)])
def test_it_loads_without_this_package_and_gives_the_live_models_outputs(case, k, tmp_path):
    model, x = learned(case)
    acm.export(model, tmp_path / "out", x, format="checkpoint", fixed_k=k)
    torch.save(x, tmp_path / "x.pt")
    command = [sys.executable, "-c", LOAD, type(model).__name__]
    done = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    acm.set_k(model, k)
    assert_close(torch.load(tmp_path / "y.pt"), answer(model, x))
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["architectures"] == [type(model).__name__] and "acm" not in json.dumps(config).lower()
    facts = json.loads((tmp_path / "out/export.json").read_text())
    assert set(facts["k"].values()) == {k} and facts["relative_error"] < 1e-4


@pytest.mark.parametrize("case", ["hf_llama", "hf_gpt2", "hf_vit", "hf_bert"])
def test_every_k_of_other_classes(case, tmp_path):
    model, x = learned(case)
    for k in (1, 2, 3, 4):  # the export compares what it wrote with the live model
        acm.export(model, tmp_path / "out", x, format="checkpoint", fixed_k=k)
        assert json.loads((tmp_path / "out/export.json").read_text())["relative_error"] < 1e-5


def refused(model, path, x, match, **options):
    with pytest.raises(UsageError, match=match) as caught:
        acm.export(model, path, x, **options)
    assert caught.value.exit_code == 2 and not path.exists()


def test_what_a_class_cannot_say_is_refused(tmp_path):
    model, x = learned("hf_llama")
    out = tmp_path / "out"
    for k in (None, 0, 5, True):
        refused(model, out, x, "this export needs one k", format="checkpoint", fixed_k=k)
    refused(model, out, x, "a fixed k is for the formats onnx and checkpoint", fixed_k=2)
    _, y, plain = rewritten(ALL["swiglu"], sites="mlp")
    refused(plain, out, y, "no class to write a checkpoint of", format="checkpoint", fixed_k=2)
    _, x, unfitted = rewritten(PUBLISHED["hf_llama"])
    refused(unfitted, out, x, "no learners have been fitted", format="checkpoint", fixed_k=4)
    mixed, x = learned("hf_llama")
    next(iter(acm.sites(mixed).values())).k_min = 2
    refused(mixed, out, x, "how thin its layers are", format="checkpoint", fixed_k=1)
