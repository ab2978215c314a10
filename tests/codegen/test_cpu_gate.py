"""The native gate against the plain one: the same choices for every token, rule, width and bound."""

import copy

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from acm_compiler.acm import Gate, flops, ops
from acm_compiler.acm.reference import choice_costs, utilities
from acm_compiler.errors import UsageError
from acm_compiler.planning.cost import gate_macs_per_token
from tests.helpers.build import acm_for, planned_site

N = 4


@pytest.fixture(autouse=True, scope="module")
def native():
    ops.load_kernels("cpu")
    assert torch._C._dispatch_has_kernel_for_dispatch_key("acm::gate", "CPU")


def drawn(d_in: int, width: int, k_min: int, dtype=torch.float32) -> Gate:
    gate = Gate(d_in, width, N - k_min + 1, dtype=dtype)
    with torch.no_grad():
        gate.outer.weight.mul_(20)
    return gate


def scalars(knob: float, k_lo: int, k_hi: int):
    return torch.tensor(knob), torch.tensor(k_lo, dtype=torch.int32), torch.tensor(k_hi, dtype=torch.int32)


def both(gate: Gate, x, *, knob=0.3, k_lo=0, k_hi=N, k_min=0, rule="logits"):
    """Choices of the kernel and of the reference."""
    args, kwargs = (x, *gate.weights(), *scalars(knob, k_lo, k_hi)), {"cost": 0.7, "k_min": k_min, "rule": rule}
    with torch.no_grad():
        return torch.ops.acm.gate_cpu(*args, **kwargs), ops.GATE_REFERENCE(*args, **kwargs)


def close_calls(gate: Gate, x, *, knob, k_min, rule):
    """Tokens whose two best utilities are too near each other to be told apart by rounding."""
    with torch.no_grad():
        cost = choice_costs(0.7, k_min=k_min, n_learners=N, device=x.device)
        u = utilities(gate(x).float(), torch.tensor(knob), cost, rule)
    best = u.topk(2).values
    return best[:, 0] - best[:, 1] < 1e-4


@pytest.mark.parametrize("rule", ["logits", "damage"])
@pytest.mark.parametrize("k_min", [0, 1])
@pytest.mark.parametrize(("d_in", "width"), [(8, 8), (19, 13), (96, 48), (1, 1)])
def test_the_native_gate_chooses_what_the_plain_one_does(d_in, width, k_min, rule):
    gate = drawn(d_in, width, k_min)
    x = torch.randn(513, d_in)
    native, plain = both(gate, x, k_min=k_min, rule=rule)
    far = ~close_calls(gate, x, knob=0.3, k_min=k_min, rule=rule)
    assert native.dtype == torch.int32 and torch.equal(native[far], plain[far])
    assert far.float().mean() > 0.9


@pytest.mark.parametrize("rule", ["logits", "damage"])
@pytest.mark.parametrize(("d_in", "width"), [(8, 8), (18, 13), (19, 13), (96, 48), (770, 130)])
def test_a_gate_of_bfloat16_chooses_as_one_of_floats_with_the_same_numbers(d_in, width, rule):
    gate, x = drawn(d_in, width, 0).bfloat16().requires_grad_(False), torch.randn(257, d_in).bfloat16()
    floats = copy.deepcopy(gate).float()
    native, _ = both(gate, x, rule=rule)
    _, expected = both(floats, x.float(), rule=rule)
    far = ~close_calls(floats, x.float(), knob=0.3, k_min=0, rule=rule)
    assert torch.equal(native[far], expected[far])
    assert far.float().mean() > 0.9


@pytest.mark.parametrize(("k_lo", "k_hi"), [(0, 0), (2, 2), (1, 3), (3, 1), (4, 4)])
def test_bounds_hold(k_lo, k_hi):
    native, plain = both(drawn(8, 8, 0), torch.randn(65, 8), k_lo=k_lo, k_hi=k_hi)
    assert torch.equal(native, plain)
    assert native.min() >= min(k_lo, k_hi) and native.max() <= k_hi


def test_ties_go_to_the_smaller_k():
    gate = drawn(8, 8, 0)
    with torch.no_grad():
        gate.outer.weight.zero_()
        gate.outer.bias.zero_()
    assert both(gate, torch.randn(5, 8), knob=0.0, k_lo=1)[0].tolist() == [1] * 5


@pytest.mark.parametrize("knob", [-4096.0, 4096.0])
@pytest.mark.parametrize("rule", ["logits", "damage"])
def test_the_strongest_knobs_are_followed(knob, rule):
    native, plain = both(drawn(8, 8, 0), torch.randn(33, 8), knob=knob, rule=rule)
    assert torch.equal(native, plain)


