"""Int8 weights and activations: how far they are from floats, and what a token's output may depend on."""

from dataclasses import replace

import pytest
import torch

from acm_compiler.acm import ops
from acm_compiler.acm.quantized import int8, integers
from acm_compiler.acm.reference import prefix_output, run_learners
from acm_compiler.errors import UsageError
from tests.helpers.kernel_cases import FORMS, Case, k_of, to, weights_of


def drawn(case: Case):
    """(x, k, float weights, int8 weights) of a case, float32."""
    weights = to(weights_of(case), torch.float32)
    return torch.randn(case.tokens, case.d_in), k_of(case), weights, integers.quantized(weights)


def run(x, k, weights):
    return ops.learners(x, k, weights)


def test_a_row_is_off_by_half_a_step_at_most_and_keeps_its_zeros():
    x = torch.randn(50, 33)
    x[:, 3] = 0
    rows = int8.quantize_rows(x)
    centred = rows.q - rows.zero
    assert ((centred * rows.scale - x).abs() <= rows.scale * 1.01).all()
    assert (centred[:, 3] == 0).all()
    assert all((values == values.round()).all() and values.min() >= 0 for values in (rows.q, rows.zero))
    assert rows.q.max() <= 255 and rows.zero.max() <= 255


def test_a_weight_is_off_by_half_a_step_at_most_per_output_channel():
    w = torch.randn(7, 33) * torch.logspace(-3, 3, 7)[:, None]
    q, scale = int8.quantize_weight(w, (-1,))
    assert q.dtype == torch.int8 and q.abs().amax(1).eq(127).all()
    assert ((q * scale[:, None] - w).abs() <= 0.501 * scale[:, None]).all()


@pytest.mark.parametrize(
    "tokens, outputs, depth", [(5, 9, 3000), (1, 3, 7), (33, 17, 40), (0, 4, 8), (5, 16, 1), (33, 2, 2)]
)
def test_sums_of_integers_are_exact_however_deep(tokens, outputs, depth, monkeypatch):
    q = torch.randint(0, 256, (tokens, depth)).float()
    zero, w = torch.randint(0, 256, (tokens, 1)).float(), torch.randint(-127, 128, (outputs, depth), dtype=torch.int8)
    q[:1], zero[:1], w[0] = 255, 0, 127
    expected = (q - zero).long() @ w.long().T
    assert torch.equal(int8._sums(q, zero, w).long(), expected)
    monkeypatch.setattr(int8, "_cpu_has_products", lambda: False)
    assert torch.equal(int8._sums(q, zero, w).long(), expected)


def test_a_part_of_a_weight_is_multiplied_in_place():
    q, zero, w = (
        torch.randint(0, 256, (6, 8)).float(),
        torch.zeros(6, 1),
        torch.randint(-127, 128, (9, 32)).to(torch.int8),
    )
    for piece in w.chunk(4, -1):
        assert torch.equal(int8._sums(q, zero, piece).long(), q.long() @ piece.long().T)


