"""`acm::sparse_learners`: MLP learners that skip small values, by the reference."""

import pytest
import torch
from torch.func import vmap

from acm_compiler.acm.arguments import Weights
from acm_compiler.acm.reference import run_learners
from acm_compiler.acm.sparse import Thresholds, column_norms, kept_share, sparse_learners, sparse_output
from acm_compiler.errors import UsageError

N, H, D, O, T = 3, 5, 7, 4, 11  # noqa: E741
DOUBLE = torch.float64


@pytest.fixture(params=["mlp", "gated", "top"])
def weights(request):
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randn(shape, generator=generator, dtype=DOUBLE)

    gated = request.param == "gated"
    tensors = (drawn(N, H, D), drawn(N, H), drawn(N, H, D) if gated else None, drawn(N, H) if gated else None)
    top = drawn(O, N * H) if request.param == "top" else None
    return Weights(*tensors, drawn(O, N, H), drawn(N + 1, O), top, act="gelu", form="gated" if gated else "mlp")


@pytest.fixture
def tokens():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(T, D, generator=generator, dtype=DOUBLE), torch.arange(T) % (N + 1)


LEAST = Thresholds(torch.linspace(0.1, 0.9, D), torch.linspace(0.0, 0.8, N * H).view(N, H))


def by_hand(x, k, weights, least):
    """One token at a time, one value at a time."""
    y = weights.b_out[k].clone()
    act = torch.nn.functional.gelu
    kept = [j for j in range(D) if not abs(float(x[j])) < float(least.inputs[j])]
    for n in range(k):
        for i in range(H):
            h = act(weights.w_in[n, i, kept] @ x[kept] + weights.b_in[n, i])
            if weights.w_up is not None:
                h = h * (weights.w_up[n, i, kept] @ x[kept] + weights.b_up[n, i])
            if not abs(float(h)) < float(least.hidden[n, i]):
                column = weights.w_out[:, n, i]
                y += h * (weights.w_top[:, n * H + i] if k == N and weights.w_top is not None else column)
    return y


def test_each_value_is_skipped_by_its_own_least_size(weights, tokens):
    x, k = tokens
    expected = torch.stack([by_hand(row, int(one), weights, LEAST) for row, one in zip(x, k, strict=True)])
    torch.testing.assert_close(sparse_output(x, k, weights, LEAST), expected)
    torch.testing.assert_close(sparse_learners(x, k, weights, LEAST), expected)
    assert (expected - run_learners(x, k, weights)).abs().max() > 0.05


def test_without_a_least_size_nothing_is_skipped(weights, tokens):
    none = Thresholds(torch.zeros(D), torch.zeros(N, H))
    torch.testing.assert_close(sparse_learners(*tokens, weights, none), run_learners(*tokens, weights))
    assert kept_share(*tokens, weights, none).eq(1).all()


def test_no_tokens_and_no_values(weights, tokens):
    x, k = tokens
    assert sparse_learners(x[:0], k[:0], weights, LEAST).shape == (0, O)
    everything = Thresholds(torch.full((D,), torch.inf), torch.full((N, H), torch.inf))
    torch.testing.assert_close(sparse_learners(x, k, weights, everything), weights.b_out[k])


def test_nan_is_not_skipped_and_stays_with_its_token(weights, tokens):
    x, k = tokens
    spoilt = x.clone()
    spoilt[2, 3] = torch.nan
    y, expected = (sparse_learners(one, k, weights, LEAST) for one in (spoilt, x))
    assert y[2].isnan().all()
    others = torch.arange(T) != 2
    assert torch.equal(y[others], expected[others])


def test_share_that_is_left_is_counted_in_products(weights, tokens):
    x, k = tokens
    branches = 1 if weights.w_up is None else 2
    found = kept_share(x, k, weights, LEAST)
    for t in range(T):
        if not k[t]:
            assert found[t] == 1
            continue
        kept = ~(x[t].abs() < LEAST.inputs)
        cut = torch.where(kept, x[t], 0)
        h = torch.nn.functional.gelu(weights.w_in[: k[t]] @ cut + weights.b_in[: k[t]])
        if weights.w_up is not None:
            h = h * (weights.w_up[: k[t]] @ cut + weights.b_up[: k[t]])
        products = branches * int(kept.sum()) * int(k[t]) * H + int((~(h.abs() < LEAST.hidden[: k[t]])).sum()) * O
        assert float(found[t]) == pytest.approx(products / (int(k[t]) * H * (branches * D + O)), abs=1e-6)


def test_gradients_are_those_of_what_is_left(weights, tokens):
    x, k = tokens
    given = x.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: sparse_learners(x, k, weights, LEAST), (given,))
    sparse_learners(given, k, weights, LEAST).sum().backward()
    assert given.grad[x.abs() < LEAST.inputs].eq(0).all() and given.grad.ne(0).any()


def test_in_graphs_and_under_vmap_it_is_the_same(weights, tokens):
    x, k = tokens
    expected = sparse_learners(x, k, weights, LEAST)
    compiled = torch.compile(lambda x, k: sparse_learners(x, k, weights, LEAST), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, k), expected)
    mapped = vmap(lambda x, k: sparse_learners(x, k, weights, LEAST))(x[:, None], k[:, None])
    torch.testing.assert_close(mapped[:, 0], expected)


def test_in_bfloat16_and_under_autocast(weights, tokens):
    x, k = tokens
    expected = sparse_learners(x, k, weights, LEAST)
    small = Weights(
        *(t if t is None else t.bfloat16() for t in weights.tensors[:7]), act=weights.act, form=weights.form
    )
    y = sparse_learners(x.bfloat16(), k, small, LEAST)
    assert y.dtype == torch.bfloat16 and (y - expected).norm() < 0.1 * expected.norm()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(sparse_learners(x.float(), k, weights, LEAST), y)


def test_norms_are_of_the_columns_that_a_value_meets(weights):
    norm_D, norm_NH = column_norms(weights)
    first = weights.w_in.square().sum((0, 1)) + (0 if weights.w_up is None else weights.w_up.square().sum((0, 1)))
    torch.testing.assert_close(norm_D, first.sqrt().float())
    torch.testing.assert_close(norm_NH, weights.w_out.norm(dim=0).float())


def test_operands_that_do_not_fit_are_refused(weights, tokens):
    x, k = tokens
    with pytest.raises(UsageError, match="thresholds_in of acm::sparse_learners"):
        sparse_learners(x, k, weights, Thresholds(torch.zeros(D + 1), LEAST.hidden))
    with pytest.raises(UsageError, match="thresholds_hidden of acm::sparse_learners"):
        sparse_learners(x, k, weights, Thresholds(LEAST.inputs, LEAST.hidden.double()))
    with pytest.raises(UsageError, match="operand x"):
        sparse_learners(x[:, 1:], k, weights, LEAST)
