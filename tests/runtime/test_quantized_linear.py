"""Int8 linears outside of ACMs: one by one against exact integers, and as the rest of a quantised model."""

import copy
import ctypes
import json

import pytest
import torch
from torch import nn

import acm_compiler as acm
from acm_compiler.acm import ops
from acm_compiler.acm.quantized import integers
from acm_compiler.codegen.cpu import build
from acm_compiler.errors import SelectionError, UsageError
from acm_compiler.runtime.quantized_linear import QuantizedLinear, one_learner_of
from tests.helpers.rewrite_cases import ALL, answer, rewritten
from tests.helpers.tour_model import TOKENS, WIDTH, Classifier


@pytest.fixture(params=["tiles", "vectors", "reference"])
def products(request, monkeypatch):
    """Each way to multiply bytes that this processor has."""
    ops.load_kernels("cpu")
    library = ctypes.CDLL(str(build.library_file()))
    library.acm_want_tiles.restype = ctypes.c_bool
    if not library.acm_want_tiles(request.param == "tiles") and request.param == "tiles":
        pytest.skip("the processor has no tiles for bytes")
    if request.param == "reference":
        monkeypatch.setattr(ops, "LEARNERS", ops.REFERENCE)
    yield
    library.acm_want_tiles(True)


def exact(linear: QuantizedLinear, x: torch.Tensor) -> torch.Tensor:
    """The output by whole numbers in float64, from the equations of docs/semantics.md."""
    x = x.float()
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    scale = (high - low) / 255
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    zero = (-low * inverse).round()
    q = ((x * inverse).round() + zero).clamp(0, 255)
    sums = (q - zero).double() @ linear.values.double().T
    return sums * scale.double() * linear.scales.double() + linear.biases[1].double()


def drawn(d_in: int, d_out: int, bias: bool = True) -> QuantizedLinear:
    torch.manual_seed(d_in)
    dense = nn.Linear(d_in, d_out, bias=bias)
    return QuantizedLinear(integers.quantized(one_learner_of(dense)), name="layer")


@torch.no_grad()
@pytest.mark.parametrize("sizes", [(1, 1), (7, 3), (64, 64), (129, 65), (770, 200)], ids=str)
@pytest.mark.parametrize("tokens", [1, 5, 17, 70])
def test_it_equals_exact_integers(sizes, tokens, products):
    linear = drawn(*sizes, bias=tokens % 2 == 1)
    x = torch.randn(tokens, sizes[0])
    torch.testing.assert_close(linear(x).double(), exact(linear, x), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_shapes_types_and_rows_that_are_not_finite(products):
    linear = drawn(48, 20)
    x = torch.randn(3, 4, 48)
    y = linear(x)
    assert y.shape == (3, 4, 20) and torch.equal(linear(x[1, 2]), y[1, 2])
    assert torch.equal(linear(x.transpose(0, 1)).transpose(0, 1), y)
    assert linear(x[:0]).shape == (0, 4, 20) and linear(x[:, :0]).shape == (3, 0, 20)
    assert not linear(torch.zeros(1, 48)).sub(linear.bias).any()
    lost = x.clone()
    lost[1, 2, 7] = torch.nan
    z = linear(lost)
    assert z[1, 2].isnan().all() and torch.equal(z[0], y[0]) and torch.equal(z[1, 3], y[1, 3])
    half = copy.deepcopy(linear).bfloat16()
    assert half.scales.dtype == torch.float32 and half(x.bfloat16()).dtype == torch.bfloat16
    torch.testing.assert_close(half(x.bfloat16()).float(), y, rtol=0.02, atol=0.02)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x).dtype == torch.bfloat16


def test_gradients_reach_the_input_and_no_weight():
    linear = drawn(12, 5)
    x = torch.randn(4, 12, requires_grad=True)
    linear(x).sum().backward()
    torch.testing.assert_close(x.grad, linear.weight.sum(0).expand(4, -1))
    assert not list(linear.parameters())


