"""Learners over sorted tokens against the reference: outputs, gradients, counted work, and who takes them."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from acm_compiler.acm import ops
from acm_compiler.acm.arguments import Weights
from acm_compiler.acm.gradients import sorted_tokens
from acm_compiler.acm.gradients.sorted_tokens import sorted_output, sorted_relaxed
from acm_compiler.acm.ops import cast_weights
from acm_compiler.acm.reference import relaxed_output, run_learners
from acm_compiler.errors import UsageError
from tests.acm.test_reference import OUT, D, N, weights_of

KINDS = ["mlp", "gated", "linear"]


@pytest.fixture
def always(monkeypatch):
    """Calls of any size are sorted."""
    monkeypatch.setattr(sorted_tokens, "_LEAST", 0)


def leaves_of(weights: Weights) -> list[torch.Tensor]:
    return [tensor.requires_grad_() for tensor in weights.tensors if tensor is not None]


def ks(tokens: int):
    """Mixed k, and those of no and of all learners alone."""
    return torch.randint(0, N + 1, (tokens,)), torch.zeros(tokens, dtype=torch.int32), torch.full((tokens,), N)


def choices(tokens: int, k_min: int):
    """Scores, and a choice that is one-hot in value and soft in gradient."""
    score = torch.randn(tokens, N + 1 - k_min, dtype=torch.float64, requires_grad=True)
    soft = score.softmax(-1)
    return score, F.one_hot(score.argmax(-1), score.shape[1]) - soft.detach() + soft


def require_same(ours, expected, inputs):
    """The same values and gradients, where nothing reaches an input zeros."""
    torch.testing.assert_close(ours, expected)
    dy = torch.randn_like(expected)
    found = torch.autograd.grad(ours, inputs, dy, retain_graph=True)
    exact = torch.autograd.grad(expected, inputs, dy, allow_unused=True)
    for mine, other, of in zip(found, exact, inputs, strict=True):
        torch.testing.assert_close(mine, torch.zeros_like(of) if other is None else other)


@pytest.mark.parametrize("tokens", [1, 11, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_the_references(kind, tokens):
    weights = weights_of(kind)
    x = torch.randn(tokens, D, dtype=torch.float64, requires_grad=True)
    inputs = [x, *leaves_of(weights)]
    for k in ks(tokens):
        require_same(sorted_output(x, k, weights), run_learners(x, k, weights), inputs)


@pytest.mark.parametrize("k_min", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_relaxed_choice_has_its_exact_gradient(kind, k_min):
    weights = weights_of(kind)
    x = torch.randn(23, D, dtype=torch.float64, requires_grad=True)
    score, nu = choices(23, k_min)
    inputs = [x, score, *leaves_of(weights)]
    require_same(sorted_relaxed(x, nu, weights, k_min), relaxed_output(x, nu, weights, k_min), inputs)


def test_no_tokens_have_gradients_of_zero():
    weights, x = weights_of("gated"), torch.randn(0, D, dtype=torch.float64, requires_grad=True)
    leaves = leaves_of(weights)
    y = sorted_output(x, torch.zeros(0, dtype=torch.int32), weights)
    assert y.shape == (0, OUT)
    grads = torch.autograd.grad(y.sum(), [x, *leaves])
    assert [g.shape for g in grads] == [t.shape for t in (x, *leaves)] and not any(g.any() for g in grads)


def test_gradients_in_bf16_stay_near_those_in_float64():
    weights, (k, *_) = weights_of("mlp"), ks(64)
    x, dy = torch.randn(64, D, dtype=torch.float64), torch.randn(64, OUT, dtype=torch.float64)
    found = {}
    for dtype in (torch.float64, torch.bfloat16):
        own = cast_weights(cast_weights(weights, torch.bfloat16), dtype)
        inputs = [x.bfloat16().to(dtype).requires_grad_(), *leaves_of(own)]
        y = sorted_output(inputs[0], k, own)
        found[dtype] = [g.double() for g in torch.autograd.grad(y, inputs, dy.bfloat16().to(dtype))]
    for near, exact in zip(*found.values(), strict=True):
        assert (near - exact).norm() <= 2e-2 * exact.norm()


def test_a_token_of_nan_reaches_the_learners_that_it_runs_alone():
    weights = weights_of("mlp")
    x = torch.randn(9, D, dtype=torch.float64, requires_grad=True)
    k = torch.tensor([3, 1, 0, 2, 3, 1, 2, 0, 3])
    with torch.no_grad():
        x[1] = torch.nan
    leaves = leaves_of(weights)
    dx, *of_weights = torch.autograd.grad(sorted_output(x, k, weights).square().sum(), [x, *leaves])
    assert dx[1].isnan().all() and dx[torch.arange(9) != 1].isfinite().all()
    w_in, w_out = of_weights[0], of_weights[2]
    assert w_in[0].isnan().all() and w_in[1:].isfinite().all() and w_out[:, 1:].isfinite().all()


@pytest.mark.parametrize("relaxed", [False, True])
def test_counted_work_is_what_the_budget_leaves(relaxed):
    """Products of 6 k where the dense layers take 6 N, or of 2 N + 4 k with the gradient of the choice."""
    weights, tokens = weights_of("mlp"), 40
    x = torch.randn(tokens, D, dtype=torch.float64, requires_grad=True)
    _, nu = choices(tokens, 0)
    k = nu.argmax(-1)
    leaves_of(weights)
    with FlopCounterMode(display=False) as counter:
        (sorted_relaxed(x, nu, weights, 0) if relaxed else sorted_output(x, k, weights)).sum().backward()
    first, second = D * weights.w_in.shape[1], OUT * weights.w_in.shape[1]
    run, full = int(k.sum()), N * tokens
    # both layers: outputs, then what reaches their inputs and their weights; of a choice, what reaches it by b_out, too
    macs = (first + second) * (full + 2 * run) if relaxed else 3 * (first + second) * run
    assert counter.get_total_flops() == 2 * (macs + relaxed * tokens * OUT * (N + 1))


def test_gradients_of_gradients_are_the_references():
    weights = weights_of("mlp")
    x, (k, *_) = torch.randn(7, D, dtype=torch.float64, requires_grad=True), ks(7)
    found = []
    for function in (sorted_output, run_learners):
        (dx,) = torch.autograd.grad(function(x, k, weights).square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(dx.square().sum(), x)[0])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("k", [-1, N + 1])
def test_a_k_outside_its_range_is_refused(k):
    with pytest.raises(UsageError, match=rf"k in \[0, {N}\]"):
        sorted_output(torch.randn(2, D, dtype=torch.float64), torch.tensor([0, k]), weights_of("mlp"))


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("keeps", ["graph", "checkpoint", "hooks"])
def test_activations_may_be_kept_in_any_way_and_used_twice(keeps):
    weights, (k, *_) = weights_of("gated"), ks(11)
    x = torch.randn(11, D, dtype=torch.float64, requires_grad=True)
    inputs = [x, *leaves_of(weights)]
    expected = torch.autograd.grad(run_learners(x, k, weights).square().sum(), inputs)
    if keeps == "checkpoint":
        y = checkpoint(lambda x: ops.learners(x, k, weights), x, use_reentrant=False)
    elif keeps == "hooks":
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
            y = ops.learners(x, k, weights)
    else:
        y = ops.learners(x, k, weights)
    for _ in range(2 if keeps == "graph" else 1):
        torch.testing.assert_close(torch.autograd.grad(y.square().sum(), inputs, retain_graph=True), expected)


@pytest.mark.usefixtures("always")
def test_large_calls_take_them_and_transforms_do_not(monkeypatch):
    weights, (k, *_) = weights_of("mlp"), ks(11)
    x = torch.randn(11, D, dtype=torch.float64)
    leaves_of(weights)
    assert "_Learners" in type(ops.learners(x, k, weights).grad_fn).__name__
    exact = torch.func.grad(lambda x: run_learners(x, k, weights).square().sum())(x)
    torch.testing.assert_close(torch.func.grad(lambda x: ops.learners(x, k, weights).square().sum())(x), exact)
    monkeypatch.setattr(sorted_tokens, "_LEAST", 1 << 20)
    assert "_Learners" not in type(ops.learners(x, k, weights).grad_fn).__name__


@pytest.mark.usefixtures("always")
def test_under_autocast_learners_run_in_its_type_and_choices_keep_theirs():
    weights = cast_weights(weights_of("mlp"), torch.float32)
    leaves, x = leaves_of(weights), torch.randn(11, D)
    score, nu = choices(11, 0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = ops.relaxed(x, nu.float(), weights, 0)
    assert y.dtype == torch.bfloat16
    grads = torch.autograd.grad(y.float().square().sum(), [score, *leaves])
    assert [g.dtype for g in grads] == [torch.float64] + [torch.float32] * len(leaves)
