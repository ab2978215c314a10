"""The closed forms against brute force in float64: second layers, neuron orders, low-rank factors."""

import itertools
from dataclasses import replace

import pytest
import torch

from acm_compiler.acm.arguments import Weights
from acm_compiler.calibration.damage import Judged, Together, token_errors
from acm_compiler.calibration.learners.fit_learners import nested_factors, prefix_biases, trusted
from acm_compiler.calibration.learners.mlp_learners import (
    RIDGE,
    Hidden,
    fit_second_layer,
    greedy_order,
    neuron_order,
    refit_ridge,
    variance_order,
    weight_of_k,
)
from acm_compiler.calibration.linear_algebra import mean_diagonal, solve, square_factors, usual_diagonal
from acm_compiler.passes.rewrite.dense_region import DenseWeights

N, H, F, OUT, T = 3, 4, 12, 5, 400


def activations(features=F, tokens=T):
    """Correlated, skewed activations with a mean, [T, F] float64."""
    mix = torch.randn(features, features, dtype=torch.float64)
    return torch.relu(torch.randn(tokens, features, dtype=torch.float64) @ mix + 0.3)


def seen(h_TF, w_OF=None, b_O=None):
    w_OF = torch.randn(OUT, h_TF.shape[1], dtype=torch.float64) if w_OF is None else w_OF
    b_O = torch.randn(OUT, dtype=torch.float64) if b_O is None else b_O
    c_FF = torch.cov(h_TF.T, correction=0)
    return Hidden(tokens=len(h_TF), c_FF=c_FF, mean_F=h_TF.mean(0), w_OF=w_OF, b_O=b_O)


def prefix_errors(fit, hidden, h_TF, order, width=H):
    """Mean squared error of every prefix against the dense second layer."""
    y_TO = h_TF @ hidden.w_OF.T + hidden.b_O
    ordered = h_TF[:, order]
    errors = [(fit.b_out[0] - y_TO).square().sum(1).mean()]
    for k in range(1, N + 1):
        w_ONH = fit.w_out[k - 1] if fit.w_out.dim() == 4 else fit.w_out
        w = w_ONH[:, :k].flatten(1) if k < N or fit.w_top is None else fit.w_top
        s = min(k * width, ordered.shape[1])
        errors.append((ordered[:, :s] @ w[:, :s].T + fit.b_out[k] - y_TO).square().sum(1).mean())
    return torch.stack(errors)


@pytest.mark.parametrize("tokens", [T, 30])
def test_per_k_is_the_ridge_regression_of_each_prefix(tokens):
    h_TF = activations(tokens=tokens)
    hidden, order = seen(h_TF), torch.randperm(F)
    fit = fit_second_layer(hidden, order, "per_k", learners=N, width=H)
    y_TO, root_F = h_TF @ hidden.w_OF.T, refit_ridge(hidden).sqrt()
    for k in range(1, N):
        picked = order[: k * H]
        x = (h_TF - h_TF.mean(0))[:, picked] / tokens**0.5
        a = torch.cat([x, torch.diag(root_F[picked])])
        b = torch.cat([(y_TO - y_TO.mean(0)) / tokens**0.5, root_F[picked, None] * hidden.w_OF[:, picked].T])
        wanted = torch.linalg.lstsq(a, b).solution
        torch.testing.assert_close(fit.w_out[k - 1, :, :k].flatten(1), wanted.T, rtol=1e-7, atol=1e-9)
        assert not fit.w_out[k - 1, :, k:].any()


def test_a_refit_from_few_tokens_is_held_to_the_dense_layer_and_serves_others_better():
    torch.manual_seed(3)
    mix, w_OF = torch.randn(60, 60, dtype=torch.float64), torch.randn(OUT, 60, dtype=torch.float64)

    def drawn(tokens):
        return torch.relu(torch.randn(tokens, 60, dtype=torch.float64) @ mix + 0.3)

    few, others, order = seen(drawn(120), w_OF), drawn(4000), torch.arange(60)
    learners = {"learners": 3, "width": 20}
    bold = replace(few, tokens=1e9)  # as if all that varies were known
    errors = {
        tokens: prefix_errors(fit_second_layer(hidden, order, "per_k", **learners), few, others, order, width=20)
        for tokens, hidden in (("few", few), ("many", bold))
    }
    assert torch.allclose(refit_ridge(bold), RIDGE * few.c_FF.diagonal().mean())
    assert errors["few"][1] < 0.95 * errors["many"][1] and errors["few"][2] < 0.8 * errors["many"][2]


