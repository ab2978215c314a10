"""Training of learners on inputs of their own site: it helps others of the same kind, or it is not kept."""

from dataclasses import replace

import pytest
import torch

from acm_compiler.acm.arguments import Weights
from acm_compiler.calibration.calibrate import calibrate, calibrate_on
from acm_compiler.calibration.damage import Judged
from acm_compiler.calibration.examples import Options, masked
from acm_compiler.calibration.learners import local_training
from acm_compiler.calibration.learners.local_training import can_be_trained, mean_damages, train_locally
from acm_compiler.calibration.learners.mlp_learners import Hidden, fit_second_layer
from acm_compiler.errors import UsageError
from acm_compiler.passes.rewrite.conversion import sites
from acm_compiler.passes.rewrite.dense_region import DenseWeights
from acm_compiler.runtime.control import set_k
from tests.helpers.calibration_tiny import make_tiny, texts

pytestmark = pytest.mark.usefixtures("rough_budgets")

N, H, D, OUT = 3, 8, 10, 7


def site(neurons=N * H, gated=True, bias=True, kind="shared", tokens=2000):
    """Learners in closed form of a random MLP, what they are judged by, the inputs it saw, and others."""
    torch.manual_seed(0)
    x_TD = torch.randn(tokens + 500, D) @ torch.randn(D, D)
    branches = [(torch.randn(neurons, D) / 3, torch.randn(neurons) if bias else None) for _ in range(1 + gated)]
    last = (torch.randn(OUT, neurons), torch.randn(OUT) if bias else None)
    dense = DenseWeights(first=tuple(branches), last=last, act="silu")
    h_TF = dense.hidden(x_TD[:tokens]).double()
    c_FF, b_O = torch.cov(h_TF.T, correction=0), torch.zeros(OUT) if last[1] is None else last[1]
    hidden = Hidden(tokens=tokens, c_FF=c_FF, mean_F=h_TF.mean(0), w_OF=last[0].double(), b_O=b_O.double())
    fit = fit_second_layer(hidden, torch.arange(neurons), kind, learners=N, width=H)
    missing = max(0, N * H - neurons)
    first = [torch.nn.functional.pad(w, (0, 0, 0, missing))[: N * H].view(N, H, D) for w, _ in branches]
    biases = [torch.nn.functional.pad(b, (0, missing))[: N * H].view(N, H) if bias else None for _, b in branches]
    ups = (first[1], biases[1]) if gated else (None, None)
    top = None if fit.w_top is None else fit.w_top.float()
    tensors = (first[0], biases[0], *ups, fit.w_out.float(), fit.b_out.float(), top)
    weights = Weights(*tensors, act="silu", form="gated" if gated else "mlp")
    root = torch.randn(OUT, 4, dtype=torch.float64)
    judged = Judged(dense=dense, root=root, x_TD=x_TD, listens_T=torch.ones(len(x_TD)))
    return weights, judged, x_TD[:tokens], x_TD[tokens:]


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("neurons", [N * H, N * H + 5, N * H - 3])
def test_inputs_that_were_not_shown_are_served_better(neurons, gated):
    weights, judged, x_TD, others_TD = site(neurons=neurons, gated=gated, bias=gated)
    trained = train_locally(weights, judged, x_TD, steps=150, seed=0)
    before, after = (mean_damages(w, judged, others_TD) for w in (weights, trained))
    assert (after / before)[1:N].max() < 0.95
    assert not torch.equal(trained.w_in, weights.w_in)


@pytest.mark.parametrize("kind", ["shared_top", "per_k"])
def test_where_the_top_is_the_dense_layer_first_layers_cannot_move(kind):
    weights, judged, *_ = site(kind=kind)
    assert not can_be_trained(weights, judged.dense)
    assert can_be_trained(site()[0], judged.dense)


def test_steps_that_make_damage_worse_are_not_taken(monkeypatch):
    monkeypatch.setattr(local_training, "_RATE", 3.0)
    weights, judged, x_TD, _ = site()
    assert train_locally(weights, judged, x_TD, steps=20, seed=0) is weights


@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_few_tokens_or_none_leave_learners_that_are_finite(tokens):
    weights, judged, x_TD, others_TD = site()
    trained = train_locally(weights, judged, x_TD[:tokens], steps=5, seed=0)
    assert mean_damages(trained, judged, others_TD).isfinite().all()


def test_no_steps_and_a_site_without_damage_change_nothing():
    weights, judged, x_TD, _ = site()
    assert train_locally(weights, judged, x_TD, steps=0, seed=0) is weights
    nothing = replace(judged, root=torch.zeros(OUT, 4, dtype=torch.float64))
    assert train_locally(weights, nothing, x_TD, steps=5, seed=0) is weights


def test_the_same_seed_gives_the_same_learners_and_leaves_the_users_generator_alone():
    weights, judged, x_TD, _ = site()
    state = torch.get_rng_state()
    first, second = (train_locally(weights, judged, x_TD, steps=10, seed=4) for _ in range(2))
    assert torch.equal(first.w_in, second.w_in) and torch.equal(state, torch.get_rng_state())
    assert not first.w_in.requires_grad and not torch.equal(first.w_in, weights.w_in)


def calibrated(kind, local_steps):
    model = make_tiny(second_layer=kind)
    options = Options(tokens=300, gradient_tokens=100, gate_steps=2, local_steps=local_steps)
    calibrate_on(model, masked(texts(24, batch=8)), options=options)
    return model


def test_a_calibration_trains_first_layers_of_mlps_alone():
    plain, trained = calibrated("shared", 0), calibrated("shared", 60)
    moved = {
        name: not torch.equal(acm.learners.w_in, sites(trained)[name].learners.w_in)
        for name, acm in sites(plain).items()
    }
    assert moved == {"blocks.0.proj": False, "blocks.0.mlp": True, "blocks.0.glu": True}


def test_lossless_sites_stay_exact_at_the_top():
    trained, dense, batch = calibrated("shared_top", 20), make_tiny(), texts(1)[0]
    for name in ("blocks.0.mlp", "blocks.0.glu"):
        acm, x_TD = sites(trained)[name], torch.randn(9, 12)
        set_k(trained, acm.count)
        torch.testing.assert_close(acm(x_TD[None]), sites(dense)[name].dense(x_TD[None]), rtol=1e-5, atol=1e-6)
    assert trained(**batch).isfinite().all()


@pytest.mark.parametrize("steps", [-1, 1.5, True])
def test_a_number_of_steps_that_is_none_is_refused(steps):
    with pytest.raises(UsageError, match="local_steps must be a whole number, at least 0"):
        calibrate(make_tiny(), texts(2), local_steps=steps)
