"""`acm::relaxed` and the operators' backward: exact gradients, counted work, compiled and checkpointed steps."""

import pytest
import torch
import torch._dynamo
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from acm_compiler.acm import flops, ops
from acm_compiler.acm.gradients import operators, sorted_tokens
from acm_compiler.acm.gradients.operators import RELAXED
from acm_compiler.acm.ops import cast_weights
from acm_compiler.acm.reference import relaxed_output, run_learners
from tests.acm.test_reference import FORMS, OUT, D, weights_of
from tests.acm.test_sorted_tokens import KINDS, always, choices, ks, leaves_of  # noqa: F401  (a fixture)
from tests.helpers.build import planned_site, stack_of

pytestmark = pytest.mark.usefixtures("always")


def call_of(kind: str, tokens: int, k_min: int = 0):
    """Scores, the operator's tensors and its options."""
    weights = weights_of(kind)
    leaves = leaves_of(weights)
    x = torch.randn(tokens, D, dtype=torch.float64, requires_grad=True)
    score, nu = choices(tokens, k_min)
    return [score, x, *leaves], (x, nu, *weights.tensors), {"k_min": k_min, "form": weights.form, "act": weights.act}


@pytest.mark.parametrize("tokens", [0, 1, 23])
@pytest.mark.parametrize("kind", KINDS)
def test_a_relaxed_choice_has_its_exact_gradient(kind, tokens):
    inputs, tensors, options = call_of(kind, tokens, k_min=1)
    weights = sorted_tokens.Weights(*tensors[2:], act=options["act"], form=options["form"])
    ours, expected = RELAXED(*tensors, **options)[0], relaxed_output(*tensors[:2], weights, 1)
    torch.testing.assert_close(ours, expected)
    dy = torch.randn_like(expected)
    found = torch.autograd.grad(ours, inputs, dy, retain_graph=True)
    for mine, other in zip(found, torch.autograd.grad(expected, inputs, dy, allow_unused=True), strict=True):
        torch.testing.assert_close(mine, torch.zeros_like(mine) if other is None else other)


def test_a_relaxed_choice_in_bf16_stays_near_float64():
    inputs, tensors, options = call_of("mlp", 64)
    exact = sorted_tokens.Weights(*tensors[2:], act=options["act"], form=options["form"])
    near = cast_weights(exact, torch.bfloat16)
    dy = torch.randn(64, OUT, dtype=torch.float64)
    expected = torch.autograd.grad(relaxed_output(*tensors[:2], exact, 0), inputs, dy, retain_graph=True)
    y = RELAXED(tensors[0].bfloat16(), tensors[1].float(), *near.tensors, **options)[0]
    for mine, other in zip(torch.autograd.grad(y, inputs, dy.bfloat16()), expected, strict=True):
        assert (mine - other).norm() <= 3e-2 * other.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_finite_differences_agree_with_the_gradients_at_a_choice(kind):
    """y is linear in nu but for what the value of the choice leaves out: its first layer and weights at fixed k."""
    _, tensors, options = call_of(kind, 5)
    x, nu, *weights = (None if tensor is None else tensor.detach() for tensor in tensors)
    moved = [place for place, tensor in enumerate((x, *weights)) if tensor is not None]

    def output(*given):
        of_place = dict(zip(moved, given, strict=True))
        all_of = [of_place.get(place) for place in range(len(weights) + 1)]
        return RELAXED(all_of[0], nu, *all_of[1:], **options)[0]

    leaves = [(x, *weights)[place].requires_grad_() for place in moved]
    assert torch.autograd.gradcheck(output, leaves, fast_mode=True)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("kind", KINDS)
def test_the_operator_keeps_torchs_rules(kind):
    _, tensors, options = call_of(kind, 11)
    leaf = tensors[1].detach().requires_grad_()
    torch.library.opcheck(RELAXED, (tensors[0], leaf, *tensors[2:]), options)


def test_what_is_not_wanted_is_not_computed():
    _, tensors, options = call_of("mlp", 11)
    x, nu, *weights = (None if tensor is None else tensor.detach() for tensor in tensors)
    _, a, up = RELAXED(x, nu, *weights, **options)
    flops = []
    for wanted in (["nu"], ["x", "nu", "w_in", "w_out"]):
        with FlopCounterMode(display=False) as counter:
            found = operators.relaxed_backward(x.new_ones(11, OUT), a, up, x, nu, *weights, **options, wanted=wanted)
        assert len(found) == len(wanted)
        flops.append(counter.get_total_flops())
    assert flops[0] < 0.7 * flops[1]


@pytest.mark.parametrize("kind", KINDS)
def test_formulas_count_what_the_operators_do(kind):
    _, tensors, options = call_of(kind, 40)
    x, nu, *weights = (None if tensor is None else tensor.detach() for tensor in tensors)
    form = {"form": options["form"], "act": options["act"]}
    k, dy = sorted_tokens.chosen(nu, 0), x.new_ones(40, OUT)
    _, a, up = RELAXED(x, nu, *weights, **options)
    wanted = {"wanted": ["x", "nu", "w_in", "w_out"] + ["w_up"] * (kind == "gated")}
    pairs = [
        (flops.relaxed_flops, operators._relaxed, (x, nu, *weights), options),
        (flops.relaxed_backward_flops, operators.relaxed_backward, (dy, a, up, x, nu, *weights), options | wanted),
        (flops.learners_backward_flops, operators.backward, (dy, x, k, *weights), form),
    ]
    for formula, function, given, named in pairs:
        with FlopCounterMode(display=False) as counter:
            function(*given, **named)
        assert formula(*given, **named) == counter.get_total_flops() > 0, formula


