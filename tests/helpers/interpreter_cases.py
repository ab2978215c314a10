"""The Triton kernels in Triton's interpreter; run by tests/codegen/test_kernels.py in a process of its own."""

import contextlib
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

from acm_compiler.acm import ACM, ops
from acm_compiler.acm.activations import NAMES, resolve
from acm_compiler.acm.arguments import GateArguments
from acm_compiler.acm.learners import Gate, Learners
from acm_compiler.acm.reference import choose_k, run_learners, utilities
from acm_compiler.codegen import gpu as cuda
from acm_compiler.codegen.compare import TOLERANCE, relative_error
from acm_compiler.codegen.gpu import dispatch, gate_plan, gate_spec, launch, tiles
from acm_compiler.codegen.gpu.activation import INTERPRETED
from acm_compiler.codegen.gpu.calls import operators, sites
from acm_compiler.codegen.gpu.gate_plan import GatePlan, run_gate
from acm_compiler.codegen.gpu.launch import SortedPlan
from acm_compiler.codegen.gpu.spec import spec_of
from acm_compiler.codegen.gpu.stages import Machine
from acm_compiler.codegen.gpu.tiles import Tile, Tiles, bucket_of, choose_tiles
from benchmarks.first_gpu_run.contenders import Shape, Site
from benchmarks.first_gpu_run.d2dmoe import Experts
from tests.helpers import triton_interpreter
from tests.helpers.kernel_cases import FEW, FORMS, ODD, ONE, SHAPES, Case, inputs_of, poison_memory, require_answer, to