@pytest.mark.parametrize("tokens", [T, 30])
def test_shared_is_where_the_gradient_of_the_loss_over_all_k_vanishes(tokens):
    h_TF = activations(tokens=tokens)
    hidden, order = seen(h_TF), torch.randperm(F)
    fit = fit_second_layer(hidden, order, "shared", learners=N, width=H)
    ridge_F = refit_ridge(hidden)[order]
    x, w = (h_TF - h_TF.mean(0))[:, order], hidden.w_OF[:, order]
    own = prefix_errors(fit_second_layer(hidden, order, "per_k", learners=N, width=H), hidden, h_TF, order)
    least = own[1:] / own[0]

    def gradient(v_OF):
        v = v_OF.detach().clone().requires_grad_()
        loss = torch.zeros((), dtype=torch.float64)
        for k, weight in enumerate(weight_of_k(least), start=1):
            s = k * H
            error = x @ w.T - x[:, :s] @ v[:, :s].T
            held = (ridge_F[:s] * (v[:, :s] - w[:, :s]).square()).sum()
            loss = loss + weight * (error.square().sum(1).mean() + held)
        return torch.autograd.grad(loss, v)[0]

    assert gradient(fit.w_out.flatten(1)).norm() < 1e-9 * gradient(w).norm()


@pytest.mark.parametrize("kind", ["shared", "shared_top", "per_k", "original"])
def test_every_prefix_has_the_mean_output_of_the_dense_layer(kind):
    h_TF = activations()
    hidden, order = seen(h_TF), torch.randperm(F)
    fit = fit_second_layer(hidden, order, kind, learners=N, width=H)
    torch.testing.assert_close(fit.b_out[0], hidden.mean_output)
    for k in range(1, N + 1):
        w_ONH = fit.w_out[k - 1] if kind == "per_k" else fit.w_out
        w = fit.w_top if kind == "shared_top" and k == N else w_ONH[:, :k].flatten(1)
        mean = hidden.mean_F[order[: k * H]] @ w.T + fit.b_out[k]
        torch.testing.assert_close(mean, hidden.mean_output, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["shared_top", "per_k", "original"])
def test_lossless_kinds_keep_the_dense_layer_at_the_top_bit_for_bit(kind):
    hidden, order = seen(activations()), torch.randperm(F)
    fit = fit_second_layer(hidden, order, kind, learners=N, width=H)
    top = fit.w_top if kind == "shared_top" else (fit.w_out[-1] if kind == "per_k" else fit.w_out).flatten(1)
    assert torch.equal(top, hidden.w_OF[:, order]) and torch.equal(fit.b_out[N], hidden.b_O)


def test_each_kind_is_at_its_place_in_the_ranking():
    h_TF = activations()
    hidden = seen(h_TF)
    order = greedy_order(hidden.c_FF, hidden.w_OF, F)
    errors = {
        kind: prefix_errors(fit_second_layer(hidden, order, kind, learners=N, width=H), hidden, h_TF, order)
        for kind in ("shared", "shared_top", "per_k", "original")
    }
    for k in range(1, N):
        assert errors["per_k"][k] <= errors["shared_top"][k] + 1e-9
        assert errors["shared"][k] < errors["original"][k]
    for kind, error in errors.items():
        assert error[0] == pytest.approx(float((h_TF @ hidden.w_OF.T).var(0, correction=0).sum())), kind
        assert (error[N] < 1e-18) == (kind != "shared")
    # the shared matrix minimises the sum over its k, so neither beats the other there
    assert errors["shared"][1:].sum() < errors["original"][1:].sum()
    assert errors["shared_top"][1:N].sum() <= errors["shared"][1:N].sum()


def test_neurons_missing_to_full_learners_are_zeros_and_the_top_stays_exact():
    h_TF = activations(features=10)
    hidden = seen(h_TF)
    order = greedy_order(hidden.c_FF, hidden.w_OF, 10)
    fit = fit_second_layer(hidden, order, "per_k", learners=N, width=H)
    assert fit.w_out.shape == (N, OUT, N, H) and not fit.w_out[:, :, 2, 2:].any()
    assert prefix_errors(fit, hidden, h_TF, order)[N] < 1e-18


