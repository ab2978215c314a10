"""The backward of the Triton kernels in the interpreter, against float64: TRITON_INTERPRET=1 pytest this file."""

import contextlib
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from acm_compiler.acm.activations import resolve
from acm_compiler.acm.gradients import operators as plain
from acm_compiler.acm.reference import relaxed_output, run_learners
from acm_compiler.codegen import gpu
from acm_compiler.codegen.gpu.activation import INTERPRETED
from acm_compiler.codegen.gpu.calls import operators as calls
from acm_compiler.codegen.gpu.gradients import launch, operators, rule, stages
from acm_compiler.codegen.gpu.gradients.launch import run_backward
from acm_compiler.codegen.gpu.launch import SortedPlan
from acm_compiler.codegen.gpu.spec import spec_of
from acm_compiler.codegen.gpu.stages import Machine
from acm_compiler.codegen.gpu.tiles import bucket_of, choose_tiles
from acm_compiler.site import ACTIVATIONS
from tests.helpers.interpreter_cases import HOPPER, loops_run, poisoned  # noqa: F401  # fixtures, used for all tests
from tests.helpers.kernel_cases import Case, inputs_of, to

GATED = {"form": "gated", "act": "silu"}
LINEAR = {"form": "linear", "act": "identity", "bias": False}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
assert INTERPRETED


def exact_gradients(case: Case, inputs, dy, *, k_min: int | None = None):
    """Gradients in float64 by name, of nu too where a choice is relaxed; and the tensor nu."""
    w = to(inputs.weights, torch.float64)
    leaves = {name: t.requires_grad_() for name, t in w.tensors._asdict().items() if t is not None}
    leaves["x"] = inputs.x.double().requires_grad_()
    nu = None
    if k_min is None:
        y = run_learners(leaves["x"], inputs.k, w)
    else:
        nu = F.one_hot((inputs.k - k_min).long(), case.learners + 1 - k_min).double()
        leaves["nu"] = nu.requires_grad_()
        y = relaxed_output(leaves["x"], nu, w, k_min)
    grads = torch.autograd.grad(y, list(leaves.values()), dy.double(), allow_unused=True)
    found = zip(leaves.items(), grads, strict=True)
    return {name: torch.zeros_like(leaf) if grad is None else grad for (name, leaf), grad in found}, nu


def require_near(found, exact, dtype):
    """Every gradient is there, of the dtype and within its tolerance."""
    assert found.keys() == exact.keys()
    for name, grad in exact.items():
        assert found[name].shape == grad.shape and found[name].isfinite().all(), name
        assert (found[name].double() - grad).norm() <= TOLERANCE[dtype] * grad.norm().clamp_min(1e-9), name


def check(case: Case, *, k_min: int | None = None):
    inputs = inputs_of(case)
    if k_min is not None:
        inputs = replace(inputs, k=inputs.k.clamp(min=k_min))
    dy = torch.randn(case.tokens, case.d_out).to(case.dtype)
    exact, _ = exact_gradients(case, inputs, dy, k_min=k_min)
    choice = None if k_min is None else (torch.float32, k_min)
    call = {"wanted": set(exact), "machine": HOPPER, "choice": choice}
    require_near(run_backward(dy, inputs.x, inputs.k, inputs.weights, **call), exact, case.dtype)
    if choice is None:
        plan, order = sorted_plan(inputs)
        _, kept = plan.keeping(inputs.x, inputs.k, order)
        given = [None if tensor is None else tensor.clone() for tensor in kept]
        found = run_backward(dy, inputs.x, inputs.k, inputs.weights, order=order, kept=kept, **call)
        require_near(found, exact, case.dtype)
        for before, now in zip(given, kept, strict=True):  # another backward may read them
            assert before is now or torch.equal(before.nan_to_num(), now.nan_to_num())


def sorted_plan(inputs):
    """A forward's plan that sorts any number of tokens, and their order."""
    spec, tokens = spec_of(inputs.x, inputs.weights, None), len(inputs.x)
    facts = {"machine": HOPPER, "tiles": choose_tiles(spec, 90, 128), "bucket": bucket_of(tokens)}
    plan = SortedPlan(spec, inputs.weights, **facts)
    return plan, plan.order(inputs.k, None, inputs.x)


SMALL = {"tokens": 40, "d_in": 40, "d_out": 33, "width": 20}