def test_inputs_that_do_not_fit_are_refused():
    linear = drawn(12, 5)
    with pytest.raises(UsageError, match="12"):
        linear(torch.randn(4, 13))
    with pytest.raises(UsageError, match="float64"):
        linear(torch.randn(4, 12, dtype=torch.float64))


@pytest.fixture(scope="module")
def calibrated():
    """(model with ACMs in the place of its MLPs, batches)."""
    torch.manual_seed(0)
    batches = [torch.randn(8, TOKENS, WIDTH) for _ in range(6)]
    model = Classifier().eval()
    floats = acm.rewrite(model, acm.plan(model, batches[0], sites=("mlp",)))
    acm.calibrate(floats, batches, tokens=300, budgets=(0.5,))
    return floats, batches


@torch.no_grad()
def test_the_rest_of_a_model_is_counted_saved_loaded_and_explained(calibrated, tmp_path):
    floats, batches = calibrated
    x = batches[0]
    model = acm.quantize(copy.deepcopy(floats), rest=True)
    int8 = [name for name, module in model.named_modules() if isinstance(module, QuantizedLinear)]
    assert len(int8) == 8 and not any("head" in name for name in int8)  # q, k, v and out of two packed attentions
    assert "learners: int8, and 8 linears outside of ACMs" in str(acm.status(model))
    for k in (1, 4):
        for one in (floats, model):
            acm.set_k(one, k)
        assert 0 < (model(x) - floats(x)).norm() / floats(x).norm() < 0.03
    with acm.record(model) as usage, acm.record(floats) as before:
        model(x), floats(x)
    assert torch.equal(usage.macs, before.macs)
    acm.save(model, tmp_path / "out")
    loaded = acm.load(tmp_path / "out", base_model=Classifier().eval())
    assert torch.equal(loaded(x), model(x)) and acm.status(loaded).rest == 8
    assert json.loads((tmp_path / "out/model.json").read_text())["format"] == 3
    table = acm.explain(loaded, x)
    assert table.linears == 8 and "2 ACMs and 8 quantised linears in 1 graph" in str(table)
    assert {site.implementation for site in table.sites} == {"cpu"}
    assert table.as_json()["linears"] == 8


def test_patterns_choose_among_the_rest(calibrated):
    model = acm.quantize(copy.deepcopy(calibrated[0]), rest=True, include="head", exclude=("*.k_proj", "re:v_proj$"))
    names = {name for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    assert names == {f"blocks.{i}.attention.{part}" for i in (0, 1) for part in ("q_proj", "out_proj")} | {"head"}
    with pytest.raises(SelectionError, match="hed"):
        acm.quantize(copy.deepcopy(calibrated[0]), rest=True, include="hed")
    with pytest.raises(UsageError, match="rest=True"):
        acm.quantize(copy.deepcopy(calibrated[0]), exclude="head")


def test_linears_with_hooks_stay_floats(calibrated):
    model = copy.deepcopy(calibrated[0])
    model.blocks[0].attention.out_proj.register_forward_hook(lambda *_: None)
    acm.quantize(model, rest=True)
    assert isinstance(model.blocks[0].attention.out_proj, nn.Linear) and acm.status(model).rest == 7


@torch.no_grad()
@pytest.mark.parametrize("name", ["hf_gpt2", "hf_llama"])
def test_decoders_keep_their_output_heads(name, tmp_path):
    x, converted = rewritten(ALL[name], sites=("mlp",))[1:]
    before = answer(converted, x)
    acm.quantize(converted, rest=True)
    assert acm.status(converted).rest and not isinstance(converted.get_output_embeddings(), QuantizedLinear)
    after = answer(converted, x)
    assert 0 < (after - before).norm() / before.norm() < 0.05
    acm.save(converted, tmp_path / "out")
    assert torch.equal(answer(acm.load(tmp_path / "out"), x), after)
