"""4-bit weights: how far they are from floats, what they share, and the shapes that are refused."""

from dataclasses import replace

import pytest
import torch

from acm_compiler.acm import ops
from acm_compiler.acm.quantized import int4, integers
from acm_compiler.acm.reference import prefix_output, run_learners
from acm_compiler.errors import UsageError
from tests.helpers.kernel_cases import FORMS, Case, k_of, to, weights_of

EVEN = tuple(case for case in FORMS if case.width // case.heads % 2 == 0)


def drawn(case: Case):
    """(x, k, float weights, 4-bit weights) of a case, float32."""
    weights = to(weights_of(case), torch.float32)
    return torch.randn(case.tokens, case.d_in), k_of(case), weights, integers.quantized(weights, "int4")


@pytest.mark.parametrize("length", [2, 32, 34, 96])
def test_a_weight_is_off_by_half_a_step_at_most(length):
    w = torch.randn(7, length) * torch.logspace(-2, 2, 7)[:, None]
    values, scales = int4.quantize_weight(w)
    assert values.shape == (7, length // 2) and scales.shape == (7, -(-length // 32), 2)
    step = scales[..., 0].float().repeat_interleave(32, 1)[:, :length]
    assert ((int4.dequantize_weight(values, scales) - w).abs() <= 0.51 * step + 2e-3 * w.abs().amax(1)[:, None]).all()


def test_what_was_4_bits_before_is_kept():
    """A group whose values use both ends of 16 steps comes back as it was."""
    q = torch.randint(0, 16, (5, 3, 32))
    q[..., 0], q[..., 1] = 0, 15
    scale, least = torch.rand(5, 3, 1).half() + 0.01, torch.randn(5, 3, 1).half()
    w = (q * scale.float() + least.float()).flatten(1)
    torch.testing.assert_close(int4.dequantize_weight(*int4.quantize_weight(w)), w, rtol=0, atol=2e-3)


def test_groups_do_not_straddle_parts():
    w = torch.randn(3, 2, 40)
    values, scales = int4.quantize_weight(w.flatten(1), parts=2)
    apart = [int4.dequantize_weight(*int4.quantize_weight(part)) for part in w.unbind(1)]
    assert torch.equal(int4.dequantize_weight(values, scales, parts=2), torch.cat(apart, 1))


def test_activations_are_rounded_by_group_and_lost_groups_are_nan():
    x = torch.randn(5, 70)
    x[0], x[1] = 0, 1e-42
    assert (int4.rounded(x)[:2] == 0).all()
    step = x[2:].abs().amax(-1, keepdim=True) / 127
    assert ((int4.rounded(x)[2:] - x[2:]).abs() <= 0.51 * step).all()
    x[3, 40] = torch.inf
    assert int4.rounded(x).isnan().nonzero().tolist() == [[3, place] for place in range(32, 64)]


@pytest.mark.parametrize("case", EVEN, ids=str)
def test_every_form_is_near_the_floats(case):
    x, k, weights, quantized = drawn(case)
    y, expected = run_learners(x, k, quantized), run_learners(x, k, weights)
    assert 0 < (y - expected).norm() < 0.15 * expected.norm()
    # all but rounded activations
    floats = run_learners(x, k, integers.dequantized(quantized))
    assert (y - floats).norm() < 0.02 * floats.norm()


@pytest.mark.parametrize("case", [case for case in EVEN if case.second == "shared" and case.form != "rows"], ids=str)
def test_no_prefix_depends_on_a_later_learner(case):
    x, _, _, quantized = drawn(case)
    w_in, w_out = quantized.w_in.clone(), quantized.w_out
    w_in[-1] = 255 - w_in[-1]
    last = replace(quantized, w_in=w_in, w_out=None if w_out is None else w_out.index_fill(1, torch.tensor([2]), 3))
    for few in range(case.learners):
        assert torch.equal(prefix_output(x, last, few), prefix_output(x, quantized, few))


@pytest.mark.parametrize("case", EVEN, ids=str)
def test_gradients_pass_the_rounding(case):
    x, k, _, quantized = drawn(case)
    leaf, dy = x.clone().requires_grad_(), torch.randn(case.tokens, quantized.b_out.shape[1])
    (found,) = torch.autograd.grad(ops.learners(leaf, k, quantized), leaf, dy)
    (expected,) = torch.autograd.grad(run_learners(leaf, k, integers.dequantized(quantized)), leaf, dy)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", EVEN, ids=str)
def test_operands_that_do_not_fit_are_refused(case):
    x, k, weights, quantized = drawn(case)
    wrong = [
        replace(quantized, s_in=quantized.s_in[..., :-1]),
        replace(quantized, s_in=quantized.s_in.float()),
        replace(quantized, s_in=None),
        replace(quantized, w_in=quantized.w_in[..., :-1]),
    ]
    if quantized.w_out is not None:
        wrong += [replace(quantized, w_out=weights.w_out), replace(quantized, s_out=None)]
    if quantized.w_top is not None:
        wrong.append(replace(quantized, s_top=quantized.s_top[:, :-1]))
    for odd in wrong:
        with pytest.raises(UsageError, match="acm::learners"):
            ops.learners(x, k, odd)
