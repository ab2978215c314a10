"""torchao and bitsandbytes on converted models: right around the ACMs, and refused inside and in saves.

torch.ao's own, which is always there, is in test_intact.
"""

import copy
import warnings

import pytest
import torch
from torch import nn

import acm_compiler as acm
from acm_compiler.errors import StorageError, UsageError
from tests.helpers.models import Attention, Mlp, Residual, Stack, example


@pytest.fixture(scope="module")
def model():
    """A converted model whose attention stays dense, at a budget."""
    torch.manual_seed(0)
    original, batches = Stack(Residual(Attention()), Residual(Mlp())).eval(), [example() for _ in range(8)]
    model = acm.rewrite(original, acm.plan(original, batches[0], sites="mlp"))
    acm.calibrate(model, batches, tokens=100, budgets=[0.5])
    acm.set_budget(model, 0.5)
    return model


def torchao(model, config, kept):
    """Quantise with torchao all linears that are not among `kept`."""
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(
        model,
        getattr(quantization, config)(set_inductor_config=False),
        filter_fn=lambda module, name: isinstance(module, nn.Linear) and module not in kept,
    )
    return model


def bitsandbytes(model, bits, kept):
    """Put bitsandbytes' layers where linears are that are not among `kept`."""
    bnb = pytest.importorskip("bitsandbytes")
    places = [
        (module, name, child)
        for module in model.modules()
        for name, child in module.named_children()
        if type(child) is nn.Linear and child not in kept
    ]
    for module, name, child in places:
        shape, weight = (child.in_features, child.out_features), child.weight.detach().clone()
        if bits == "8":
            layer = bnb.nn.Linear8bitLt(*shape, has_fp16_weights=False)
            layer.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
        else:
            layer = bnb.nn.Linear4bit(*shape, quant_type="nf4")
            layer.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4")
        layer.bias = child.bias
        setattr(module, name, layer)
    return model.to("cpu")


# name: (tool, its option, largest difference of an output)
TOOLS = {
    "torchao int8": (torchao, "Int8WeightOnlyConfig", 0.01),
    "torchao fp8": (torchao, "Float8WeightOnlyConfig", 0.1),
    "bitsandbytes int8": (bitsandbytes, "8", 0.01),
    "bitsandbytes nf4": (bitsandbytes, "4", 0.2),
}


@pytest.fixture(autouse=True)
def quiet():
    """Warnings of these libraries, of what they deprecate or cannot load, are not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("tool", TOOLS)
def test_a_whole_model_is_refused_with_what_to_do(tool, model):
    change, option, _ = TOOLS[tool]
    changed = change(copy.deepcopy(model), option, kept=())
    with pytest.raises(
        UsageError, match=r"quantised or adapted this ACM.*\n.*acm.quantize\(model\) makes learners int8"
    ):
        changed(example())


@pytest.mark.parametrize("tool", TOOLS)
def test_the_layers_around_acms_are_quantised_and_not_saved(tool, model, tmp_path):
    change, option, most = TOOLS[tool]
    changed, x = copy.deepcopy(model), example()
    changed = change(changed, option, kept={part for site in acm.sites(changed).values() for part in site.modules()})
    for budget in (0.5, 1.0):
        acm.set_budget(changed, budget)
        acm.set_budget(model, budget)
        with torch.no_grad():
            difference = (changed(x) - model(x)).abs().max()
        assert 0 < difference < most
    with pytest.raises(StorageError, match=r"another library has quantised this weight.*\n.*acm.quantize"):
        acm.save(changed, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