def test_tokens_are_computed_in_blocks_and_depend_on_none():
    x, k, _, quantized = drawn(FORMS[0])
    many, expected = x.repeat(2 * integers.BLOCK // len(x) + 1, 1), run(x, k, quantized)
    y = run(many, k.repeat(len(many) // len(x)), quantized)
    torch.testing.assert_close(y, expected.repeat(len(many) // len(x), 1), rtol=1e-5, atol=1e-6)


def test_integers_on_a_grid_lose_nothing():
    x, w = torch.randint(-100, 101, (6, 40)).float(), torch.randint(-126, 127, (8, 40)).float()
    x[:, 0], x[:, 1], w[:, 0] = 127, -128, 127
    q, scale = int8.quantize_weight(w, (-1,))
    assert torch.equal(int8.linear(x, q, scale), x @ w.T)


@pytest.mark.parametrize("case", FORMS, ids=str)
def test_every_form_is_near_the_floats(case):
    x, k, weights, quantized = drawn(case)
    y, expected = run(x, k, quantized), run(x, k, weights)
    assert y.dtype == x.dtype and (y - expected).norm() < 0.02 * expected.norm()
    assert not torch.equal(y, expected)


@pytest.mark.parametrize("case", FORMS, ids=str)
def test_a_token_depends_on_no_neighbour_and_on_no_later_learner(case):
    x, k, _, quantized = drawn(case)
    y = run(x, k, quantized)
    t = int(k.argmax())
    assert torch.allclose(run(x[t : t + 1], k[t : t + 1], quantized), y[t : t + 1], rtol=1e-5, atol=1e-6)
    if case.second == "shared" and case.form in ("mlp", "gated", "linear", "cols"):
        # other weights of the last learner; scales of output channels are shared, so they stay
        w_in, w_out = quantized.w_in.clone(), quantized.w_out
        w_in[-1] = -w_in[-1]
        last = replace(quantized, w_in=w_in, w_out=None if w_out is None else w_out.index_fill(1, torch.tensor([2]), 3))
        for few in range(case.learners):
            assert torch.equal(prefix_output(x, last, few), prefix_output(x, quantized, few))


@pytest.mark.parametrize("case", FORMS, ids=str)
def test_no_tokens_no_learners_and_lost_tokens(case):
    x, _, _, quantized = drawn(case)
    none = torch.zeros(case.tokens, dtype=torch.int32)
    assert run(x[:0], none[:0], quantized).shape == (0, quantized.b_out.shape[1])
    assert torch.equal(run(x, none, quantized), quantized.b_out[:1].expand(case.tokens, -1))
    whole = none + case.learners
    y = run(x, whole, quantized)
    for odd in (torch.nan, torch.inf, -torch.inf):
        lost = x.clone()
        lost[3, 5] = odd
        z = run(lost, whole, quantized)
        part = z[3] if case.form != "cols" else z[3][:1]
        assert part.isnan().all()
        others = torch.arange(case.tokens) != 3
        assert torch.allclose(z[others], y[others], rtol=1e-5, atol=1e-6)


def test_tokens_of_zeros_and_of_tiny_values():
    x, k, _, quantized = drawn(Case(form="linear", act="identity", bias=False, k="all", tokens=4))
    x[0], x[1] = 0, 1e-42
    y = run(x, k, quantized)
    assert torch.equal(y[0], quantized.b_out[-1]) and torch.equal(y[1], quantized.b_out[-1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_types_of_tokens(dtype):
    x, k, weights, quantized = drawn(Case())
    y = run(x.to(dtype), k, ops.cast_weights(quantized, dtype))
    expected = run(x, k, weights)
    assert y.dtype == dtype and (y.float() - expected).norm() < 0.02 * expected.norm()


def test_autocast_leaves_int8_weights_alone():
    x, k, _, quantized = drawn(Case())
    with torch.autocast("cpu", torch.bfloat16):
        assert run(x, k, quantized).dtype == torch.bfloat16


@pytest.mark.parametrize("case", FORMS, ids=str)
def test_gradients_pass_the_rounding(case):
    x, k, _, quantized = drawn(case)
    b_out = quantized.b_out.clone().requires_grad_()
    inputs = [x.clone().requires_grad_(), b_out]
    dy = torch.randn(case.tokens, b_out.shape[1])
    found = torch.autograd.grad(run(inputs[0], k, replace(quantized, b_out=b_out)), inputs, dy)
    floats = replace(integers.dequantized(quantized), b_out=b_out)
    expected = torch.autograd.grad(run_learners(inputs[0], k, floats), inputs, dy)
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def test_operands_that_do_not_fit_are_refused():
    x, k, weights, quantized = drawn(Case())
    wrong = (
        replace(quantized, s_out=None),
        replace(quantized, s_in=quantized.s_in[:, :-1]),
        replace(quantized, w_out=weights.w_out),
        replace(quantized, s_in=quantized.s_in.double()),
        replace(weights, s_out=quantized.s_out),
        replace(quantized, s_in=None),
    )
    for odd in wrong:
        with pytest.raises(UsageError, match="acm::learners"):
            run(x, k, odd)