def test_dropped_neurons_are_made_up_for_at_every_k():
    h_TF = activations(features=16)
    hidden = seen(h_TF)
    order = greedy_order(hidden.c_FF, hidden.w_OF, N * H)
    refitted = fit_second_layer(hidden, order, "per_k", learners=N, width=H)
    plain = fit_second_layer(hidden, order, "original", learners=N, width=H)
    assert prefix_errors(refitted, hidden, h_TF, order)[N] < prefix_errors(plain, hidden, h_TF, order)[N]


@pytest.mark.parametrize("kind", ["shared", "shared_top", "per_k"])
def test_dead_and_duplicated_neurons_do_no_harm(kind):
    h_TF = activations(features=6)
    h_TF = torch.cat([h_TF, h_TF[:, :4], torch.zeros(T, 2, dtype=torch.float64)], dim=1)
    hidden = seen(h_TF)
    order = neuron_order(hidden.c_FF, hidden.w_OF, F)
    fit = fit_second_layer(hidden, order, kind, learners=N, width=H)
    errors = prefix_errors(fit, hidden, h_TF, order)
    assert errors.isfinite().all() and fit.w_out.isfinite().all()
    # six different neurons carry everything, and two learners hold all six
    assert errors[2] < (2e-3 if kind == "per_k" else 2e-2) * errors[0]


def test_an_mlp_that_never_fires_is_its_bias():
    h_TF = torch.zeros(T, F, dtype=torch.float64)
    hidden = seen(h_TF)
    order = neuron_order(hidden.c_FF, hidden.w_OF, F)
    fit = fit_second_layer(hidden, order, "shared", learners=N, width=H)
    assert sorted(order.tolist()) == list(range(F))
    torch.testing.assert_close(fit.b_out, hidden.b_O.expand(N + 1, -1))


def test_activations_that_vary_by_rounding_alone_are_ordered_and_keep_the_dense_layer():
    # a covariance of rounding errors is not even positive
    noise = 1e-15 * torch.randn(F, F, dtype=torch.float64)
    hidden = replace(seen(torch.ones(T, F, dtype=torch.float64)), c_FF=noise + noise.T)
    order = neuron_order(hidden.c_FF, hidden.w_OF, F)
    fit = fit_second_layer(hidden, order, "shared", learners=N, width=H)
    assert sorted(order.tolist()) == list(range(F))
    torch.testing.assert_close(fit.w_out.flatten(1), hidden.w_OF[:, order], rtol=0.1, atol=0.1)


def test_a_neuron_thousands_of_times_as_large_as_the_others_leaves_their_refit_as_it_is():
    h_TF = activations(features=24)
    loud_F = torch.ones(24, dtype=torch.float64).index_fill(0, torch.tensor([5]), 1e4)
    plain = seen(h_TF)
    loud = seen(h_TF * loud_F, plain.w_OF / loud_F, plain.b_O)
    errors = []
    for hidden, h in ((plain, h_TF), (loud, h_TF * loud_F)):
        order = neuron_order(hidden.c_FF, hidden.w_OF, 16)
        fit = fit_second_layer(hidden, order, "shared", learners=N, width=8)
        errors.append(prefix_errors(fit, hidden, h, order, width=8))
    assert (errors[1] < 1.2 * errors[0]).all()


def brute_force_order(c, w, count):
    """Forward selection by trying every neuron, with the same ridge."""
    ridge = RIDGE * c.diagonal().mean()
    picked: list[int] = []

    def explained(chosen):
        a = c[chosen][:, chosen] + ridge * torch.eye(len(chosen), dtype=c.dtype)
        cross = c[chosen] @ w.T
        return float((cross * torch.linalg.solve(a, cross)).sum())

    for _ in range(count):
        free = [j for j in range(len(c)) if j not in picked]
        picked.append(max(free, key=lambda j: explained([*picked, j])))
    return picked


