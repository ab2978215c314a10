"""4-bit learners rounded by data lose less than nearest values, at every k and in every form."""

import dataclasses

import pytest
import torch

from acm_compiler.acm.arguments import Weights
from acm_compiler.acm.quantized import integers
from acm_compiler.acm.reference import prefix_output, run_learners
from acm_compiler.calibration.quantized.inputs import Inputs
from acm_compiler.calibration.quantized.round_learners import rounded_learners
from tests.helpers.kernel_cases import FORMS, Case, to, weights_of

EVEN = tuple(case for case in FORMS if case.width // case.heads % 2 == 0)
TOKENS = 600


def seen(x: torch.Tensor, k: torch.Tensor) -> Inputs:
    inputs = Inputs(len(x))
    inputs.add(x, k)
    return inputs


def drawn(case: Case) -> tuple[torch.Tensor, torch.Tensor, Weights]:
    """(correlated inputs, k of each, float32 weights)."""
    torch.manual_seed(0)
    x = torch.randn(TOKENS, case.d_in // 3) @ torch.randn(case.d_in // 3, case.d_in) / 5 + 0.5
    return x.bfloat16().float(), torch.randint(0, case.learners + 1, (TOKENS,)), to(weights_of(case), torch.float32)


@torch.no_grad()
@pytest.mark.parametrize("case", EVEN, ids=str)
def test_every_k_of_every_form_loses_less_than_with_nearest_values(case):
    x, k, weights = drawn(case)
    ours, plain = rounded_learners(weights, seen(x, k)), integers.quantized(weights, "int4")
    for one, other in zip(ours.tensors, plain.tensors, strict=True):
        same = one is other is None or (one.shape, one.dtype) == (other.shape, other.dtype)
        assert same
    for few in range(1, case.learners + 1):
        of_k = x[k == few]
        expected = prefix_output(of_k, weights, few)
        lost, before = ((prefix_output(of_k, some, few) - expected).norm() for some in (ours, plain))
        assert lost < (0.7 if case.form != "rows" else 0.8) * before
    assert torch.equal(ours.b_out[0], weights.b_out[0])


@torch.no_grad()
@pytest.mark.parametrize("case", EVEN, ids=str)
def test_mean_outputs_are_those_of_the_floats(case):
    x, k, weights = drawn(case)
    floats = integers.dequantized(rounded_learners(weights, seen(x, k)))
    for few in range(1, case.learners + 1):
        of_k = x[k == few]
        off = (prefix_output(of_k, floats, few) - prefix_output(of_k, weights, few)).mean(0)
        assert off.abs().max() < 1e-4


@torch.no_grad()
def test_later_learners_change_no_prefix():
    case = Case(form="gated", act="silu", bias=False)
    x, k, weights = drawn(case)
    ours = rounded_learners(weights, seen(x, k))
    last = dataclasses.replace(ours, w_out=ours.w_out.index_fill(1, torch.tensor([2]), 7))
    assert torch.equal(prefix_output(x, last, 2), prefix_output(x, ours, 2))


@torch.no_grad()
@pytest.mark.parametrize("k", ["none", "few", "one token"])
def test_learners_that_no_token_ran_stay_near_the_floats(k):
    case = Case()
    x, _, weights = drawn(case)
    inputs = {
        "none": seen(x, torch.zeros(TOKENS)),
        "few": seen(x, torch.ones(TOKENS)),
        "one token": seen(x[:1], torch.full((1,), 3)),
    }[k]
    ours = rounded_learners(weights, inputs)
    every = torch.full((TOKENS,), case.learners, dtype=torch.int32)
    expected = run_learners(x, every, weights)
    assert (run_learners(x, every, ours) - expected).norm() < 0.5 * expected.norm()


@torch.no_grad()
@pytest.mark.parametrize("size", [0.0, 1.0])
def test_inputs_that_never_vary_leave_weights_near_the_floats(size):
    _, k, weights = drawn(Case())
    x = torch.full((TOKENS, Case().d_in), size)
    ours = rounded_learners(weights, seen(x, k))
    every = torch.full((TOKENS,), Case().learners, dtype=torch.int32)
    varied = x + 0.1 * torch.randn_like(x)
    expected = run_learners(varied, every, weights)
    assert (run_learners(varied, every, ours) - expected).norm() < 0.2 * expected.norm()


@torch.no_grad()
def test_bfloat16_learners_keep_their_type_in_biases():
    case = Case()
    x, k, weights = drawn(case)
    ours = rounded_learners(to(weights, torch.bfloat16), seen(x, k))
    assert ours.b_out.dtype == ours.b_in.dtype == torch.bfloat16 and ours.s_in.dtype == torch.float16
    expected = prefix_output(x, weights, 3)
    assert (prefix_output(x, ours, 3) - expected).norm() < 0.1 * expected.norm()
