"""Errors of every k by differences are those of the outputs, and keep their digits where outputs would not."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from acm_compiler.acm.arguments import Weights
from acm_compiler.acm.reference import all_outputs
from acm_compiler.calibration.damage import errors_of_k
from acm_compiler.calibration.linear_algebra import thin_factors
from acm_compiler.passes.rewrite.dense_region import DenseWeights

N, H, D, OUT, T = 3, 4, 12, 6, 50


def drawn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def linear(top=False, **_):
    dense = DenseWeights(first=((drawn(OUT, D), drawn(OUT)),), last=None, act="identity")
    weights = learners(
        w_in=drawn(N, H, D), w_out=drawn(OUT, N, H), w_top=dense.first[0][0] if top else None, form="linear"
    )
    return weights, dense


def mlp(neurons=N * H, gated=False, top=False, per_k=False, bias=True):
    """Learners that hold the first neurons of the dense MLP, and zeros where there are no more."""
    held = min(neurons, N * H)
    branches = [(drawn(neurons, D), drawn(neurons) if bias else None) for _ in range(1 + gated)]
    dense = DenseWeights(first=tuple(branches), last=(drawn(OUT, neurons), drawn(OUT) if bias else None), act="silu")

    def cut(values):
        return F.pad(values.T, (0, N * H - held)).T if len(values) < N * H else values[: N * H]

    ins = [(cut(w).unflatten(0, (N, H)), cut(b[:, None])[:, 0].view(N, H) if bias else None) for w, b in branches]
    up = ins[1] if gated else (None, None)
    present = (torch.arange(N * H) < held).view(N, H)
    w_out = drawn(N, OUT, N, H) * present if per_k else drawn(OUT, N, H) * present
    w_top = drawn(OUT, N * H) * present.flatten() if top else None
    form = "gated" if gated else "mlp"
    return learners(*ins[0], *up, w_out=w_out, w_top=w_top, act="silu", form=form), dense


def trained(**kind):
    """Learners whose first layers are no longer those of the dense MLP."""
    weights, dense = mlp(**kind)
    moved = {name: getattr(weights, name) * 1.1 for name in ("w_in", "w_up") if getattr(weights, name) is not None}
    return replace(weights, **moved), dense


def rows():
    """Two heads, N slices of 2 in each; b_out puts other values where coordinates are left out."""
    dense = DenseWeights(first=((drawn(2 * N * 2, D), drawn(2 * N * 2)),), last=None, act="identity")
    weight, bias = dense.first[0]
    b_out = bias.view(2, N, 2) + torch.where(
        torch.arange(N)[None, None, :, None] >= torch.arange(N + 1)[:, None, None, None], drawn(1, 2, N, 2), 0.0
    )
    return learners(w_in=weight.view(2, N, 2, D).movedim(1, 0), b_out=b_out.flatten(1), form="rows"), dense


def cols():
    dense = DenseWeights(first=((drawn(OUT, D), drawn(OUT)),), last=None, act="identity")
    weight, bias = dense.first[0]
    b_out = bias + torch.cat([drawn(N, OUT), torch.zeros(1, OUT, dtype=torch.float64)])
    return learners(w_in=weight.view(OUT, 2, N, 2).movedim(2, 0), b_out=b_out, form="cols"), dense


def learners(w_in, b_in=None, w_up=None, b_up=None, w_out=None, b_out=None, w_top=None, act="identity", *, form):
    if b_out is None:
        b_out = drawn(N + 1, OUT)
    return Weights(
        w_in=w_in, b_in=b_in, w_up=w_up, b_up=b_up, w_out=w_out, b_out=b_out, w_top=w_top, act=act, form=form
    )


def dense_output(dense, x_TD):
    return F.linear(x_TD, *dense.first[0]) if dense.last is None else F.linear(dense.hidden(x_TD), *dense.last)


CASES = {
    "linear": linear,
    "linear with the dense weight on top": lambda: linear(top=True),
    "mlp": mlp,
    "mlp without biases": lambda: mlp(bias=False),
    "mlp with a top": lambda: mlp(top=True),
    "mlp with a layer for each k": lambda: mlp(per_k=True),
    "mlp with neurons dropped": lambda: mlp(neurons=N * H + 5),
    "gated mlp with neurons missing": lambda: mlp(neurons=N * H - 2, gated=True, top=True),
    "trained mlp with neurons dropped": lambda: trained(neurons=N * H + 5),
    "trained gated mlp with neurons missing": lambda: trained(neurons=N * H - 2, gated=True),
    "trained mlp with a layer for each k": lambda: trained(per_k=True),
    "slices of the output": rows,
    "slices of the input": cols,
}


@pytest.mark.parametrize("k_min", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_errors_are_the_differences_of_the_outputs(case, k_min):
    weights, dense = CASES[case]()
    x_TD = drawn(T, D)
    root_OR = drawn(weights.b_out.shape[1], 4)
    wanted_CTO = all_outputs(x_TD, weights, k_min) - dense_output(dense, x_TD)
    found_CTR = errors_of_k(weights, dense, root_OR)(x_TD, k_min)
    torch.testing.assert_close(found_CTR, wanted_CTO @ root_OR)


def test_small_errors_keep_their_digits_in_fp32():
    """Learners off by 1e-6 of the outputs: their difference in fp32 is rounding, here it is right to four digits."""
    weights, dense = mlp()
    weights = learners(
        weights.w_in, weights.b_in, w_out=dense.last[0].view(OUT, N, H) * (1 + 1e-6 * drawn(OUT, N, H)),
        b_out=dense.last[1] + torch.cat([drawn(N, OUT), torch.zeros(1, OUT, dtype=torch.float64)]),
        act="silu", form="mlp",
    )  # fmt: skip
    x_TD, root_OR = drawn(T, D), torch.eye(OUT, dtype=torch.float64)
    single = Weights(*(None if t is None else t.float() for t in weights.tensors), act="silu", form="mlp")
    first, last = [(w.float(), b.float()) for w, b in dense.first], tuple(t.float() for t in dense.last)
    dense = DenseWeights(first=tuple(first), last=last, act="silu")
    found_TO = errors_of_k(single, dense, root_OR)(x_TD.float(), N)[-1].double()
    exact = Weights(*(None if t is None else t.double() for t in single.tensors), act="silu", form="mlp")
    exact_dense = DenseWeights(
        first=tuple((w.double(), b.double()) for w, b in first), last=tuple(t.double() for t in last), act="silu"
    )
    truth_TO = all_outputs(x_TD.float().double(), exact, N)[-1] - dense_output(exact_dense, x_TD.float().double())
    plain_TO = all_outputs(x_TD.float(), single, N)[-1] - dense_output(dense, x_TD.float())
    assert float((found_TO - truth_TO).norm()) < 1e-4 * float(truth_TO.norm())
    assert float((plain_TO - truth_TO).norm()) > 1e-2 * float(truth_TO.norm())


def test_thin_factors_leave_out_what_is_rounding():
    g_TO = drawn(3, OUT)
    metric = g_TO.T @ g_TO
    root, inverse = thin_factors((metric.float() + 1e-8 * torch.eye(OUT)).double())
    assert root.shape == (OUT, 3)
    torch.testing.assert_close(root @ root.T, metric, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(inverse @ root, torch.eye(3, dtype=torch.float64))