def test_greedy_order_is_forward_selection():
    h_TF = activations()
    c, w = torch.cov(h_TF.T, correction=0), torch.randn(OUT, F, dtype=torch.float64)
    assert greedy_order(c, w, F)[: F - 1].tolist() == brute_force_order(c, w, F - 1)


def test_greedy_order_across_blocks_keeps_close_to_forward_selection():
    h_TF = activations(features=80, tokens=600)
    c, w = torch.cov(h_TF.T, correction=0), torch.randn(OUT, 80, dtype=torch.float64)
    order = greedy_order(c, w, 60)
    assert sorted(order.tolist()) == list(range(80))
    errors = {}
    for name, picked in (("greedy", order[:40]), ("exact", torch.tensor(brute_force_order(c, w, 40)))):
        rest = c - c[:, picked] @ torch.linalg.solve(c[picked][:, picked], c[picked])
        errors[name] = float((w @ rest @ w.T).trace())
    assert errors["greedy"] < 1.2 * errors["exact"]


def test_greedy_order_beats_variance_order_where_loud_neurons_say_the_same():
    base = torch.randn(T, 4, dtype=torch.float64)
    # eight loud copies of one signal, and three quiet signals of their own
    loud = 2 * base[:, :1] + 0.01 * torch.randn(T, 8, dtype=torch.float64)
    h_TF = torch.cat([loud, base[:, 1:], 0.01 * torch.randn(T, 1, dtype=torch.float64)], dim=1)
    hidden = seen(h_TF, w_OF=torch.ones(OUT, F, dtype=torch.float64) + 0.1 * torch.randn(OUT, F, dtype=torch.float64))
    greedy, loudest = (order(hidden) for order in (_greedy, _loudest))
    assert set(loudest[:4].tolist()) <= set(range(8)) and {8, 9, 10} <= set(greedy[:4].tolist())
    errors = [
        prefix_errors(fit_second_layer(hidden, o, "per_k", learners=N, width=H), hidden, h_TF, o)[1]
        for o in (greedy, loudest)
    ]
    assert errors[0] < 0.05 * errors[1]


def _greedy(hidden):
    return greedy_order(hidden.c_FF, hidden.w_OF, F)


def _loudest(hidden):
    return variance_order(hidden.c_FF, hidden.w_OF)


def weighted_error(w_OD, factors, rank, c_DD, g_OO):
    d = w_OD - factors.w_out[:, :rank] @ factors.w_in[:rank]
    return float((g_OO @ d @ c_DD @ d.T).trace())


def spd(size, decay=1.0):
    basis = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64)).Q
    return (basis * torch.logspace(0, -decay, size, dtype=torch.float64)) @ basis.T


def test_factors_are_the_best_of_every_rank_in_both_metrics():
    w_OD, c_DD, g_OO = torch.randn(6, 7, dtype=torch.float64), spd(7), spd(6)
    factors = nested_factors(w_OD, c_DD, g_OO, 6)
    ridged_c = c_DD + 1e-5 * c_DD.diagonal().mean() * torch.eye(7, dtype=torch.float64)
    ridged_g = g_OO + 0.3 * g_OO.diagonal().mean() * torch.eye(6, dtype=torch.float64)
    root_c, root_g = (torch.linalg.cholesky(m).T for m in (ridged_c, ridged_g))
    for rank in range(1, 6):
        ours = weighted_error(w_OD, factors, rank, ridged_c, ridged_g)
        best = float("inf")
        for _ in range(3):
            # alternating least squares on the whitened problem || root_g (W - A B) root_c^T ||
            b = torch.randn(rank, 7, dtype=torch.float64)
            for _ in range(300):
                a = torch.linalg.lstsq((b @ root_c.T).T, (w_OD @ root_c.T).T).solution.T
                b = torch.linalg.lstsq(root_g @ a, root_g @ w_OD).solution
            best = min(best, float((root_g @ (w_OD - a @ b) @ root_c.T).square().sum()))
        assert ours <= best * (1 + 1e-6)
        assert ours == pytest.approx(best, rel=1e-3)


def test_the_output_metric_decides_what_is_kept_first():
    w_OD, c_DD = torch.randn(6, 7, dtype=torch.float64), spd(7, decay=0.0)
    g_OO = torch.full((6,), 1e-6, dtype=torch.float64)
    g_OO[4] = 1.0
    factors = nested_factors(w_OD, c_DD, torch.diag(g_OO), 6)
    error = (w_OD - factors.w_out[:, :1] @ factors.w_in[:1]).square().sum(1) / w_OD.square().sum(1)
    assert error[4] < 0.001 and error.sum() - error[4] > 0.5 * 5


