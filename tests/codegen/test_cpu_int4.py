"""The native CPU kernel with 4-bit weights against the reference."""

import pytest
import torch

from acm_compiler.acm import ops
from acm_compiler.acm.quantized import integers
from acm_compiler.acm.reference import run_learners
from acm_compiler.codegen.compare import INT8_TOLERANCE, TOLERANCE, relative_error
from acm_compiler.errors import UsageError
from tests.helpers.kernel_cases import FEW, FORMS, ODD, Case, k_of, require_same_bits_by_threads, to, weights_of

WIDE = (
    Case(form="gated", act="silu", tokens=300, d_in=130, d_out=90, width=74, learners=4),
    Case(form="gated", act="silu", tokens=61, d_in=258, d_out=33, width=2),
    Case(form="gated", act="silu", second="top", tokens=9, d_in=70, width=130, d_out=17),
    Case(form="linear", act="identity", second="per_k", tokens=16, d_in=6, width=4, d_out=3),
    Case(form="gated", act="silu", tokens=40, d_in=2, width=2, d_out=1, learners=1),
    Case(form="rows", heads=2, width=130, d_in=96, d_out=390, tokens=70),
    Case(form="cols", heads=2, width=132, d_in=396, d_out=70, tokens=70),
)
ALL = tuple(case for case in FORMS + ODD + FEW + WIDE if case.d_in % 2 == 0 and case.width // case.heads % 2 == 0)

pytestmark = pytest.mark.usefixtures("library")


def drawn(case: Case, dtype: torch.dtype = torch.float32):
    """(x, k, 4-bit weights, residual) of a case."""
    torch.manual_seed(0)
    weights = ops.cast_weights(integers.quantized(to(weights_of(case), torch.float32), "int4"), dtype)
    x, residual = torch.randn(case.tokens, case.d_in), torch.randn(case.tokens, weights.b_out.shape[1])
    return x.to(dtype), k_of(case), weights, residual.to(dtype)


def native(x, k, w, residual=None):
    return torch.ops.acm.learners_cpu(x, k, *w.tensors, residual, form=w.form, act=w.act)


@pytest.mark.parametrize("case", ALL, ids=str)
def test_it_equals_the_reference(case):
    x, k, weights, residual = drawn(case)
    expected = run_learners(x, k, weights)
    assert relative_error(native(x, k, weights), expected) <= INT8_TOLERANCE
    near = (native(x, k, weights, residual) - residual - expected).abs().amax(1) <= 1e-5
    assert near.float().mean() >= 0.9  # all but those with a hidden value between two integers


@pytest.mark.parametrize("case", [case for case in ALL if case in FORMS], ids=str)
def test_bfloat16_tokens(case):
    x, k, weights, residual = drawn(case, torch.bfloat16)
    expected = run_learners(x, k, weights) + residual
    assert relative_error(native(x, k, weights, residual), expected) <= TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("case", [case for case in ALL if case in FORMS + WIDE[:2]], ids=str)
def test_a_token_keeps_its_bits_whatever_its_neighbours(case):
    x, k, weights, _ = drawn(case)
    y = native(x, k, weights)
    many = native(x.repeat(7, 1), torch.cat([k, *((k + n) % (case.learners + 1) for n in range(6))]), weights)
    assert torch.equal(many[: case.tokens], y)
    for few in (1, 4, 13):
        assert torch.equal(native(x[-few:], k[-few:], weights), y[-few:])


def test_threads_do_not_change_a_bit():
    require_same_bits_by_threads(native, drawn)


@pytest.mark.parametrize("case", [case for case in ALL if case in FORMS], ids=str)
def test_zeros_tiny_values_and_what_is_not_finite(case):
    x, _, weights, _ = drawn(case)
    k = torch.full((case.tokens,), case.learners)
    x[0], x[1] = 0, 1e-42
    clean = native(x, k, weights)
    torch.testing.assert_close(clean[:2], run_learners(x[:2], k[:2], weights), rtol=1e-4, atol=1e-4)
    for odd in (torch.nan, torch.inf, -torch.inf):
        lost = x.clone()
        lost[3, 5] = odd
        y = native(lost, k, weights)
        assert torch.equal(y.isnan(), run_learners(lost, k, weights).isnan()) and y[3].isnan().any()
        others = torch.arange(case.tokens) != 3
        torch.testing.assert_close(y[others], clean[others], rtol=0, atol=0)


def test_no_tokens():
    x, k, weights, _ = drawn(FORMS[0])
    assert native(x[:0], k[:0], weights).shape == (0, weights.b_out.shape[1])


def test_a_written_weight_or_scale_is_packed_anew():
    x, k, weights, _ = drawn(FORMS[1])
    native(x, k, weights)
    for tensor in (weights.w_in, weights.s_out):
        tensor.copy_(tensor.flip(0))
        assert relative_error(native(x, k, weights), run_learners(x, k, weights)) <= INT8_TOLERANCE


@pytest.mark.parametrize("case", [case for case in ALL if case in FORMS], ids=str)
def test_operands_that_do_not_fit_are_the_references_error(case):
    x, k, weights, _ = drawn(case)
    tensors = weights.tensors
    for odd in (tensors._replace(s_in=tensors.s_in[..., :-1]), tensors._replace(w_in=tensors.w_in[..., :-1])):
        with pytest.raises(UsageError, match="acm::learners"):
            torch.ops.acm.learners_cpu(x, k, *odd, form=weights.form, act=weights.act)
