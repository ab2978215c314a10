"""Gates that predict damage: what they learn, and what budgets they serve."""

import pytest
import torch

from acm_compiler.acm import Gate
from acm_compiler.acm.reference import choose_k, utilities
from acm_compiler.calibration.gates import fit_gates, gamma_loss

D, C, T = 6, 4, 6000


def known_damage(x_TD):
    """The true mean damage of each choice: falls with k, and differs over tokens by one direction of x, [T, C]."""
    need_T = (1.5 * (x_TD[:, 0] - x_TD[:, 1]) / 2**0.5).exp()
    return need_T[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.01]) * 1e-5


@pytest.fixture(scope="module")
def fitted():
    torch.manual_seed(0)
    x = torch.randn(T, D)
    mean = known_damage(x)
    # single tokens are noisy: exponential around their mean
    noisy = mean * torch.distributions.Exponential(1.0).sample((T, 1))
    offset, scale = torch.tensor([100.0, -3, 0, 0, 7, 0]), torch.tensor([5.0, 0.01, 1, 1, 1, 1])
    gate = Gate(D, 16, C)
    fit_gates([gate], x * scale + offset, [noisy], steps=250, seed=0)
    fresh = torch.randn(2000, D)
    with torch.no_grad():
        return gate, gate(fresh * scale + offset), known_damage(fresh)


def test_the_gate_recovers_a_known_damage_through_noise(fitted):
    gate, score, truth = fitted
    assert gate.rule == "damage"
    error = score - truth.log()
    assert error.abs().mean() < 0.2
    for c in range(C):
        assert torch.corrcoef(torch.stack([score[:, c], truth[:, c].log()]))[0, 1] > 0.97


def test_one_gate_serves_every_budget(fitted):
    _, score, truth = fitted
    cost = torch.arange(C, dtype=torch.float64)
    spent, damage = [], []
    for knob in torch.linspace(-20, -4, 12):
        k = choose_k(utilities(score, knob, cost, "damage"), torch.tensor(0), torch.tensor(C - 1), 0).long()
        spent.append(float(k.double().mean()))
        damage.append(float(truth.gather(1, k[:, None]).mean()))
    assert spent == sorted(spent, reverse=True) and damage == sorted(damage)
    assert spent[0] > 0.9 * (C - 1) and spent[-1] < 0.1 * (C - 1)
    for k in (1, 2):
        # the gates' choices at a budget beat the same k everywhere
        at = min(range(12), key=lambda i: abs(spent[i] - k) + (spent[i] > k))
        assert spent[at] <= k and damage[at] < float(truth[:, k].mean())


def test_a_gate_is_the_same_every_time():
    x, damage = torch.randn(500, D), torch.rand(500, C)
    gates = [Gate(D, 8, C) for _ in range(2)]
    for gate in gates:
        fit_gates([gate], x, [damage], steps=5, seed=7)
    for a, b in zip(*(gate.parameters() for gate in gates), strict=True):
        assert torch.equal(a, b)


def test_gates_of_the_same_input_are_what_each_would_be_alone():
    x, damages = torch.randn(500, D), [torch.rand(500, C), torch.rand(500, C).square()]
    together, alone = ([Gate(D, 8, C) for _ in damages] for _ in range(2))
    fit_gates(together, x, damages, steps=20, seed=7)
    for gate, damage in zip(alone, damages, strict=True):
        fit_gates([gate], x, [damage], steps=20, seed=7)
    for one, other in zip(together, alone, strict=True):
        for a, b in zip(one.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_small_sample_is_learned_in_fewer_steps():
    x, damage = torch.randn(500, D), torch.rand(500, C)
    gates = [Gate(D, 8, C) for _ in range(3)]
    for gate, steps in zip(gates, (50, 300, 20), strict=True):
        fit_gates([gate], x, [damage], steps=steps, seed=7)
    assert torch.equal(gates[0].inner.weight, gates[1].inner.weight)
    assert not torch.equal(gates[0].inner.weight, gates[2].inner.weight)


def test_choices_without_damage_and_inputs_without_spread_are_borne():
    x = torch.randn(500, D)
    x[:, 2] = 4.0
    damage = torch.rand(500, C) * 1e-12
    damage[:, -1] = 0
    gate = Gate(D, 8, C)
    fit_gates([gate], x, [damage], steps=50, seed=0)
    with torch.no_grad():
        score = gate(x)
    assert score.isfinite().all() and (score[:, -1] < score[:, 0] - 5).all()
    fit_gates([gate], x, [torch.zeros(500, C)], steps=5, seed=0)
    with torch.no_grad():
        assert gate(x).isfinite().all()


def test_an_input_that_never_varies_gives_one_score_to_all():
    x = torch.randn(D).expand(500, D) + 1e-7 * torch.randn(500, D)
    gate = Gate(D, 8, C)
    fit_gates([gate], x, [torch.rand(500, C)], steps=50, seed=0)
    with torch.no_grad():
        assert gate(x).std(0).max() < 0.1


def test_a_token_that_does_far_more_damage_than_expected_is_still_learned_from():
    # one token of 2,000 does nearly all of the damage, as the first of a long text may
    damage, score = torch.tensor([[2000.0]]), torch.tensor([[-20.0]], requires_grad=True)
    (slope,) = torch.autograd.grad(gamma_loss(score, damage), score)
    assert slope < -100
    rare = torch.arange(4000) % 2000 == 0
    x = torch.randn(4000, D)
    x[rare, 0] += 20
    gate = Gate(D, 8, C)
    fit_gates([gate], x, [torch.where(rare, 1.0, 1e-6)[:, None].expand(-1, C)], steps=300, seed=0)
    with torch.no_grad():
        score = gate(x)
    assert score[rare].min() > -5 > score[~rare].max()


@pytest.mark.parametrize("scale", [1e-6, 0.0])
def test_a_gate_of_float16_holds_what_inputs_that_hardly_vary_ask_of_it(scale):
    x = (scale * torch.randn(500, D)).half()
    gate = Gate(D, 8, C).half()
    fit_gates([gate], x.float(), [torch.rand(500, C)], steps=50, seed=0)
    with torch.no_grad():
        assert gate(x).isfinite().all()


def test_the_gamma_loss_is_least_at_the_mean():
    damage = torch.rand(4000, 1).square()
    score = damage.mean().log().expand(4000, 1)
    least = gamma_loss(score, damage)
    assert least < gamma_loss(score + 0.2, damage) and least < gamma_loss(score - 0.2, damage)