def test_inputs_that_never_vary_cost_no_rank():
    w_OD = torch.randn(6, 7, dtype=torch.float64)
    c_DD = torch.zeros(7, 7, dtype=torch.float64)
    c_DD[:2, :2] = torch.eye(2, dtype=torch.float64)
    factors = nested_factors(w_OD, c_DD, torch.zeros(6, 6, dtype=torch.float64), 6)
    assert weighted_error(w_OD, factors, 2, c_DD, torch.eye(6, dtype=torch.float64)) < 1e-6
    assert factors.w_in.isfinite().all() and factors.w_out.isfinite().all()


def test_an_input_that_never_varies_leaves_learners_of_a_usual_size():
    w_OD = torch.randn(6, 7, dtype=torch.float64)
    factors = nested_factors(w_OD, torch.zeros(7, 7, dtype=torch.float64), torch.eye(6, dtype=torch.float64), 6)
    assert 0 < factors.w_in.abs().max() < 100 and 0 < factors.w_out.abs().max() < 100


def test_factors_of_few_tokens_serve_others_nearly_as_well_as_those_of_the_weight_alone():
    w_OD, same_DD = torch.randn(24, 24, dtype=torch.float64), torch.eye(24, dtype=torch.float64)
    c_DD = trusted(torch.cov(torch.randn(24, 24, dtype=torch.float64), correction=0), tokens=24)
    lost = []
    for seen_DD in (c_DD, same_DD):
        factors = nested_factors(w_OD, seen_DD, same_DD, 12)
        lost.append((w_OD - factors.w_out @ factors.w_in).square().sum())
    assert lost[0] < 1.7 * lost[1]


def test_an_input_thousands_of_times_as_large_as_the_others_leaves_the_factors_the_best_of_every_rank():
    c_DD, w_OD = spd(24), torch.randn(6, 24, dtype=torch.float64)
    loud_D = torch.ones(24, dtype=torch.float64).index_fill(0, torch.tensor([3]), 1e4)
    scaled_DD, scaled_OD = c_DD * loud_D[:, None] * loud_D, w_OD / loud_D
    factors = nested_factors(scaled_OD, scaled_DD, torch.eye(6, dtype=torch.float64), 6)
    singular = torch.linalg.svdvals(w_OD @ torch.linalg.cholesky(c_DD))
    for rank in range(6):
        lost_OD = scaled_OD - factors.w_out[:, :rank] @ factors.w_in[:rank]
        error = ((lost_OD @ scaled_DD) * lost_OD).sum()
        torch.testing.assert_close(error, singular[rank:].square().sum(), rtol=1e-2, atol=0)


@pytest.mark.parametrize(
    "diagonal, usual",
    [
        ([2.0] * 10 + [4.0] * 10, 3.0),
        ([0.0] * 10 + [4.0] * 10, 2.0),
        ([1.0] * 19 + [1e8], 5.95),  # as if it were a hundred
        ([0.0] * 19 + [1.0], 1e-6 / 20),
    ],
)
def test_the_usual_diagonal_is_the_mean_but_for_few_that_are_far_larger(diagonal, usual):
    c_FF = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    assert float(usual_diagonal(c_FF)) == pytest.approx(usual)


def test_prefixes_of_factors_have_the_mean_output_and_all_of_them_the_weight():
    w_OD, b_O, mean_D = (torch.randn(*s, dtype=torch.float64) for s in ((6, 7), (6,), (7,)))
    factors = nested_factors(w_OD, spd(7), spd(6), 8)
    b_out = prefix_biases(w_OD, b_O, mean_D, factors, 4)
    for k in range(5):
        output = factors.w_out[:, : 2 * k] @ (factors.w_in[: 2 * k] @ mean_D) + b_out[k]
        torch.testing.assert_close(output, w_OD @ mean_D + b_O)
    # rank 8 holds more than the matrix has: what is too much is zero
    torch.testing.assert_close(factors.w_out @ factors.w_in, w_OD)
    assert not factors.w_in[6:].any()