HOPPER = Machine(arch=90, processors=3)
AMPERE = Machine(arch=80, processors=3)
UNFENCED = Machine(arch=90, processors=3, fenced=False)
MACHINES = {"hopper": HOPPER, "ampere": AMPERE, "unfenced": UNFENCED}

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
assert INTERPRETED


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Memory that is not initialised holds NaN, or an index that no buffer has."""
    poison_memory(monkeypatch)


@pytest.fixture(autouse=True, scope="session")
def loops_run():
    triton_interpreter.prepare()


def run(inputs, machine=HOPPER):
    return launch.run(inputs.x, inputs.k, inputs.weights, residual=inputs.residual, machine=machine)


@pytest.mark.parametrize("case", FORMS, ids=str)
def test_every_form_equals_the_reference(case):
    """Every form on Hopper in bf16 reads by descriptors where it can."""
    inputs = inputs_of(dataclasses.replace(case, dtype=torch.bfloat16))
    require_answer(run(inputs), inputs)


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", FORMS, ids=str)
def test_every_form_equals_the_reference_on_every_machine(case, dtype, machine):
    inputs = inputs_of(dataclasses.replace(case, dtype=dtype))
    require_answer(run(inputs, MACHINES[machine]), inputs)


@pytest.mark.parametrize("case", [*ODD, *FEW, *SHAPES], ids=str)
def test_odd_counts_and_shapes_equal_the_reference(case):
    inputs = inputs_of(case)
    require_answer(run(inputs), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("case", ONE, ids=str)
def test_one_token_equals_the_reference(case, dtype):
    inputs = inputs_of(dataclasses.replace(case, tokens=1, dtype=dtype))
    for machine in (HOPPER, AMPERE):
        require_answer(run(inputs, machine), inputs)


SPLIT = [case for case in FEW if case.form != "rows" and (case.tokens > 1 or case.second != "shared")]


@pytest.mark.parametrize("case", SPLIT, ids=str)
def test_few_tokens_split_sums_of_large_machines(case, monkeypatch):
    """Programs that share an inner product, and one more kernel; some have none of it, or a step that is cut."""
    monkeypatch.setattr(tiles, "_SHORT", 0)
    inputs = inputs_of(dataclasses.replace(case, width=72, dtype=torch.bfloat16))
    spec = spec_of(inputs.x, inputs.weights, inputs.residual)
    choose_tiles.cache_clear()
    assert choose_tiles(spec, 90, case.tokens, 132).splits > 1
    require_answer(run(inputs, dataclasses.replace(HOPPER, processors=132)), inputs)
    choose_tiles.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize(
    "case",
    [
        Case(tokens=200, width=64, d_in=64, d_out=64),
        Case(second="top", k="one"),
        Case(second="top", tokens=33),
        Case(second="per_k", tokens=9),
        Case(form="linear", act="identity", second="top", tokens=20),
    ],
    ids=str,
)
def test_half_precision_equals_the_reference(case, dtype):
    inputs = inputs_of(dataclasses.replace(case, dtype=dtype))
    require_answer(run(inputs), inputs)


@pytest.mark.parametrize("second", ["shared", "top", "per_k"])
def test_large_tiles_that_mix_many_k_equal_the_reference(second):
    case = Case(second=second, tokens=300, learners=8, width=24, d_in=64, d_out=160, dtype=torch.bfloat16)
    inputs = inputs_of(case)
    spec = spec_of(inputs.x, inputs.weights, inputs.residual)
    tile = Tile(m=128, n=128, k=64, warps=4, stages=3, resident=2)
    tiles = Tiles(layer1=tile, layer2=tile, provenance="")
    plan = SortedPlan(spec, inputs.weights, machine=HOPPER, tiles=tiles, bucket=9)
    require_answer(plan(inputs.x, inputs.k, inputs.residual), inputs)


@pytest.mark.parametrize("tokens", [1, 100, 1024, 1025, 3000])
@pytest.mark.parametrize("learners", [1, 4, 16])
def test_the_order_is_stable_and_descending(tokens, learners, monkeypatch):
    monkeypatch.setattr(dispatch, "_MANY", 2000)
    k = torch.randint(0, learners + 1, (tokens,), dtype=torch.int32)
    order = dispatch.Sort(learners, bucket_of(tokens))(k)
    assert torch.equal(order.perm.long(), k.sort(descending=True, stable=True).indices)
    assert order.counts[: learners + 1].tolist() == [int((k >= n).sum()) for n in range(learners + 1)]


@pytest.mark.parametrize(("tokens", "learners"), [(1025, 4), (3000, 4), (100, 16), (130, 19)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_gates_histogram_gives_the_order_that_a_count_gives(tokens, learners, dtype):
    gate = [torch.randn(shape).to(dtype) for shape in ((24, 40), (24,), (learners, 24), (learners,))]
    bounds = torch.tensor(0.1), torch.tensor(0, dtype=torch.int32), torch.tensor(learners, dtype=torch.int32)
    call = GateArguments(torch.randn(tokens, 40).to(dtype), *gate, *bounds)
    choice = GatePlan(call, cost=0.6, k_min=1, rule="logits", machine=HOPPER)(call.x, *bounds)
    sort = dispatch.Sort(learners, bucket_of(tokens))
    found, expected = sort(choice.k, choice.histogram), sort(choice.k)
    assert choice.histogram is not None and len(choice.k.unique()) > 1
    assert torch.equal(found.perm, expected.perm) and torch.equal(found.counts, expected.counts)
    sort = dispatch.Sort(learners, bucket_of(tokens), d_in=40)
    for order in (sort(choice.k, choice.histogram, call.x), sort(choice.k, None, call.x)):
        assert torch.equal(order.perm, expected.perm) and torch.equal(order.counts, expected.counts)
        assert torch.equal(order.rows, call.x[order.perm.long()])  # k is 1 at least


@pytest.mark.parametrize("copied", [((4096, 16),), ((4096, 64),)], ids=str)
@pytest.mark.parametrize(("tokens", "d_in"), [(1, 8), (100, 300), (1040, 24)])
def test_rows_that_are_copied_are_those_that_run(tokens, d_in, copied, monkeypatch):
    monkeypatch.setattr(dispatch, "_COPIED", copied)
    monkeypatch.setattr(dispatch, "_VALUES", 64 * 64)  # rows of several turns
    k, x = torch.randint(0, 4, (tokens,), dtype=torch.int32), torch.randn(tokens, d_in + 8)[:, :d_in]
    order = dispatch.Sort(3, bucket_of(tokens), d_in=d_in)(k, None, x)
    perm = k.sort(descending=True, stable=True).indices
    run = int((k > 0).sum())
    assert torch.equal(order.perm.long(), perm) and int(order.counts[1]) == run
    rows = dispatch.Rows(d_in)(x, order)
    assert torch.equal(order.rows[:run], x[perm[:run]]) and torch.equal(rows[:run], x[perm[:run]])


@pytest.mark.parametrize("tokens", [40, 2000])
@pytest.mark.parametrize("wrong", [-1, 4, 77])
def test_a_k_that_does_not_exist_stops_the_kernel(tokens, wrong, monkeypatch):
    options = dataclasses.replace(interpreter.interpreter_builder.options, debug=True)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", options)  # what debug=True does on a GPU
    k = torch.ones(tokens, dtype=torch.int32).index_fill(0, torch.tensor([tokens - 1]), wrong)
    with pytest.raises(InterpreterError, match=r"k outside \[0, N\]"):
        dispatch.Sort(3, bucket_of(tokens))(k)


def test_a_k_that_does_not_exist_gives_nan_among_few_tokens():
    inputs = inputs_of(Case(tokens=20))
    inputs.k[3], inputs.k[4] = -1, 9
    y = run(inputs)
    assert y[3:5].isnan().all()
    others = ~y.isnan().any(1)
    assert others.sum() == 18
    assert relative_error(y[others], inputs.expected[others]) <= TOLERANCE[y.dtype]


@pytest.mark.parametrize("k", [-1, 4, 9])
def test_a_k_that_does_not_exist_gives_nan_where_the_token_is_alone(k):
    inputs = inputs_of(Case(tokens=1))
    inputs.k[0] = k
    assert run(inputs).isnan().all()


@pytest.mark.parametrize("form", ["mlp", "gated"])
def test_one_tokens_nan_stays_with_it(form):
    inputs = inputs_of(Case(form=form, k="mixed"))
    inputs.x[7] = torch.nan
    inputs.k[7] = 2
    y = run(inputs)
    assert y[7].isnan().all()
    assert not y[torch.arange(130) != 7].isnan().any()


def test_a_tokens_answer_does_not_depend_on_its_neighbours():
    # exact sums: the interpreter multiplies by a BLAS, which may add a tile's rows in different orders
    inputs = inputs_of(Case(tokens=200, act="relu", exact=True))
    y, some = run(inputs), torch.randperm(200)[:80]
    part = launch.run(inputs.x[some], inputs.k[some], inputs.weights, residual=inputs.residual[some], machine=HOPPER)
    assert torch.equal(part, y[some])


def test_rows_may_lie_apart_and_weights_in_any_order():
    inputs = inputs_of(Case())
    wide = torch.randn(130, 100)
    wide[:, :72] = inputs.x
    turned = inputs.residual.t().contiguous().t()
    apart = torch.stack([inputs.k, inputs.k + 1], 1)[:, 0]
    for k in (apart, inputs.k.long()):
        require_answer(launch.run(wide[:, :72], k, inputs.weights, residual=turned, machine=HOPPER), inputs)


@pytest.mark.parametrize("machine", MACHINES)
def test_addresses_need_no_alignment(machine):
    inputs = inputs_of(Case(dtype=torch.bfloat16))
    shifted = {}
    for name in ("w_in", "w_out", "b_in", "b_out"):
        tensor = getattr(inputs.weights, name)
        room = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)
        shifted[name] = room[1:].view_as(tensor).copy_(tensor)
        assert shifted[name].data_ptr() % 16
    x = torch.zeros(130 * 72 + 1, dtype=torch.bfloat16)[1:].view(130, 72).copy_(inputs.x)
    weights = dataclasses.replace(inputs.weights, **shifted)
    y = launch.run(x, inputs.k, weights, residual=inputs.residual, machine=MACHINES[machine])
    require_answer(y, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("act", NAMES)
def test_activations_hold_far_from_zero_too(act, dtype):
    """One learner whose hidden value is x itself: y = act(x), at values from -60 to 60."""
    inputs = inputs_of(Case(act=act, learners=1, width=16, d_in=16, d_out=16, k="all", tokens=64, residual=False))
    x = torch.linspace(-60, 60, 1024).reshape(64, 16).to(dtype)
    eye = torch.eye(16, dtype=dtype)
    weights = inputs.weights
    for tensor, value in ((weights.w_in, eye), (weights.w_out, eye), (weights.b_in, 0), (weights.b_out, 0)):
        tensor.copy_(value.view_as(tensor) if torch.is_tensor(value) else torch.zeros_like(tensor))
    y = launch.run(x, inputs.k, to(weights, dtype), machine=AMPERE)
    exact = resolve(act)(x.double())
    atol = 1e-6 if dtype == torch.float32 else 1e-4
    rtol = 2e-6 if dtype == torch.float32 else 8e-3
    torch.testing.assert_close(y.double(), exact, atol=atol, rtol=rtol)


GATES = [
    (rule, tokens, columns, dtype, gate_dtype)
    for rule in ("damage", "logits")
    for tokens, columns, dtype, gate_dtype in (
        (1, 5, torch.float32, torch.float32),
        (130, 5, torch.float32, torch.float32),
        (100, 17, torch.bfloat16, torch.bfloat16),
        (70, 2, torch.bfloat16, torch.float32),
    )
]


@pytest.mark.parametrize(("rule", "tokens", "columns", "dtype", "gate_dtype"), GATES)
@pytest.mark.parametrize("k_min", [0, 1])
def test_a_gate_chooses_what_the_reference_chooses(rule, tokens, columns, dtype, gate_dtype, k_min):
    """Another k only where float64 has the two within the rounding of the gate's dtype."""
    x = torch.randn(tokens, 72).to(dtype)
    shapes = ((24, 72), (24,), (columns, 24), (columns,))
    weights = tuple((torch.randn(shape) * shape[-1] ** -0.5).to(gate_dtype) for shape in shapes)
    knob, cost = torch.tensor(-0.7), 0.6
    most = columns - 1 + k_min
    for low, high in ((0, 99), (2, 99), (0, most - 1), (most, most), (99, 1)):
        k_lo, k_hi = (torch.tensor(max(k_min, min(bound, most)), dtype=torch.int32) for bound in (low, high))
        k = run_gate(GateArguments(x, *weights, knob, k_lo, k_hi), cost=cost, k_min=k_min, rule=rule, machine=HOPPER)
        w, b, w2, b2 = (tensor.double() for tensor in weights)
        score = F.linear(F.gelu(F.linear(x.double(), w, b)), w2, b2)
        u = utilities(score, knob, torch.arange(k_min, most + 1).double() * cost, rule)
        expected = choose_k(u, torch.minimum(k_lo, k_hi), k_hi, k_min)
        lost = (u.gather(1, (expected - k_min).long()[:, None]) - u.gather(1, (k - k_min).long()[:, None])).max()
        assert k.dtype == torch.int32 and k.min() >= min(k_lo, k_hi) and k.max() <= k_hi
        assert lost <= 3e-6