@pytest.mark.parametrize("form", [{}, GATED, LINEAR], ids=["mlp", "gated", "linear"])
def test_gradients_are_those_of_float64(form):
    check(Case(**SMALL, **form))
    check(Case(**SMALL, **form), k_min=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("k", ["none", "all"])
def test_gradients_where_all_run_none_or_all_are_those_of_float64(k, dtype):
    check(Case(k=k, dtype=dtype, **SMALL))


@pytest.mark.parametrize("d_out", [33, 48])
def test_gradients_in_bf16_stay_near_float64(d_out):
    """Rows of 48 columns are read in bulk, of 33 through pointers."""
    case = Case(dtype=torch.bfloat16, **SMALL | {"d_out": d_out, "tokens": 70})
    check(case)
    check(case, k_min=0)
    check(replace(case, **GATED))  # products read a kept branch beyond what rows run


@pytest.mark.slow
@pytest.mark.parametrize("k", ["mixed", "none", "all", "one", "same"])
@pytest.mark.parametrize("form", [{}, GATED, LINEAR], ids=["mlp", "gated", "linear"])
def test_gradients_of_fixed_choices_are_those_of_float64(form, k):
    check(Case(k=k, **form))


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 33, 65])
@pytest.mark.parametrize("shape", [{"learners": 1, "width": 64}, {"learners": 7, "width": 13}, {"width": 96}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_odd_counts_and_shapes(dtype, shape, tokens):
    check(Case(tokens=tokens, d_in=37, d_out=45, dtype=dtype, **shape))


@pytest.mark.slow
@pytest.mark.parametrize("form", [{}, GATED, LINEAR], ids=["mlp", "gated", "linear"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_half_precision(form, dtype):
    check(Case(tokens=100, dtype=dtype, **form))
    check(Case(tokens=100, dtype=dtype, learners=5, width=24, **form), k_min=0)


@pytest.mark.slow
@pytest.mark.parametrize("k_min", [0, 1])
@pytest.mark.parametrize("form", [{}, GATED, LINEAR], ids=["mlp", "gated", "linear"])
def test_a_relaxed_choice_has_its_exact_gradient(form, k_min):
    check(Case(tokens=70, **form), k_min=k_min)
    check(Case(tokens=35, learners=7, width=13, **form), k_min=k_min)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("act", sorted(set(ACTIVATIONS) - {"identity"}))
def test_every_activation_has_its_derivative(act, dtype):
    """Also at its kinks: hidden values are -8 to 8 in quarters."""
    values = torch.arange(-32, 33).to(dtype) / 4
    case = Case(tokens=len(values), learners=1, width=1, d_in=1, d_out=1, act=act, bias=False, k="all", dtype=dtype)
    inputs = inputs_of(case)
    for tensor in inputs.weights.tensors:
        if tensor is not None:
            tensor.fill_(1.0)
    ones, leaf = torch.ones(len(values), 1), values[:, None].float().requires_grad_()
    (expected,) = torch.autograd.grad(resolve(act)(leaf), leaf, ones)
    given = ones.to(dtype), leaf.detach().to(dtype), inputs.k, inputs.weights
    found = run_backward(*given, wanted={"x"}, machine=HOPPER)
    near = {"rtol": 1e-5, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 8e-3, "atol": 1e-4}
    torch.testing.assert_close(found["x"].float(), expected, **near)


@pytest.mark.parametrize("form", [{}, GATED, LINEAR], ids=["mlp", "gated", "linear"])
@pytest.mark.parametrize("width", [5, 20, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_token_of_nan_or_infinity_reaches_what_it_has_part_in_and_nothing_else(form, width, dtype):
    """Up to seven learners share a block here; tokens are not finite coming in, going back, or both."""
    case, machine = Case(**SMALL | {"width": width, "learners": 4}, dtype=dtype, **form), replace(HOPPER, processors=9)
    inputs, dy = inputs_of(case), torch.randn(40, 33).to(dtype)
    inputs.x[7], inputs.k[7] = torch.nan, 1
    dy[8], inputs.k[8] = torch.inf, 2
    inputs.x[9], dy[9], inputs.k[9] = torch.inf, torch.nan, 0
    exact, _ = exact_gradients(case, inputs, dy)
    plan, order = sorted_plan(inputs)
    _, kept = plan.keeping(inputs.x, inputs.k, order)
    for more in ({}, {"order": order, "kept": kept}):
        found = run_backward(dy, inputs.x, inputs.k, inputs.weights, wanted=set(exact), machine=machine, **more)
        for name, grad in exact.items():
            assert torch.equal(found[name].isfinite(), grad.isfinite()), name
            assert not grad.isfinite().all(), name
        assert found["w_in"][2:].isfinite().all() and found["b_out"][[1, 3, 4]].isfinite().all()


def test_sums_over_tokens_have_the_same_bits_each_time_and_may_be_in_parts():
    case = Case(**SMALL | {"tokens": 300, "d_in": 8, "d_out": 8})
    inputs, dy, many = inputs_of(case), torch.randn(300, 8), Machine(arch=90, processors=24)
    assert stages.parts_of(1, 48, 300) > 1
    call = {"wanted": {"w_in", "b_in", "w_out"}, "machine": many}
    first = run_backward(dy, inputs.x, inputs.k, inputs.weights, **call)
    again = run_backward(dy, inputs.x, inputs.k, inputs.weights, **call)
    assert all(torch.equal(first[name], again[name]) for name in first)
    exact, _ = exact_gradients(case, inputs, dy)
    require_near(first, {name: exact[name] for name in first}, torch.float32)


@pytest.fixture
def on_a_gpu(monkeypatch):
    """CPU tensors count as those of a GPU."""
    monkeypatch.setattr(gpu, "machine_of", lambda device: HOPPER)
    for module in (operators, calls):
        monkeypatch.setattr(module, "on_device_of", lambda x: contextlib.nullcontext())


def test_weights_of_one_shape_share_a_plan_and_what_lies_askew_has_none(monkeypatch):
    monkeypatch.setattr(launch, "_PLANS", {})
    case = Case(**SMALL, dtype=torch.bfloat16)
    for turn in range(3):
        inputs, dy = inputs_of(case), torch.randn(40, 33).bfloat16()
        inputs.x.add_(turn)
        if turn == 2:
            room = torch.zeros(inputs.weights.w_in.numel() + 1, dtype=torch.bfloat16)
            askew = room[1:].view_as(inputs.weights.w_in).copy_(inputs.weights.w_in)
            inputs = replace(inputs, weights=replace(inputs.weights, w_in=askew))
        exact, _ = exact_gradients(case, inputs, dy)
        found = run_backward(dy, inputs.x, inputs.k, inputs.weights, wanted=set(exact), machine=HOPPER)
        require_near(found, exact, torch.bfloat16)
        assert len(launch._PLANS) == 1
    weights, call = replace(inputs.weights, w_in=askew.clone()), {"wanted": {"x"}, "machine": HOPPER}
    run_backward(dy, inputs.x, inputs.k, weights, **call)
    assert len(launch._PLANS) == 1
    run_backward(dy[:7], inputs.x[:7], inputs.k[:7], weights, **call)
    assert len(launch._PLANS) == 2  # another bucket


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("form", [{}, GATED, LINEAR], ids=["mlp", "gated", "linear"])
@pytest.mark.parametrize("k_min", [None, 0], ids=["fixed", "relaxed"])
def test_eager_calls_have_exact_gradients_and_those_of_gradients_too(form, k_min):
    case = Case(**SMALL, **form)
    inputs, dy = inputs_of(case), torch.randn(40, 33)
    exact, nu = exact_gradients(case, inputs, dy, k_min=k_min)
    leaves = {name: t.requires_grad_() for name, t in inputs.weights.tensors._asdict().items() if t is not None}
    leaves["x"] = inputs.x.requires_grad_()
    if k_min is None:
        y = rule.learners(inputs.x, inputs.k, inputs.weights)
    else:
        leaves["nu"] = nu.detach().float().requires_grad_()
        y = rule.relaxed(inputs.x, leaves["nu"], inputs.weights, k_min)
    given = list(leaves.values())
    found = torch.autograd.grad(y, given, dy, retain_graph=True)
    require_near(dict(zip(leaves, found, strict=True)), exact, torch.float32)
    again = torch.autograd.grad(y, given, dy, create_graph=True)
    for mine, other in zip(found, again, strict=True):
        torch.testing.assert_close(mine, other.detach(), rtol=1e-4, atol=1e-5)
    assert all(grad.requires_grad for grad in again[:1])


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("form", [{}, GATED, LINEAR], ids=["mlp", "gated", "linear"])
def test_a_kept_plans_backward_reads_its_first_layer_as_often_as_it_likes(form, monkeypatch):
    inputs, dy, read = inputs_of(Case(**SMALL, **form)), torch.randn(40, 33), []
    run = launch.run_backward
    monkeypatch.setattr(
        operators, "run_backward", lambda *args, **named: read.append(named["kept"]) or run(*args, **named)
    )
    exact, _ = exact_gradients(Case(**SMALL, **form), inputs, dy)
    leaves = {name: t.requires_grad_() for name, t in inputs.weights.tensors._asdict().items() if t is not None}
    leaves["x"] = inputs.x.requires_grad_()
    y = rule.differentiated(*sorted_plan(inputs), inputs.x, inputs.k, inputs.weights)
    torch.testing.assert_close(y, run_learners(inputs.x, inputs.k, inputs.weights), rtol=1e-4, atol=1e-5)
    first, again = (torch.autograd.grad(y, list(leaves.values()), dy, retain_graph=True) for _ in range(2))
    require_near(dict(zip(leaves, first, strict=True)), exact, torch.float32)
    assert all(map(torch.equal, first, again)) and len(read) == 2 and None not in read


@pytest.mark.usefixtures("on_a_gpu")
def test_eager_calls_of_no_tokens_and_of_what_no_kernel_covers_have_gradients():
    for case, tokens in ((Case(**SMALL), 0), (Case(second="per_k"), 130)):
        inputs = inputs_of(case)
        x = inputs.x[:tokens].detach().requires_grad_()
        inputs.weights.w_in.requires_grad_()
        rule.learners(x, inputs.k[:tokens], inputs.weights).sum().backward()
        assert x.grad.shape == x.shape and bool(inputs.weights.w_in.grad.any()) == bool(tokens)


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("form", [{}, GATED], ids=["mlp", "gated"])
def test_the_operators_run_the_kernels_and_give_all_gradients(form, monkeypatch):
    case = Case(**SMALL, **form)
    inputs, dy = inputs_of(case), torch.randn(40, 33)
    started = []
    run = launch.run_backward
    monkeypatch.setattr(operators, "run_backward", lambda *args, **named: started.append(1) or run(*args, **named))
    tensors, options = inputs.weights.tensors, {"form": case.form, "act": case.act}
    found = operators.learners_backward(dy, inputs.x, inputs.k, *tensors, inputs.residual, **options)
    expected = plain.backward(dy, inputs.x, inputs.k, *tensors, inputs.residual, **options)
    assert len(found) == len(expected) and found[-1].data_ptr() != dy.data_ptr()
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    exact, nu = exact_gradients(case, inputs, dy, k_min=0)
    empty, named = torch.zeros(0), options | {"k_min": 0, "wanted": list(exact)}
    grads = operators.relaxed_backward(dy, empty, empty, inputs.x, nu.detach().float(), *tensors, **named)
    require_near(dict(zip(exact, grads, strict=True)), exact, torch.float32)
    assert len(started) == 2


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("case", [Case(second="per_k"), Case(second="top"), Case(act="mul(x, sigmoid(x))")], ids=str)
def test_what_the_kernels_do_not_cover_is_plain_torch(case, monkeypatch):
    monkeypatch.setattr(operators, "run_backward", lambda *args, **named: pytest.fail("a kernel"))
    inputs, dy = inputs_of(case), torch.randn(case.tokens, case.d_out)
    options = {"form": case.form, "act": case.act}
    found = operators.learners_backward(dy, inputs.x, inputs.k, *inputs.weights.tensors, **options)
    assert [grad.shape for grad in found[:2]] == [inputs.x.shape, inputs.weights.w_in.shape]


@pytest.mark.usefixtures("on_a_gpu")
def test_no_tokens_have_gradients_of_zero():
    inputs, options = inputs_of(Case(**SMALL)), {"form": "mlp", "act": "gelu"}
    found = operators.learners_backward(
        torch.zeros(0, 33), inputs.x[:0], inputs.k[:0], *inputs.weights.tensors, **options
    )
    assert found[0].shape == (0, 40) and not any(grad.any() for grad in found)