@pytest.mark.parametrize("rule", ["logits", "damage"])
@pytest.mark.parametrize(("k_min", "bounds"), [(0, (0, 4)), (1, (1, 3)), (1, (3, 2)), (0, (-5, 9))])
def test_a_nan_token_runs_all_learners_that_it_may_and_disturbs_no_other(k_min, bounds, rule):
    gate, x = drawn(8, 8, k_min), torch.randn(40, 8)
    options = dict(zip(("k_lo", "k_hi"), bounds, strict=True)) | {"k_min": k_min, "rule": rule}
    clean, _ = both(gate, x, **options)
    x[5] = torch.nan
    native, plain = both(gate, x, **options)
    assert native[5] == plain[5] == min(bounds[1], N)
    others = torch.arange(40) != 5
    assert torch.equal(native[others], clean[others]) and torch.equal(native, plain)


@pytest.mark.parametrize("rule", ["logits", "damage"])
def test_no_knob_and_no_score_leads_beyond_the_bounds(rule):
    gate, x = drawn(8, 8, 1), torch.randn(9, 8)
    with torch.no_grad():
        for bias in (-torch.inf, torch.inf, 0.0):
            gate.outer.bias.fill_(bias)
            for knob in (-torch.inf, torch.inf, torch.nan):
                native, plain = both(gate, x, knob=knob, k_lo=2, k_hi=3, k_min=1, rule=rule)
                assert native.min() >= 2 and native.max() <= 3 and torch.equal(native, plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types_choose_too(dtype):
    x = torch.randn(40, 16)
    gate = drawn(16, 8, 0)
    expected, _ = both(gate, x.to(dtype).float())
    native, _ = both(drawn(16, 8, 0).to(dtype).requires_grad_(False), x.to(dtype))
    assert native.shape == expected.shape and native.dtype == torch.int32
    mixed, plain = both(gate, x.to(dtype))
    assert (mixed == plain).float().mean() > 0.9


def test_strided_tokens_and_no_tokens():
    gate, wide = drawn(8, 8, 0), torch.randn(31, 3, 8)
    for x in (wide[:, 1], torch.randn(8, 31).t(), wide[:0, 0]):
        native, plain = both(gate, x)
        assert torch.equal(native, plain)


@pytest.mark.parametrize("d_in", [64, 66])
@pytest.mark.parametrize("stride", [80, 81])
def test_tokens_that_tiles_read_where_they_lie_choose_as_packed_ones(d_in, stride, tiles):
    """70 tokens are two groups that fill tiles and one that does not; an odd stride puts pairs between words."""
    gate = drawn(d_in, 20, 0).bfloat16()
    x = torch.randn(70, stride).bfloat16()[:, :d_in]
    native, packed = both(gate, x)[0], both(gate, x.contiguous())[0]
    assert torch.equal(native, packed) and len(native.unique()) > 1


def test_an_acm_in_eager_uses_the_operator_and_an_observed_one_does_not():
    acm, x = acm_for(planned_site()), torch.randn(9, 8)
    acm.set_choices(knob=0.2, k_lo=0, k_hi=4)
    with torch.no_grad():
        chosen = acm.choose(x, x.shape[:-1])
        with FlopCounterMode(display=False) as counter:
            observed = acm.choose(x, x.shape[:-1])
    assert torch.equal(chosen, observed)
    expected = 2 * 9 * gate_macs_per_token(planned_site())
    assert counter.get_total_flops() == expected == flops.gate_flops(x, *acm.gate.weights())


def test_vmap_over_inputs():
    gate, x = drawn(8, 8, 0), torch.randn(3, 7, 8)
    call = lambda x: ops.GATE(x, *gate.weights(), *scalars(0.1, 0, N), cost=1.0, k_min=0, rule="logits")  # noqa: E731
    with torch.no_grad():
        mapped = torch.func.vmap(call)(x)
        assert torch.equal(mapped, torch.stack([call(part) for part in x]))
        with pytest.raises(UsageError, match="inputs only"):
            torch.func.vmap(
                lambda w: ops.GATE(x[0], w, *gate.weights()[1:], *scalars(0, 0, N), cost=1.0, k_min=0, rule="logits")
            )(gate.inner.weight.expand(2, 8, 8))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_the_operator_keeps_torchs_rules():
    args = (torch.randn(9, 8, requires_grad=True), *drawn(8, 8, 0).weights(), *scalars(0.1, 0, N))
    torch.library.opcheck(torch.ops.acm.gate, args, {"cost": 0.5, "k_min": 0, "rule": "damage"})