def test_a_gates_ties_go_to_the_smaller_k():
    weights = torch.zeros(8, 16), torch.zeros(8), torch.zeros(5, 8), torch.zeros(5)
    bounds = torch.tensor(0.0), torch.tensor(2, dtype=torch.int32), torch.tensor(5, dtype=torch.int32)
    k = run_gate(GateArguments(torch.randn(9, 16), *weights, *bounds), cost=1.0, k_min=1, rule="logits", machine=HOPPER)
    assert k.tolist() == [2] * 9


def test_a_nan_token_runs_all_learners_that_it_may():
    weights = torch.randn(8, 16), torch.randn(8), torch.randn(5, 8), torch.randn(5)
    x = torch.randn(9, 16)
    x[4] = torch.nan
    for rule in ("logits", "damage"):
        bounds = torch.tensor(0.0), torch.tensor(2, dtype=torch.int32), torch.tensor(4, dtype=torch.int32)
        k = run_gate(GateArguments(x, *weights, *bounds), cost=1.0, k_min=1, rule=rule, machine=HOPPER)
        assert k[4] == 4 and k.min() >= 2 and k.max() <= 4


def test_the_same_call_gives_the_same_bits():
    inputs = inputs_of(Case(dtype=torch.bfloat16))
    assert torch.equal(run(inputs), run(inputs))


