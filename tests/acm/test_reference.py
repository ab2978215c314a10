"""The reference against the plain formulas of docs/semantics.md, in float64."""

from itertools import combinations
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from acm_compiler.acm.activations import resolve
from acm_compiler.acm.arguments import Weights
from acm_compiler.acm.reference import (
    GateRule,
    all_outputs,
    choose_k,
    learner_mass,
    prefix_output,
    priced_errors,
    relaxed_output,
    run_learners,
    utilities,
)

D, OUT, N, H = 12, 18, 3, 4
HEADS = 2
FORMS = ["mlp", "gated", "linear", "per_k", "top", "linear_top", "rows", "cols"]


def weights_of(kind: str, dtype=torch.float64) -> Weights:
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64).to(dtype)  # noqa: E731
    form = {"gated": "gated", "linear": "linear", "linear_top": "linear"}.get(kind, "mlp")
    gated, linear = form == "gated", form == "linear"
    if kind in ("rows", "cols"):
        shape = (N, HEADS, OUT // (HEADS * N), D) if kind == "rows" else (N, OUT, HEADS, D // (HEADS * N))
        absent = dict.fromkeys(("b_in", "w_up", "b_up", "w_out", "w_top"))
        return Weights(w_in=draw(*shape), b_out=draw(N + 1, OUT), act="identity", form=kind, **absent)
    return Weights(
        w_in=draw(N, H, D),
        b_in=None if linear else draw(N, H),
        w_up=draw(N, H, D) if gated else None,
        b_up=draw(N, H) if gated else None,
        w_out=draw(N, OUT, N, H) if kind == "per_k" else draw(OUT, N, H),
        b_out=draw(N + 1, OUT),
        w_top=draw(OUT, N * H) if kind == "top" else draw(OUT, D) if kind == "linear_top" else None,
        act="identity" if linear else "gelu",
        form=form,
    )


def formula(z, weights: Weights, k: int):
    """y_k of one token, learner by learner, as the equations are printed."""
    y = weights.b_out[k].clone()
    if k == N and weights.w_top is not None and weights.form == "linear":
        return y + weights.w_top @ z
    for n in range(k):
        if weights.form == "rows":
            y.view(HEADS, N, -1)[:, n] += weights.w_in[n] @ z
            continue
        if weights.form == "cols":
            y += torch.einsum("ogh,gh->o", weights.w_in[n], z.view(HEADS, N, -1)[:, n])
            continue
        a = weights.w_in[n] @ z
        if weights.b_in is not None:
            a = a + weights.b_in[n]
        h = resolve(weights.act)(a)
        if weights.w_up is not None:
            h = h * (weights.w_up[n] @ z + weights.b_up[n])
        w_out = weights.w_out[k - 1] if weights.w_out.dim() == 4 else weights.w_out
        w_n = w_out[:, n] if not (k == N and weights.w_top is not None) else weights.w_top[:, n * H : (n + 1) * H]
        y = y + w_n @ h
    return y


@pytest.mark.parametrize("kind", FORMS)
def test_every_prefix_equals_the_printed_equations(kind):
    weights, x = weights_of(kind), torch.randn(7, D, dtype=torch.float64)
    for k in range(N + 1):
        expected = torch.stack([formula(z, weights, k) for z in x])
        torch.testing.assert_close(prefix_output(x, weights, k), expected)
    torch.testing.assert_close(
        all_outputs(x, weights, 1), torch.stack([prefix_output(x, weights, k) for k in range(1, N + 1)])
    )


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("tokens", [0, 1, 63])
def test_mixed_k_runs_each_token_by_its_own_prefix(kind, tokens):
    weights, x = weights_of(kind), torch.randn(tokens, D, dtype=torch.float64)
    k = torch.randint(0, N + 1, (tokens,))
    expected = (
        torch.stack([formula(z, weights, int(m)) for z, m in zip(x, k, strict=True)]) if tokens else x.new_empty(0, OUT)
    )
    torch.testing.assert_close(run_learners(x, k, weights), expected)


def test_k_zero_adds_only_b_out_zero():
    weights, x = weights_of("mlp"), torch.randn(4, D, dtype=torch.float64)
    torch.testing.assert_close(
        run_learners(x, torch.zeros(4, dtype=torch.int32), weights), weights.b_out[:1].expand(4, OUT)
    )


def test_no_learner_is_run_for_a_token_that_did_not_choose_it():
    weights, x = weights_of("mlp"), torch.randn(9, D, dtype=torch.float64)
    weights.w_in[2] = torch.nan
    k = torch.tensor([0, 1, 2] * 3)
    assert run_learners(x, k, weights).isfinite().all()
    assert not run_learners(x, k + 1, weights).isfinite().all()


@pytest.mark.parametrize("chosen", [[0, 0], [N, N], []], ids=["none", "all", "no tokens"])
@pytest.mark.parametrize("kind", FORMS)
def test_weights_that_no_token_runs_have_gradients_of_zeros(kind, chosen):
    """DistributedDataParallel waits for them, and optimizers treat no gradient as another thing than zeros."""
    weights, k = weights_of(kind), torch.tensor(chosen, dtype=torch.int32)
    leaves = [tensor.requires_grad_() for tensor in weights.tensors if tensor is not None]
    x = torch.randn(len(chosen), D, dtype=torch.float64)
    y = run_learners(x, k, weights)
    assert all(grad is not None for grad in torch.autograd.grad(y.sum(), leaves, allow_unused=True))
    with torch.no_grad():
        torch.testing.assert_close(y, run_learners(x, k, weights))


@pytest.mark.parametrize("kind", FORMS)
def test_the_straight_through_gradient_equals_the_full_formula(kind):
    """d loss / d nu_c = <dy, y_k(c)>, b_out included, and the forward is the hard choice's."""
    weights, x = weights_of(kind), torch.randn(6, D, dtype=torch.float64)
    nu = torch.randn(6, N + 1, dtype=torch.float64).softmax(-1).requires_grad_()
    hard = torch.nn.functional.one_hot(nu.argmax(-1), N + 1).double()
    y = relaxed_output(x, hard + nu - nu.detach(), weights, 0)
    torch.testing.assert_close(y, run_learners(x, nu.argmax(-1), weights))
    dy = torch.randn_like(y)
    y.backward(dy)
    each = torch.stack([torch.stack([formula(z, weights, k) for z in x]) for k in range(N + 1)])
    torch.testing.assert_close(nu.grad, torch.einsum("to,kto->tk", dy, each))
    assert nu.grad.abs().min() > 0


def test_learner_mass_sums_the_columns_above_n():
    nu = torch.tensor([[0.1, 0.2, 0.3, 0.4]])
    torch.testing.assert_close(learner_mass(nu, 3, 0), torch.tensor([[0.9, 0.7, 0.4]]))
    torch.testing.assert_close(learner_mass(nu[:, 1:], 3, 1), torch.tensor([[0.9, 0.7, 0.4]]))


def test_damage_choices_minimise_damage_plus_price():
    """The utility form chooses as argmin_k exp(o_k) + lambda c_k does (docs/semantics.md, Gate and knob)."""
    o, costs = torch.randn(500, N + 1, dtype=torch.float64), torch.arange(N + 1, dtype=torch.float64) * 0.7
    for lam in (0.01, 0.3, 2.0):
        expected = (o.exp() + lam * costs).argmin(-1)
        u = utilities(o, torch.tensor(lam).double().log(), costs, "damage")
        k = choose_k(u, torch.tensor(0), torch.tensor(N), 0)
        assert torch.equal(k.long(), expected)


def test_the_paper_gate_pays_lambda_per_unit_of_cost():
    logits = torch.tensor([[0.0, 1.0, 1.5]])
    costs = torch.tensor([0.0, 1.0, 2.0])
    for knob, expected in ((0.0, 2), (0.6, 1), (1.1, 0), (-5.0, 2)):
        u = utilities(logits, torch.tensor(knob), costs, "logits")
        assert int(choose_k(u, torch.tensor(0), torch.tensor(2), 0)) == expected


def test_ties_go_to_the_smaller_k_and_bounds_hold():
    u = torch.zeros(4, 4)
    lo, hi = torch.tensor([0, 1, 2, 3]), torch.tensor([3, 3, 2, 3])
    assert choose_k(u, lo, hi, 0).tolist() == [0, 1, 2, 3]
    rising = torch.arange(4.0).expand(4, 4)
    assert choose_k(rising, torch.zeros(4), torch.tensor([0, 1, 2, 3]), 0).tolist() == [0, 1, 2, 3]


@given(order=st.permutations(range(11)), chosen=st.sets(st.integers(0, 10)), form=st.sampled_from(FORMS))
@settings(max_examples=40, deadline=None)
def test_a_token_never_depends_on_its_neighbours(order, chosen, form):
    """Shuffles and subsets of the tokens, the empty one included, change no token's output."""
    torch.manual_seed(1)
    weights, x = weights_of(form), torch.randn(11, D, dtype=torch.float64)
    k = torch.randint(0, N + 1, (11,))
    y = run_learners(x, k, weights)
    torch.testing.assert_close(run_learners(x[order], k[order], weights), y[order])
    some = sorted(chosen)
    torch.testing.assert_close(run_learners(x[some], k[some], weights), y[some])


def test_a_nan_among_the_allowed_utilities_runs_as_many_learners_as_allowed():
    u = torch.tensor([[0.0, 2.0, 1.0, torch.nan], [torch.nan] * 4, [-torch.inf] * 4, [torch.nan, 0.0, 0.0, 0.0]])
    assert choose_k(u, torch.tensor(1), torch.tensor(2), 0).tolist() == [1, 2, 1, 1]
    assert choose_k(u, torch.tensor([0, 0, 2, 0]), torch.tensor([3, 1, 3, 9]), 0).tolist() == [3, 1, 2, 3]


def test_every_rule_has_an_equation_of_its_own():
    score, cost = torch.randn(5, 3), torch.tensor([0.5, 1.0, 1.5])
    found = [utilities(score, torch.tensor(0.3), cost, rule) for rule in get_args(GateRule)]
    assert not any(torch.allclose(one, other) for one, other in combinations(found, 2))
    errors = [priced_errors(score, rule)[0] for rule in get_args(GateRule)]
    assert not any(torch.allclose(one, other) for one, other in combinations(errors, 2))