def test_the_backward_of_frozen_choices_computes_the_first_layer_alone_again():
    """7 k products in all, where dense layers take 6 N."""
    weights, (k, *_) = weights_of("mlp"), ks(40)
    x, form = torch.randn(40, D, dtype=torch.float64), {"form": weights.form, "act": weights.act}
    w = weights.w_in.shape[1]
    with FlopCounterMode(display=False) as counter:
        operators.backward(torch.ones(40, OUT, dtype=torch.float64), x, k, *weights.tensors, **form)
    assert counter.get_total_flops() == 2 * int(k.sum()) * w * (3 * D + 2 * OUT)


@pytest.mark.parametrize("kind", ["mlp", "top"])
def test_a_mode_that_watches_changes_no_gradient(kind):
    """Modes hand operators on without autograd, as compiled autograd does in its first call."""
    weights, (k, *_) = weights_of(kind), ks(11)
    x, form = torch.randn(11, D, dtype=torch.float64), {"form": weights.form, "act": weights.act}
    given = (torch.ones(11, OUT, dtype=torch.float64), x, k, *weights.tensors)
    with FlopCounterMode(display=False):
        found = operators.LEARNERS_BACKWARD(*given, **form)
    torch.testing.assert_close(found, operators.LEARNERS_BACKWARD(*given, **form))


@pytest.mark.parametrize("kind", FORMS)
def test_no_tokens_have_gradients_of_zero(kind):
    weights = weights_of(kind)
    x, k, dy = torch.zeros(0, D, dtype=torch.float64), torch.zeros(0, dtype=torch.int32), torch.zeros(0, OUT).double()
    found = operators.backward(dy, x, k, *weights.tensors, form=weights.form, act=weights.act)
    given = [tensor for tensor in weights.tensors if tensor is not None]
    assert [grad.shape for grad in found] == [t.shape for t in (x, *given)] and not any(grad.any() for grad in found)


@pytest.mark.parametrize("relaxed", [False, True])
def test_gradients_of_gradients_are_the_references(relaxed):
    _, (x, nu, *tensors), options = call_of("mlp", 7)
    weights = sorted_tokens.Weights(*tensors, act=options["act"], form=options["form"])
    k, form = sorted_tokens.chosen(nu, 0), {"form": options["form"], "act": options["act"]}
    found = []
    for ours in (True, False):
        if relaxed:
            y = RELAXED(x, nu, *tensors, **options)[0] if ours else relaxed_output(x, nu, weights, 0)
        else:
            y = ops.LEARNERS(x, k, *tensors, **form) if ours else run_learners(x, k, weights)
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(dx.square().sum(), [x, tensors[0]], retain_graph=True))
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other)


def relaxed_model(dtype=torch.float32):
    """A model whose gates are sampled."""
    model = stack_of(planned_site("a", k_min=1), planned_site("b", kind="gated_mlp", learner_act="silu"), dtype=dtype)
    for site in model.acms:
        site.temperature = 0.8
    return model.train()


def gradients_of(model, run, x):
    """Gradients of all parameters, with the noise of one seed."""
    for site in model.acms:
        site.choices.clear()
    torch.manual_seed(7)
    y = run(x)
    chosen = sum(choice.nu.square().sum() for site in model.acms for choice in site.choices)
    return torch.autograd.grad(y.square().sum() + chosen, list(model.parameters()))


@pytest.mark.parametrize("keeps", ["all", "checkpoint inside", "checkpoint outside"])
def test_a_training_step_compiles_whole(keeps):
    model, x = relaxed_model(torch.float64), torch.randn(3, 5, 8, dtype=torch.float64)
    expected = gradients_of(model, model, x)
    within = (lambda x: checkpoint(model, x, use_reentrant=False)) if keeps == "checkpoint inside" else model
    called = set()

    def compiler(graph, _):
        called.update(str(node.target) for node in graph.graph.nodes if "acm" in str(node.target))
        return make_boxed_func(graph.forward)

    compiled = torch.compile(within, backend=aot_autograd(fw_compiler=compiler), fullgraph=True)
    step = (lambda x: checkpoint(compiled, x, use_reentrant=False)) if keeps == "checkpoint outside" else compiled
    # torch's setting for blocks that add to lists, as relaxed ACMs do: a recomputation does not add once more
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
        found = gradients_of(model, step, x)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other)
    assert called == {"acm.relaxed.default", "acm.relaxed_backward.default"}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "autocast"])
def test_a_training_step_compiles_for_inductor(dtype):
    model, x = relaxed_model(), torch.randn(3, 5, 8)
    with torch._inductor.config.patch(fallback_random=True), torch.autocast("cpu", dtype, enabled=dtype != x.dtype):
        expected = gradients_of(model, model, x)
        found = gradients_of(model, torch.compile(model, backend="acm", fullgraph=True), x)
    close = {} if dtype == x.dtype else {"rtol": 5e-2, "atol": 5e-2}
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, **close)


def test_learners_of_a_compiled_model_have_the_gradients_of_sorted_tokens():
    weights, (k, *_) = weights_of("gated"), ks(11)
    x = torch.randn(11, D, dtype=torch.float64, requires_grad=True)
    inputs = [x, *leaves_of(weights)]
    compiled = torch.compile(lambda x: ops.learners(x, k, weights), backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(compiled(x).square().sum(), inputs)
    for mine, other in zip(found, torch.autograd.grad(run_learners(x, k, weights).square().sum(), inputs), strict=True):
        torch.testing.assert_close(mine, other)