def test_tiles_for_every_kind_of_call_exist():
    for case in FORMS:
        for dtype in (torch.float32, torch.float16):
            inputs = inputs_of(dataclasses.replace(case, dtype=dtype))
            spec = spec_of(inputs.x, inputs.weights, inputs.residual)
            assert all(choose_tiles(spec, arch, t) for arch in (80, 86, 89, 90) for t in (1, 65, 3000, 10**6))


@pytest.mark.parametrize(("dtype", "lost"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("tokens", "heavy"), [(3, 0), (40, 0), (40, 1 << 30), (70, 0), (70, 1 << 30)])
def test_a_gate_may_be_wide_and_split_over_its_features(tokens, heavy, dtype, lost, monkeypatch):
    """Columns are taken in blocks, those of a sum, too; features in parts, whose sums have an order."""
    for name, number in {"_HEAVY": heavy, "_SPAN": 128, "_LEAST_SPAN": 128, "_WIDEST": 128}.items():
        monkeypatch.setattr(gate_spec, name, number)
    monkeypatch.setattr(gate_plan, "_SUM_COLUMNS", (128, 64))
    width, d_in = 140, 331
    weights = [torch.randn(width, d_in) * d_in**-0.5, torch.randn(width), torch.randn(5, width), torch.zeros(5)]
    weights = [tensor.to(dtype) for tensor in weights]
    x = torch.randn(tokens, d_in).to(dtype)
    x[1] = torch.nan
    k, found = choices_of(x, weights)
    assert found <= lost and len(k.unique()) > 1 and k[1] == 4
    assert torch.equal(k, choices_of(x, weights)[0])


@pytest.mark.parametrize("gate_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("span", [512, 4096])
def test_a_split_gate_of_one_token_chooses_the_best(span, dtype, gate_dtype, monkeypatch):
    monkeypatch.setattr(gate_spec, "_HEAVY", 0)
    monkeypatch.setattr(gate_spec, "_SPAN_OF_ONE", span)
    width, d_in = 45, 1030
    weights = [torch.randn(width, d_in) * d_in**-0.5, torch.randn(width), torch.randn(5, width), torch.zeros(5)]
    weights = [tensor.to(gate_dtype) for tensor in weights]
    chosen = set()
    for _ in range(6):
        k, lost = choices_of(torch.randn(1, d_in).to(dtype), weights)
        assert lost <= (1e-5 if dtype == gate_dtype == torch.float32 else 3e-2)
        chosen.add(int(k))
    assert len(chosen) > 1
    assert choices_of(torch.full((1, d_in), torch.nan).to(dtype), weights)[0] == 4


def choices_of(x, weights):
    """k by the kernel, and how much less its choices are worth than the best in float64."""
    knob, k_lo, k_hi = torch.tensor(0.1), torch.tensor(0, dtype=torch.int32), torch.tensor(4, dtype=torch.int32)
    k = run_gate(GateArguments(x, *weights, knob, k_lo, k_hi), cost=0.6, k_min=0, rule="logits", machine=HOPPER)
    w, b, w2, b2 = (tensor.double() for tensor in weights)
    u = utilities(F.linear(F.gelu(F.linear(x.double(), w, b)), w2, b2), knob, torch.arange(5).double() * 0.6, "logits")
    lost = u.max(1).values - u.gather(1, k.long()[:, None])[:, 0]
    return k, lost.where(x.isfinite().all(1), 0).max()


@pytest.mark.parametrize("tokens", [1, 20, 130])
def test_a_whole_acm_by_its_kept_plans_follows_weights_and_k(tokens, monkeypatch):
    """Two calls by the operators, which keep plans, and from then on by these plans."""
    monkeypatch.setattr(cuda, "machine_of", lambda device: HOPPER)
    for module in (operators, sites):
        monkeypatch.setattr(module, "on_device_of", lambda x: contextlib.nullcontext())
    gate = Gate(72, 16, 4)
    learners = Learners(72, 80, 3, 40, form="mlp", act="gelu")
    acm = ACM(gate, learners, name="a", k_min=0, layout=None, cost=0.6, dropout=0.0).eval()
    x = torch.randn(tokens, 2, 72)[:, :1]  # rows apart are read as they lie by the operators, and not here
    acm.set_choices(knob=0.0, k_lo=0, k_hi=3)
    with torch.no_grad():
        for parameter in acm.parameters():
            parameter.normal_(std=0.1)
        for turn, k in enumerate((3, 3, 3, 1, 0, 2)):
            gate.outer.bias.zero_()[k] = 100.0  # bounds that leave one k have no gate
            learners.w_in.mul_(1.1)
            rows = x.contiguous() if turn != 4 else x
            whole = sites.run_site(acm, rows)
            assert (whole is None) == (turn < 2 or not rows.is_contiguous())
            flat, w = rows.reshape(-1, 72), learners.weights()
            bounds = acm.knob.view(torch.float32), acm.k_lo, acm.k_hi
            chosen = operators.gate(flat, *gate.weights(), *bounds, cost=0.6, k_min=0, rule="logits")
            y = operators.learners(flat, chosen, *w.tensors, form="mlp", act="gelu")
            expected = run_learners(flat.double(), torch.full((tokens,), k), to(w, torch.float64))
            for found in (y, *(() if whole is None else (whole.reshape(-1, 80),))):
                assert relative_error(found, expected) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("case", [*FORMS, Case(act="mul(x, sigmoid(x))")], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_one_k_for_all_tokens_is_dense_products(case, dtype, monkeypatch):
    weights, made = to(inputs_of(dataclasses.replace(case, dtype=dtype)).weights, dtype), []
    monkeypatch.setattr(launch.Launcher, "__call__", lambda *_: made.append(1))
    learners = Learners(
        case.d_in,
        case.d_out,
        case.learners,
        case.width,
        form=case.form,
        act=case.act,
        bias_in=weights.b_in is not None,
        per_k=case.second == "per_k",
        top=case.second == "top" and case.form not in ("rows", "cols"),
        heads=case.heads,
        dtype=dtype,
    )
    for name, tensor in weights.tensors._asdict().items():
        if tensor is not None:
            getattr(learners, name).data.copy_(tensor)
    acm = ACM(
        Gate(case.d_in, 8, case.learners, dtype=dtype), learners, name="a", k_min=1, layout=None, cost=1, dropout=0
    )
    x = torch.randn(5, 3, case.d_in).to(dtype)
    x[2, 1] = torch.nan
    with torch.no_grad():
        for k_lo, k_hi, k in ((0, 0, 1), (2, 2, 2), (3, 9, 3), (3, 3, 3)):
            acm.eval().set_choices(knob=0.0, k_lo=k_lo, k_hi=k_hi)
            y = sites.run_site(acm, x)
            expected = run_learners(x.reshape(-1, case.d_in).double(), torch.full((15,), k), to(weights, torch.float64))
            assert y.shape == (5, 3, case.d_out) and relative_error(y.reshape(15, -1), expected) <= TOLERANCE[dtype]
        assert sites.run_site(acm, x[:0]) is None
    assert not made


@pytest.mark.parametrize(("form", "dtype"), [("mlp", torch.float32), ("gated", torch.bfloat16)])
def test_one_token_at_one_k_runs_by_kernels_and_reads_no_other_learner(form, dtype, monkeypatch):
    """Eager calls; what does not run is NaN, and so are tokens at last."""
    monkeypatch.setattr(cuda, "machine_of", lambda device: HOPPER)
    for module in (operators, sites):
        monkeypatch.setattr(module, "on_device_of", lambda x: contextlib.nullcontext())
    monkeypatch.setattr(ops, "VECTOR_KERNELS", {"cpu"})
    monkeypatch.setattr(ops, "_ASKED", {"cpu"})  # for the kernels of CPUs, which are not needed here
    monkeypatch.setattr(sites, "prefix_output", None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    learners = Learners(75, 19, 3, 11, form=form, act="silu", dtype=dtype)
    acm = ACM(Gate(75, 8, 4, dtype=dtype), learners, name="a", k_min=0, layout=None, cost=1.0, dropout=0.0).eval()
    with torch.no_grad():
        for k in (3, 2, 1):
            for parameter in learners.parameters():
                parameter.normal_(std=0.2)
            expected = to(learners.weights(), torch.float64)
            for tensor in (learners.w_in, learners.b_in, learners.w_up, learners.b_up):
                if tensor is not None:
                    tensor[k:] = torch.nan
            learners.w_out[:, k:] = torch.nan
            learners.b_out[torch.arange(4) != k] = torch.nan
            acm.set_choices(knob=0.0, k_lo=k, k_hi=k)
            x = torch.randn(1, 75).to(dtype)
            y, exact = sites.run_site(acm, x), run_learners(x.double(), torch.tensor([k]), expected)
            assert relative_error(y, exact) <= TOLERANCE[dtype]
            x[0, 70] = torch.nan
            assert sites.run_site(acm, x).isnan().all()


@pytest.mark.parametrize("tokens", [20, 130])
def test_gate_and_learners_in_one_call_go_by_the_plans_of_both(tokens, monkeypatch):
    monkeypatch.setattr(cuda, "machine_of", lambda device: HOPPER)
    monkeypatch.setattr(operators, "on_device_of", lambda x: contextlib.nullcontext())
    inputs, given = inputs_of(Case(tokens=tokens)), []
    gate = [torch.randn(16, 72), torch.randn(16), torch.randn(4, 16), torch.randn(4)]
    knob, bounds = torch.tensor(-0.7), [torch.tensor(k, dtype=torch.int32) for k in (0, 3)]
    choices, form = {"cost": 0.6, "k_min": 0, "rule": "damage"}, {"form": "mlp", "act": "gelu"}
    w = inputs.weights
    k = operators.gate(inputs.x, *gate, knob, *bounds, **choices)
    operators.learners(inputs.x, k, *w.tensors, inputs.residual, **form)
    sort, x = dispatch.Sort.__call__, inputs.x.clone()
    monkeypatch.setattr(dispatch.Sort, "__call__", lambda *of: given.append(of[2]) or sort(*of))
    monkeypatch.setattr(operators, "run_apart", None)  # which only a first call needs
    y = operators.gated_learners(
        x, *gate, knob.view(torch.int32), *bounds, *w.tensors, inputs.residual, **form, **choices
    )
    expected = run_learners(x.double(), k, to(w, torch.float64))
    assert len(k.unique()) > 1 and None not in given and len(given) == (tokens > 64)
    require_answer(y, dataclasses.replace(inputs, expected=expected + inputs.residual.double()))


@pytest.mark.parametrize("atomic", [True, False], ids=["atomic", "merged"])
@pytest.mark.parametrize(
    ("case", "width", "is_bulk"),
    [
        (Case(width=64, dtype=torch.bfloat16), 32, True),
        (Case(width=40, d_in=75, d_out=83), 20, False),
        (Case(tokens=33, width=64, k="one", learners=2), 64, True),
        (Case(tokens=1, width=64, k="none"), 64, True),
    ],
    ids=str,
)
def test_experts_of_d2dmoe_equal_the_reference(case, width, is_bulk, atomic):
    """The contender of benchmarks.first_gpu_run: lists that fill tiles in part, experts without tokens, odd sizes."""
    case = dataclasses.replace(case, residual=False)
    inputs = inputs_of(case)
    sizes = {name: getattr(case, name) for name in ("form", "tokens", "d_in", "width", "d_out", "learners")}
    gate = GateArguments(inputs.x, *[torch.empty(0)] * 7)
    site = Site(shape=Shape(name="", **sizes), x=inputs.x, weights=inputs.weights, gate=gate, machine=HOPPER)
    tile = tiles.tile_of("32x64x32 w4 s3 r1")
    experts = Experts(site=site, width=width, atomic=atomic, first=tile, second=tile)
    assert experts.is_bulk == is_bulk and experts.count == case.learners * case.width // width
    require_answer(experts(inputs.k), inputs)