@pytest.mark.parametrize("rank", [0, 1, 5])
def test_solve_and_square_factors_bear_singular_matrices(rank):
    x = torch.randn(6, rank, dtype=torch.float64)
    a = x @ x.T
    b = a @ torch.randn(6, 2, dtype=torch.float64)
    torch.testing.assert_close(a @ solve(a, b), b, rtol=1e-3, atol=1e-6)
    root, inverse = square_factors(a, 1e-5 * mean_diagonal(a))
    torch.testing.assert_close(root @ root.T, a, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(root @ inverse, torch.eye(6, dtype=torch.float64), rtol=1e-4, atol=1e-4)


def test_solve_is_exact_where_the_matrix_is_not_singular():
    a, b = spd(6, decay=3.0), torch.randn(6, 2, dtype=torch.float64)
    torch.testing.assert_close(solve(a, b), torch.linalg.solve(a, b), rtol=1e-8, atol=1e-10)


def test_picks_are_never_repeated_whatever_the_block():
    for features, count in itertools.product((3, 17, 50), (1, 3)):
        h_TF = activations(features=features)
        c, w = torch.cov(h_TF.T, correction=0), torch.randn(OUT, features, dtype=torch.float64)
        assert sorted(greedy_order(c, w, min(features, 16 * count)).tolist()) == list(range(features))


def test_tokens_that_are_wrong_alike_do_damage_together():
    """A learner that misses the mean of an example, under gradients that are the same, or not, for all its tokens."""
    examples, tokens, width = 40, 12, 6
    torch.manual_seed(0)
    example_T = torch.arange(examples).repeat_interleave(tokens)
    x_TD = torch.randn(examples, width)[example_T]
    zero, eye = torch.zeros(width), torch.eye(width)
    dense = DenseWeights(first=((eye, zero),), last=None, act="identity")
    half = torch.diag(torch.tensor([1.0, 1, 1, 0, 0, 0]))
    weights = Weights(
        w_in=half[None], b_in=None, w_up=None, b_up=None, w_out=eye[:, None], b_out=torch.zeros(2, width),
        w_top=None, act="identity", form="linear",
    )  # fmt: skip
    same_TO, own_TO = torch.randn(examples, width)[example_T], torch.randn(examples * tokens, width)
    found = []
    for g_TO in (same_TO, own_TO):
        listens_T = g_TO.square().sum(1)
        root_OR = torch.eye(width, dtype=torch.float64) / width**0.5
        whole = Together(
            x_TD=x_TD, g_TPR=g_TO[:, None] * width**0.5, listens_T=listens_T, example_T=example_T,
            at_T=torch.arange(len(x_TD)),
        )  # fmt: skip
        judged = Judged(dense=dense, root=root_OR, x_TD=x_TD, listens_T=listens_T, whole=whole)
        # what is expected of an example is what its tokens do together
        d_TO = x_TD @ half - x_TD
        moved = torch.zeros(examples).index_add_(0, example_T, (d_TO * g_TO).sum(1)).square().mean()
        damage_TC = token_errors(weights, judged, 1) * listens_T[:, None].float()
        expected = tokens * float(damage_TC.mean())
        assert expected == pytest.approx(float(moved), rel=0.15)
        found.append(float(damage_TC.mean() / (d_TO.square().mean(1) * listens_T).mean()))
        # the same with examples that are no part of the sample
        apart = replace(judged, whole=replace(whole, x_TD=x_TD.clone()))
        torch.testing.assert_close(token_errors(weights, apart, 1) * listens_T[:, None].float(), damage_TC)
    assert found[0] > 8 and found[1] < 2


def test_a_shared_layer_is_nearly_exact_at_the_top_where_small_k_err_by_far_more():
    """Two loud neurons in learners 1 and 2, of which k = 1 can explain nothing: k = N must not pay for that."""
    torch.manual_seed(1)
    h_TF = activations()
    h_TF[:, 2 * H :] *= 30
    hidden = seen(h_TF)
    errors = prefix_errors(
        fit_second_layer(hidden, torch.arange(F), "shared", learners=N, width=H), hidden, h_TF, torch.arange(F)
    )
    assert errors[N] < 2e-3 * errors[1]
