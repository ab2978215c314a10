"""The operator `acm::learners`: torch's rules, the residual, FLOP counts, vmap, illegal k."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from acm_compiler.acm import Gate, flops, ops
from acm_compiler.acm.arguments import GateArguments, GatedArguments, LearnersArguments, LearnerWeights, part
from acm_compiler.acm.gated_learners import GATED
from acm_compiler.acm.reference import run_learners
from acm_compiler.errors import UsageError
from acm_compiler.planning.cost import gate_macs_per_token, macs_per_learner
from tests.acm.test_reference import FORMS, OUT, D, N, weights_of
from tests.helpers.build import acm_for, planned_site

T = 11


def arguments(kind: str, *, residual: bool = False, requires_grad: bool = False):
    """Positional and keyword arguments of the operator for one kind of ACM."""
    w = weights_of(kind)
    tensors = [None if t is None else t.requires_grad_(requires_grad) for t in w.tensors]
    x = torch.randn(T, D, dtype=torch.float64, requires_grad=requires_grad)
    bypass = torch.randn(T, OUT, dtype=torch.float64, requires_grad=requires_grad) if residual else None
    k = torch.randint(0, N + 1, (T,), dtype=torch.int32)
    return LearnersArguments(x, k, *tensors, bypass), {"form": w.form, "act": w.act}, w


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("kind", FORMS)
def test_the_operator_keeps_torchs_rules(kind):
    args, kwargs, _ = arguments(kind, residual=True, requires_grad=True)
    torch.library.opcheck(torch.ops.acm.learners, args, kwargs)


@pytest.mark.parametrize("kind", FORMS)
def test_the_residual_is_added_and_gets_its_gradient(kind):
    args, kwargs, weights = arguments(kind, residual=True, requires_grad=True)
    dy = torch.randn(T, OUT, dtype=torch.float64)
    y = ops.LEARNERS(*args, **kwargs)
    torch.testing.assert_close(y, run_learners(args.x, args.k, weights) + args.residual)
    torch.testing.assert_close(torch.autograd.grad(y, args.residual, dy)[0], dy)


@pytest.mark.parametrize("kind", FORMS)
def test_no_gradient_is_an_alias_of_what_the_backward_was_given(kind):
    # Inductor writes over a buffer that it believes to be free: a gradient that lay there was lost
    args, kwargs, _ = arguments(kind, residual=True)
    dy = torch.randn(T, OUT, dtype=torch.float64)
    grads = torch.ops.acm.learners_backward(dy, *args, **kwargs)
    given = {t.data_ptr() for t in (dy, *args) if t is not None}
    assert not given & {grad.data_ptr() for grad in grads}
    assert len({grad.data_ptr() for grad in grads}) == len(grads)


@pytest.mark.parametrize("k", [-1, N + 1])
def test_a_k_outside_its_range_is_refused(k):
    args, kwargs, _ = arguments("mlp")
    args.k[3] = k
    with pytest.raises(UsageError, match=rf"k in \[0, {N}\]"):
        ops.LEARNERS(*args, **kwargs)


def test_vmap_over_inputs_is_one_call():
    args, kwargs, weights = arguments("gated")
    x, k = torch.randn(3, T, D, dtype=torch.float64), torch.randint(0, N + 1, (3, T), dtype=torch.int32)
    mapped = torch.func.vmap(lambda x, k: ops.LEARNERS(*args._replace(x=x, k=k), **kwargs))(x, k)
    expected = run_learners(x.flatten(0, 1), k.flatten(), weights).unflatten(0, (3, T))
    torch.testing.assert_close(mapped, expected)
    same_k = torch.func.vmap(lambda x: ops.LEARNERS(*args._replace(x=x, k=k[0]), **kwargs))(x)
    torch.testing.assert_close(same_k[2], run_learners(x[2], k[0], weights))


def test_vmap_over_weights_is_refused():
    args, kwargs, _ = arguments("linear")
    w_in = torch.stack([args.w_in, args.w_in])
    with pytest.raises(UsageError, match="map over the inputs"):
        torch.func.vmap(lambda w: ops.LEARNERS(*args._replace(w_in=w), **kwargs))(w_in)


@pytest.mark.parametrize("kind", FORMS)
def test_counted_flops_are_those_of_the_learners_that_ran(kind):
    args, kwargs, weights = arguments(kind)
    with FlopCounterMode(display=False) as by_formula:
        ops.LEARNERS(*args, **kwargs)
    with FlopCounterMode(display=False) as by_products:
        run_learners(args.x, args.k, weights)
    assert by_formula.get_total_flops() == by_products.get_total_flops() > 0


def test_unknown_k_counts_as_all_learners():
    args, kwargs, _ = arguments("mlp")
    everything, meta = args._replace(k=torch.full_like(args.k, N)), args._replace(k=args.k.to("meta"))
    form = kwargs["form"]
    assert flops.learners_macs(*meta, form=form) == flops.learners_macs(*everything, form=form)


@pytest.mark.parametrize("kind", ["mlp", "gated_mlp", "linear"])
def test_an_eager_model_is_charged_what_it_runs(kind):
    site = planned_site(kind=kind, learner_act="identity" if kind == "linear" else "gelu")
    acm, x = acm_for(site), torch.randn(9, site.d_in)
    for k in range(site.learners + 1):
        acm.set_choices(knob=0.0, k_lo=k, k_hi=k)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            acm(x)
        expected = 9 * (k * macs_per_learner(site) + gate_macs_per_token(site))
        assert counter.get_total_flops() == 2 * expected


def test_a_gate_by_the_reference_keeps_its_own_precision_under_autocast():
    x, weights = torch.randn(5000, 64), [torch.randn(16, 64), torch.randn(16), torch.randn(5, 16), torch.randn(5)]
    bounds = [torch.tensor(k, dtype=torch.int32) for k in (0, 4)]
    call = lambda: ops.GATE_REFERENCE(x, *weights, torch.tensor(0.1), *bounds, cost=1.0, k_min=0, rule="logits")  # noqa: E731
    expected = call()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), torch._C._AutoDispatchBelowAutograd():
        assert torch.equal(call(), expected)


def gated_arguments(kind: str, dtype=torch.float64):
    """Arguments of the operator that is gate and learners, and those of the two apart."""
    (x, _, *tensors), kwargs, _ = arguments(kind, residual=True)
    x, tensors = x.to(dtype), [None if t is None else t.to(dtype) for t in tensors]
    gate = Gate(D, 8, N + 1, dtype=dtype).requires_grad_(False)
    gate.outer.weight.mul_(20)
    bounds = (torch.tensor(0, dtype=torch.int32), torch.tensor(N, dtype=torch.int32))
    knob, choices = torch.tensor(0.25), {"cost": 0.7, "k_min": 0, "rule": "logits"}
    whole = GatedArguments(x, *gate.weights(), knob.view(torch.int32), *bounds, *tensors)
    return whole, kwargs | choices, GateArguments(x, *gate.weights(), knob, *bounds), choices


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", FORMS)
def test_gate_and_learners_in_one_operator_are_the_two(kind, dtype):
    args, kwargs, gate, choices = gated_arguments(kind, dtype)
    form = {"form": kwargs["form"], "act": kwargs["act"]}
    learners = lambda k: ops.LEARNERS(args.x, k, *part(LearnerWeights, args), args.residual, **form)  # noqa: E731
    apart = learners(ops.GATE(*gate, **choices))
    assert torch.equal(GATED(*args, **kwargs), apart)
    with FlopCounterMode(display=False) as whole:
        GATED(*args, **kwargs)
    with FlopCounterMode(display=False) as both:
        learners(ops.GATE(*gate, **choices))
    assert whole.get_total_flops() == both.get_total_flops() > 0


@pytest.mark.parametrize("kind", ["gated", "rows"])
def test_one_operator_of_both_keeps_torchs_rules(kind):
    args, kwargs, _, _ = gated_arguments(kind, torch.float32)
    torch.library.opcheck(torch.ops.acm.gated_learners, args, kwargs)
    torch.library.opcheck(torch.ops.acm.gated_learners, args[: -len(args._field_defaults)], kwargs)


def test_one_operator_of_both_maps_over_inputs():
    args, kwargs, _, _ = gated_arguments("mlp", torch.float32)
    x, residual = torch.randn(3, T, D), torch.randn(T, 3, OUT)
    call = lambda x, r: GATED(*args._replace(x=x, residual=r), **kwargs)  # noqa: E731
    mapped = torch.func.vmap(call, in_dims=(0, 1))(x, residual)
    torch.testing.assert_close(mapped, torch.stack([call(x[i], residual[:, i].contiguous()) for i in range(3)]))
    with pytest.raises(UsageError, match="map over the inputs"):
        torch.func.vmap(lambda b: GATED(*args._replace(b_inner=b), **kwargs))(torch.stack([args.b_inner] * 2))


def normed(args, kwargs):
    """The same call with a norm in front, and the arguments of one whose tokens are normalised already."""
    x = args.x * 3 + 2
    weight, bias = torch.rand(D, dtype=x.dtype) + 0.5, torch.randn(D, dtype=x.dtype)
    z = torch.nn.functional.layer_norm(x, (D,), weight, bias, 1e-5)
    folded = args._replace(x=x, norm_weight=weight, norm_bias=bias)
    return folded, kwargs | {"norm_eps": 1e-5}, args._replace(x=z)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("kind", FORMS)
def test_a_norm_in_the_operator_is_the_norm_in_front_of_it(kind, dtype):
    args, kwargs, _, _ = gated_arguments(kind, dtype)
    folded, options, apart = normed(args, kwargs)
    torch.testing.assert_close(GATED(*folded, **options), GATED(*apart, **kwargs))
    with FlopCounterMode(display=False) as whole:
        GATED(*folded, **options)
    with FlopCounterMode(display=False) as both:
        GATED(*apart, **kwargs)
    assert whole.get_total_flops() == both.get_total_flops() > 0


def test_an_operator_with_a_norm_keeps_torchs_rules_and_maps_over_inputs():
    args, kwargs, _, _ = gated_arguments("gated", torch.float32)
    folded, options, _ = normed(args, kwargs)
    without = folded._replace(residual=None, norm_weight=None, norm_bias=None)
    torch.library.opcheck(torch.ops.acm.gated_learners, folded, options)
    torch.library.opcheck(torch.ops.acm.gated_learners, without, options)
    x = torch.randn(3, T, D)
    call = lambda x: GATED(*folded._replace(x=x), **options)  # noqa: E731
    torch.testing.assert_close(torch.func.vmap(call)(x), torch.stack([call(part) for part in x]))
    with pytest.raises(UsageError, match="map over the inputs"):
        torch.func.vmap(lambda b: GATED(*folded._replace(norm_bias=b), **options))(torch.stack([folded.norm_bias] * 2))
