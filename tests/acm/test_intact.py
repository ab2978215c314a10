"""Tools that replace every nn.Linear, and exporters that hold no ACM: each is refused in words."""

import copy
import warnings

import pytest
import torch
import torch.nn.utils.prune
from torch import nn
from torch.utils._python_dispatch import return_and_correct_aliasing

import acm_compiler as acm
from acm_compiler.errors import NothingToConvert, UsageError
from tests.helpers.models import Attention, Mlp, Residual, Stack, example


class Int8Tensor(torch.Tensor):
    """Quantised weights as libraries keep them: a tensor that holds others, and knows a few operators."""

    @staticmethod
    def __new__(cls, whole, scale):
        return torch.Tensor._make_wrapper_subclass(cls, whole.shape, dtype=scale.dtype)

    def __init__(self, whole, scale):
        self.whole, self.scale = whole, scale

    def __tensor_flatten__(self):
        return ["whole", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, _context, _size, _stride):
        return cls(inner["whole"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return return_and_correct_aliasing(func, args, kwargs or {}, cls(args[0].whole, args[0].scale))
        plain = [arg.whole * arg.scale if isinstance(arg, cls) else arg for arg in args]
        if func not in (torch.ops.aten.t.default, torch.ops.aten.addmm.default, torch.ops.aten.mm.default):
            raise NotImplementedError(f"Int8Tensor dispatch: {func}")
        return func(*plain, **(kwargs or {}))


def _quantise(model):
    """Quantise as torchao does: the weight of every linear becomes another kind of tensor."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weight = module.weight.detach()
            scale = weight.abs().amax(1, keepdim=True) / 127
            module.weight = nn.Parameter(Int8Tensor((weight / scale).round().to(torch.int8), scale), False)
    return model


class _Adapted(nn.Module):
    """An adapter around a linear, as PEFT puts it in the linear's place."""

    def __init__(self, base):
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(base.in_features, 2), nn.Linear(2, base.out_features)

    @property
    def weight(self):
        return self.base.weight

    @property
    def bias(self):
        return self.base.bias

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def _adapt(model):
    found = [
        (parent, name) for parent in model.modules() for name, m in parent.named_children() if type(m) is nn.Linear
    ]
    for parent, name in found:
        setattr(parent, name, _Adapted(getattr(parent, name)))
    return model


def _quantise_dynamically(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that quantisation moved to another package
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def _whole(model):
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight.detach().to(torch.int8), False)
    return model


TOOLS = {
    "dynamic quantisation": (_quantise_dynamically, "a layer of its gate is a torch.ao.nn.quantized.dynamic"),
    "tensors that hold others": (_quantise, "found Int8Tensor"),
    "whole numbers": (_whole, "found a weight of torch.int8"),
    "adapters": (_adapt, r"a layer of its gate is a tests.acm.test_intact._Adapted"),
}


@pytest.fixture(scope="module")
def dense():
    torch.manual_seed(0)
    return Stack(Residual(Attention()), Residual(Mlp())).eval()


@pytest.fixture(scope="module")
def rewritten(dense):
    return acm.rewrite(dense, acm.plan(dense, example()))


@pytest.mark.parametrize("tool", TOOLS)
def test_an_acm_that_a_tool_changed_is_refused_with_what_to_do(rewritten, tool):
    change, found = TOOLS[tool]
    model = change(copy.deepcopy(rewritten))
    for part in acm.sites(model).values():
        with pytest.raises(UsageError, match=found) as caught:
            part(torch.randn(2, 5, part.learners.w_in.shape[-1]))
        assert caught.value.where == part.name and "outside of ACMs" in caught.value.fix
        assert caught.value.fix.startswith("acm.quantize(model)")


def test_parametrized_gates_still_run(rewritten):
    model, x = copy.deepcopy(rewritten), example()
    expected = model(x)
    for part in acm.sites(model).values():
        torch.nn.utils.parametrize.register_parametrization(part.gate.inner, "weight", nn.Identity())
    assert torch.equal(model(x), expected)


class _Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def test_learners_with_computed_weights_run_these(rewritten):
    model, expected, x = copy.deepcopy(rewritten), copy.deepcopy(rewritten), example()
    for part, plain in zip(acm.sites(model).values(), acm.sites(expected).values(), strict=True):
        torch.nn.utils.parametrize.register_parametrization(part.learners, "w_in", _Doubled())
        torch.nn.utils.prune.identity(part.gate.outer, "bias")
        plain.learners.w_in.data *= 2
    assert torch.equal(model(x), expected(x)) and not torch.equal(model(x), rewritten(x))


def test_quantised_weights_of_a_dense_model_are_skips_with_the_reason(dense):
    plan = acm.plan(_quantise(copy.deepcopy(dense)), example())
    assert not plan.sites
    reasons = {skip.name: skip.reason for skip in plan.skipped}
    quantised = {name for name, reason in reasons.items() if "quantised linear: convert the model as it was" in reason}
    assert quantised == {*(f"blocks.0.inner.{n}" for n in "qkvo"), "blocks.1.inner.up", "blocks.1.inner.down"}
    with pytest.raises(NothingToConvert, match="as it was before it was quantised"):
        acm.rewrite(dense, plan)


@pytest.mark.parametrize("export", [torch.jit.trace, lambda model, _: torch.jit.script(model)])
def test_torchscript_is_refused(rewritten, export):
    with warnings.catch_warnings(), pytest.raises(UsageError, match=r"TorchScript .* cannot hold an ACM"):
        warnings.simplefilter("ignore")  # that it is on its way out
        export(rewritten, example())


def test_onnx_is_refused_while_the_operators_are_traced(monkeypatch):
    dense = Stack(Residual(Mlp())).eval()
    model = acm.rewrite(dense, acm.plan(dense, example()))
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    for strict in (False, True):  # torch.onnx.export tries both
        with pytest.raises(Exception, match="an ACM cannot be exported to ONNX so") as caught:
            torch.export.export(model, (example(),), strict=strict)
        assert isinstance(caught.value, UsageError) or "UsageError" in str(caught.value)
