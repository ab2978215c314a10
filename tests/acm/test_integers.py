"""Learners whose weights are another library's tensors that stand for floats; torchao's own are in test_quantisers."""

import copy

import pytest
import torch
from torch import nn

import acm_compiler as acm
from acm_compiler.acm.quantized import integers
from acm_compiler.errors import StorageError, UsageError
from tests.helpers.build import planned_site, sliced_site, stack_of
from tests.helpers.models import Attention, Mlp, Residual, Stack, example


class Halved(torch.Tensor):
    """A weight kept as its bfloat16 halves, which knows nothing but to be detached and what floats it stands for."""

    @staticmethod
    def __new__(cls, half):
        return torch.Tensor._make_wrapper_subclass(cls, half.shape, dtype=torch.float32)

    def __init__(self, half):
        self.half_of = half

    def __tensor_flatten__(self):
        return ["half_of"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, _context, _size, _stride):
        return cls(inner["half_of"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(func(args[0].half_of))
        raise NotImplementedError(f"Halved knows no {func}")

    def __repr__(self):
        return "Halved()"

    def dequantize(self):
        return 2 * self.half_of.float()


def halved(model):
    """Quantise the learners' weights of all ACMs; gives a copy of the model with the floats that these stand for."""
    floats = copy.deepcopy(model)
    for changed, plain in zip(model.modules(), floats.modules(), strict=True):
        for name in integers.WEIGHTS if hasattr(changed, "w_in") else ():
            if (weight := getattr(changed, name)) is not None:
                wrapped = Halved((weight.detach() / 2).bfloat16())
                setattr(changed, name, nn.Parameter(wrapped, requires_grad=False))
                getattr(plain, name).data.copy_(wrapped.dequantize())
    return floats


SITES = {
    "mlp": planned_site(),
    "gated": planned_site(kind="gated_mlp", act="silu", learner_act="silu"),
    "one second layer for each k": planned_site(second_layer="per_k"),
    "low rank": planned_site(
        kind="linear", role="v", act="identity", learner_act="identity", dense_width=None, last=None
    ),
    "rows": sliced_site(),
    "columns": sliced_site(role="o"),
}


@pytest.mark.parametrize("form", SITES)
@pytest.mark.parametrize("tokens", [0, 1, 33])
def test_every_form_computes_with_the_floats_at_every_k(form, tokens):
    torch.manual_seed(0)
    model = stack_of(SITES[form]).eval()
    floats, x = halved(model), torch.randn(2, tokens, 8)
    if tokens > 1:
        x[0, 3] = torch.nan
    with torch.no_grad():
        assert torch.equal(model(x).isnan(), floats(x).isnan())
        torch.testing.assert_close(model(x), floats(x), equal_nan=True)
        for k in range(5):
            for one in (model, floats):
                one.acms[0].set_choices(knob=0.0, k_lo=k, k_hi=k)
            torch.testing.assert_close(model(x), floats(x), equal_nan=True)
    assert type(model.acms[0].learners.w_in) is Halved  # what is held stays what it was


def test_gradients_reach_the_input_and_the_biases():
    torch.manual_seed(0)
    model = stack_of(planned_site())
    floats, gradients = halved(model), []
    x = torch.randn(2, 7, 8)
    for one in (model, floats):
        given = x.clone().requires_grad_()
        one(given).square().sum().backward()
        gradients.append((given.grad, one.acms[0].learners.b_out.grad))
    torch.testing.assert_close(*gradients)


@pytest.fixture(scope="module")
def converted():
    """A converted model of an attention and an MLP with halved weights, the same in floats, and batches."""
    torch.manual_seed(0)
    original, batches = Stack(Residual(Attention()), Residual(Mlp())).eval(), [example() for _ in range(8)]
    model = acm.rewrite(original, acm.plan(original, batches[0]))
    acm.calibrate(model, batches, tokens=100, budgets=[0.5])
    return model, halved(model), batches


@pytest.mark.parametrize("backend", ["acm", "inductor"])
def test_graphs_compute_with_the_floats_at_every_budget(converted, backend):
    model, floats, batches = converted
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        for budget in (0.5, 1.0):
            acm.set_budget(model, budget)
            acm.set_budget(floats, budget)
            torch.testing.assert_close(compiled(batches[0]), floats(batches[0]))


def test_programs_hold_the_weights_as_they_are(converted, tmp_path):
    model, floats, batches = converted
    acm.export(model, tmp_path / "program", batches[0])
    program = torch.export.load(tmp_path / "program" / "program.pt2").module()
    acm.set_budget(floats, 0.5)
    with torch.no_grad():
        torch.testing.assert_close(program(batches[0], budget=torch.tensor(0.5)), floats(batches[0]))


def test_budgets_are_measured_anew_and_what_needs_floats_is_refused(converted, tmp_path):
    model, _, batches = converted
    acm.recalibrate(model, batches, tokens=100)
    site = next(iter(acm.sites(model).values()))
    assert site.learners.quantized == f"{__name__}.Halved"
    for request in (lambda: acm.calibrate(model, batches), lambda: acm.relax(model, 0.8), lambda: acm.quantize(model)):
        with pytest.raises(UsageError, match=f"{__name__}.Halved"):
            request()
    with pytest.raises(StorageError, match="another library has quantised this weight"):
        acm.save(model, tmp_path / "saved")
