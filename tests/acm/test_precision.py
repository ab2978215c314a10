"""Linear layers in bfloat16 while a model is read: close, faster where there are instructions for it, and no more."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from acm_compiler.acm import precision
from acm_compiler.acm.precision import FastLinears, exactly

AMX = bool(torch.cpu.get_capabilities().get("amx_bf16"))


@pytest.fixture(autouse=True)
def _everywhere(monkeypatch):
    monkeypatch.setattr(precision, "is_fast_in_bfloat16", lambda device: True)


def distance(found, expected):
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(256, 384), (2, 128, 384)])
def test_answers_and_gradients_are_those_of_rounded_operands(shape, bias):
    """Sizes at which torch 2.11 rounds, too: there it leaves small products exact."""
    torch.manual_seed(0)
    layer, x = nn.Linear(384, 512, bias=bias), torch.randn(shape, requires_grad=True)
    along = torch.randn(*shape[:-1], 512)
    with FastLinears():
        y = layer(x)
    (grad,) = torch.autograd.grad(y, x, along)
    exact = layer(x)
    (exact_grad,) = torch.autograd.grad(exact, x, along)
    assert y.dtype == torch.float32
    assert distance(y, exact) < 2**-7 and distance(grad, exact_grad) < 2**-7
    if AMX:  # oneDNN rounds for nothing else
        assert distance(y, exact) > 1e-5 and distance(grad, exact_grad) > 1e-5


@pytest.mark.parametrize("tiles", [True, False])
def test_without_gradients_operands_are_rounded_with_amx_and_without(monkeypatch, tiles):
    torch.manual_seed(0)
    layer, x = nn.Linear(384, 512), torch.randn(256, 384)
    monkeypatch.setattr(precision, "_has_tiles", lambda: tiles)
    with FastLinears(), torch.no_grad():
        y = layer(x)
    assert y.dtype == torch.float32 and distance(y, layer(x)) < 2**-7
    if AMX or not tiles:
        assert distance(y, layer(x)) > 1e-5


def test_without_amx_a_forward_that_gradients_follow_is_exact_and_its_backward_rounded(monkeypatch):
    torch.manual_seed(0)
    layer, x, along = nn.Linear(384, 512), torch.randn(256, 384, requires_grad=True), torch.randn(256, 512)
    monkeypatch.setattr(precision, "_has_tiles", lambda: False)
    with FastLinears():
        y = layer(x)
    (grad,) = torch.autograd.grad(y, x, along)
    assert torch.equal(y, layer(x)) and grad.dtype == torch.float32
    assert 1e-4 < distance(grad, along @ layer.weight) < 2**-7


def test_what_it_does_not_gain_from_is_left_alone():
    torch.manual_seed(0)
    layer, computed = nn.Linear(33, 17), torch.randn(17, 33, requires_grad=True)
    few, many = torch.randn(3, 33), torch.randn(64, 33)
    with FastLinears():
        assert torch.equal(layer(few), F.linear(few, layer.weight, layer.bias))
        assert torch.equal(layer.double()(many.double()), layer(many.double()))
        # a weight that was computed on the way has a gradient of its own
        (grad,) = torch.autograd.grad(F.linear(many, computed * 2).sum(), computed)
        with exactly():
            product = F.linear(many, computed)
    assert torch.equal(product, F.linear(many, computed))
    torch.testing.assert_close(grad, 2 * many.sum(0).expand(17, 33))


def test_torchs_own_setting_holds_again_even_after_an_error():
    before = torch.backends.mkldnn.matmul.fp32_precision
    with FastLinears(), pytest.raises(RuntimeError):
        nn.Linear(33, 17)(torch.randn(64, 32))
    assert torch.backends.mkldnn.matmul.fp32_precision == before
