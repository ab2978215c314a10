"""torchao and bitsandbytes on converted models: right around the ACMs, torchao on learners, refused in gates and saves.

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


def on_learners(model, config):
    """Quantise the learners with torchao, by the names of their weights."""
    quantization = pytest.importorskip("torchao.quantization")
    chosen = getattr(quantization, config)(set_inductor_config=False)
    names = {r"re:.*\.learners\.w_(in|up|out|top)": chosen}
    quantization.quantize_(model, quantization.FqnToConfig(names), filter_fn=None)
    return model


LEARNERS = {"torchao int8": ("Int8WeightOnlyConfig", 0.01), "torchao fp8": ("Float8WeightOnlyConfig", 0.05)}


@pytest.fixture(params=LEARNERS)
def quantised(request, model):
    """A copy of the model whose learners torchao has quantised, and the largest difference of an output."""
    config, most = LEARNERS[request.param]
    return on_learners(copy.deepcopy(model), config), most


def test_learners_are_torchaos_and_every_budget_runs_the_floats_that_they_stand_for(quantised, model):
    (changed, most), x = quantised, example()
    floats = copy.deepcopy(changed)
    for acm_site in acm.sites(floats).values():
        for name, weight in list(acm_site.learners.named_parameters()):
            acm_site.learners.register_parameter(name, nn.Parameter(weight.dequantize() if "w_" in name else weight))
    compiled = torch.compile(changed, backend="acm")
    for budget in (0.5, 0.75, 1.0):
        for one in (changed, floats, model):
            acm.set_budget(one, budget)
        with torch.no_grad():
            torch.testing.assert_close(changed(x), floats(x))
            torch.testing.assert_close(compiled(x), floats(x))
            assert 0 < (changed(x) - model(x)).abs().max() < most


def test_the_first_learners_are_views_of_torchaos_weights(quantised):
    (site,) = acm.sites(quantised[0]).values()
    for weight, axis in ((site.learners.w_in, 0), (site.learners.w_out, 1)):
        first = weight[:2] if axis == 0 else weight[:, :2]
        assert type(first) is type(weight) and first.qdata.data_ptr() == weight.qdata.data_ptr()
        assert torch.equal(first.dequantize(), weight.dequantize()[:2] if axis == 0 else weight.dequantize()[:, :2])


@pytest.mark.parametrize("format", ["pt2", pytest.param("aoti", marks=pytest.mark.slow)])
def test_programs_hold_torchaos_weights(quantised, tmp_path, format):
    changed, _ = quantised
    acm.export(changed, tmp_path / "out", example(), format=format)  # which compares its answers at five budgets
    if format == "pt2":
        held = torch.export.load(tmp_path / "out" / "program.pt2").state_dict.values()
        assert sum(type(tensor).__module__.startswith("torchao") for tensor in held) == 2


def test_a_state_dict_goes_into_a_model_that_is_quantised_alike(quantised, model, tmp_path):
    changed, x = quantised[0], example()
    torch.save(changed.state_dict(), tmp_path / "state.pt")
    fresh = copy.deepcopy(model)
    for parameter in fresh.parameters():
        parameter.data.zero_()
    fresh.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True), assign=True)
    for one in (changed, fresh):
        acm.set_budget(one, 0.5)
    assert torch.equal(fresh(x), changed(x))
    with pytest.raises(StorageError, match="another library has quantised this weight"):
        acm.save(changed, tmp_path / "saved")


def test_adapters_are_refused_on_torchaos_learners(quantised):
    peft = pytest.importorskip("peft")
    pytest.importorskip("acm_compiler.hf")
    config = peft.LoraConfig(target_modules=list(acm.sites(quantised[0])), r=2)
    with pytest.raises(UsageError, match="quantised learners take no adapters"):
        peft.get_peft_model(quantised[0], config)
