"""Triton kernels and calibration on a GPU; `pytest -m gpu` on a machine that has one. Nothing else here needs it."""

import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from acm_compiler.acm import ops
from acm_compiler.acm.gated_learners import GATED
from acm_compiler.acm.reference import run_learners
from acm_compiler.codegen.compare import TOLERANCE, relative_error
from acm_compiler.runtime.control import set_budget, set_k
from tests.helpers.build import planned_site, sliced_site, stack_of
from tests.helpers.kernel_cases import FEW, FORMS, ODD, SHAPES, Case, inputs_of, poison_memory, require_answer, to

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
VIT = Case(tokens=25216, learners=4, width=768, d_in=768, d_out=768, dtype=torch.bfloat16)
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def learners(inputs):
    """The operator, as compiled graphs call it."""
    w = inputs.weights
    return ops.LEARNERS(inputs.x, inputs.k, *w.tensors, inputs.residual, form=w.form, act=w.act)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [*FORMS, *(replace(case, tokens=3000) for case in FORMS)], ids=str)
def test_every_form_equals_the_reference(case, dtype, monkeypatch):
    inputs = inputs_of(replace(case, dtype=DTYPES[dtype]), "cuda")
    poison_memory(monkeypatch)
    require_answer(learners(inputs), inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [*ODD, *FEW, *SHAPES], ids=str)
def test_odd_counts_and_shapes_equal_the_reference(case, dtype, monkeypatch):
    inputs = inputs_of(replace(case, dtype=DTYPES[dtype]), "cuda")
    poison_memory(monkeypatch)
    require_answer(learners(inputs), inputs)


@pytest.fixture
def rounded():
    former = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield
    torch.backends.cuda.matmul.fp32_precision = former


@pytest.mark.usefixtures("rounded")
def test_rounded_fp32_products_stay_near_the_reference():
    for case in (Case(), Case(tokens=3000), Case(form="gated", act="silu", tokens=3000)):
        inputs = inputs_of(case, "cuda")
        assert relative_error(learners(inputs).cpu(), inputs.expected) <= 2e-3


@pytest.mark.parametrize("k", ["mixed", "none", "all", "one"])
@pytest.mark.parametrize("case", [VIT, replace(VIT, second="top"), replace(VIT, form="gated", act="silu")], ids=str)
def test_large_calls_are_right_and_bitwise_the_same_twenty_times(case, k, monkeypatch):
    inputs = inputs_of(replace(case, k=k), "cuda")
    poison_memory(monkeypatch)
    first = learners(inputs)
    require_answer(first, inputs)
    assert all(torch.equal(learners(inputs), first) for _ in range(20))


def test_permuted_rows_and_unpipelined_pointers_are_right_too():
    """Kernels on Hopper under a Triton that puts no fence between cp.async and wgmma."""
    from acm_compiler.codegen.gpu import current_machine
    from acm_compiler.codegen.gpu.launch import run

    machine = replace(current_machine(), fenced=False)
    for case in (VIT, replace(VIT, d_in=771, tokens=3000), Case(form="cols", heads=2, width=16, d_in=48, tokens=3000)):
        inputs = inputs_of(replace(case, dtype=torch.bfloat16), "cuda")
        require_answer(run(inputs.x, inputs.k, inputs.weights, residual=inputs.residual, machine=machine), inputs)


def test_a_call_never_waits_for_the_device():
    inputs = inputs_of(VIT, "cuda")
    learners(inputs)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns once that this mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        learners(inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_captured_graph_follows_k():
    inputs = inputs_of(replace(VIT, tokens=3000), "cuda")
    learners(inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = learners(inputs)
    for k in (torch.zeros_like(inputs.k), torch.full_like(inputs.k, 4), torch.randint_like(inputs.k, 5)):
        inputs.k.copy_(k)
        graph.replay()
        assert torch.equal(y, learners(inputs))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("tokens", [20, 3000])
def test_inductor_starts_the_kernels_itself_and_follows_k(tokens, mode):
    inputs = inputs_of(replace(VIT, tokens=tokens), "cuda")
    w = inputs.weights

    def call(x, k, *tensors):
        return ops.LEARNERS(x, k, *tensors, form=w.form, act=w.act) * 1

    compiled = torch.compile(call, mode=mode)
    with torch.no_grad():
        for k in (torch.randint_like(inputs.k, 5), torch.zeros_like(inputs.k), torch.full_like(inputs.k, 4)):
            y = compiled(inputs.x, k, *w.tensors, inputs.residual).clone()
            torch.testing.assert_close(y, call(inputs.x, k, *w.tensors, inputs.residual))


def test_offsets_beyond_two_to_the_31_are_reached():
    tokens = (1 << 31) // 1024 + 5000
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GB")
    case = Case(tokens=8, learners=1, width=64, d_in=1024, d_out=1024, dtype=torch.bfloat16, residual=False, k="all")
    inputs = inputs_of(case, "cuda")
    x = torch.zeros(tokens, 1024, dtype=torch.bfloat16, device="cuda")
    x[-8:] = inputs.x
    k = torch.zeros(tokens, dtype=torch.int32, device="cuda")
    k[-8:] = 1
    y = learners(replace(inputs, x=x, k=k))
    assert relative_error(y[-8:].cpu(), inputs.expected) <= TOLERANCE[torch.bfloat16]


def test_the_gate_chooses_as_the_reference_but_for_near_ties():
    for rule in ("damage", "logits"):
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(3000, 768, device="cuda").to(dtype)
            shapes = ((64, 768), (64,), (5, 64), (5,))
            weights = [(torch.randn(s, device="cuda") * s[-1] ** -0.5).to(dtype) for s in shapes]
            bounds = [torch.tensor(k, dtype=torch.int32, device="cuda") for k in (0, 4)]
            choices = (torch.tensor(-0.5, device="cuda"), *bounds)
            options = {"cost": 0.6, "k_min": 0, "rule": rule}
            k = ops.GATE(x, *weights, *choices, **options)
            exact = ops.GATE_REFERENCE(x.double(), *(w.double() for w in weights), *choices, **options)
            assert (k != exact).float().mean() <= 1e-3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [20, 3000])
def test_gate_and_learners_in_one_call_are_right(tokens, dtype, monkeypatch):
    """Bare, where the first call leaves its plans to the others, and behind a norm, which then runs apart."""
    inputs = inputs_of(replace(VIT, tokens=tokens, dtype=DTYPES[dtype]), "cuda")
    x, w = inputs.x, inputs.weights
    shapes = ((64, 768), (64,), (5, 64), (5,), (768,), (768,))
    *gate, weight, bias = ((torch.randn(s, device="cuda") * s[-1] ** -0.5).to(x.dtype) for s in shapes)
    weights, options = to(to(w, "cpu"), torch.float64), {"cost": 0.6, "k_min": 0, "rule": "logits"}
    z = F.layer_norm(x.double(), (768,), weight.double(), bias.double(), 1e-5).cpu()
    poison_memory(monkeypatch)
    for k in (0, 3, 4):
        bounds = [torch.tensor(k, dtype=torch.int32, device="cuda")] * 2
        call = (x, *gate, torch.tensor(-0.5, device="cuda"), *bounds, *w.tensors, inputs.residual)
        bare = GATED(*call, form=w.form, act=w.act, **options)
        normed = GATED(*call, weight, bias, form=w.form, act=w.act, norm_eps=1e-5, **options)
        for y, rows in ((bare, x.double().cpu()), (normed, z)):
            exact = run_learners(rows, torch.full((tokens,), k), weights) + inputs.residual.double().cpu()
            assert relative_error(y.cpu(), exact) <= TOLERANCE[x.dtype]


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_answers_as_eager_at_every_k():
    import torch._dynamo.utils as dynamo

    q, o = sliced_site("q", role="q", k_min=1), sliced_site("o", role="o", k_min=1)
    model = stack_of(planned_site("a"), q, o, planned_site("b", k_min=1)).cuda().eval()
    compiled = torch.compile(model, backend="acm", fullgraph=True)
    x = torch.randn(7, 30, 8, device="cuda")
    dynamo.counters.clear()
    with torch.no_grad():
        for k in (4, 2, 1, None, 3, 4, 2):
            set_k(model, k)
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    assert dynamo.counters["stats"]["unique_graphs"] <= 4  # all learners, some, gates


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("offload", [None, "cpu"])
def test_a_model_that_was_calibrated_there_serves_its_budgets(offload, monkeypatch):
    for package in ("pydantic", "ruamel.yaml", "tabulate"):  # kernels need none of them
        pytest.importorskip(package)
    from acm_compiler.calibration.calibrate import calibrate
    from acm_compiler.passes.rewrite import offload as offloading
    from acm_compiler.runtime.usage import record
    from tests.helpers.calibration_tiny import make_tiny, texts

    monkeypatch.setattr(offloading, "_SMALL", 1)
    model = make_tiny(second_layer="shared_top", lossless=True).cuda()
    batches = [{name: value.cuda() for name, value in batch.items()} for batch in texts(batches=60)]
    with torch.no_grad():
        dense = model(**batches[0])
    calibrate(model, batches, budgets=(0.5,), offload=offload)
    assert all(tensor.is_cuda for tensor in (*model.parameters(), *model.buffers()))
    lost, real = [], batches[0]["attention_mask"].bool()
    with torch.no_grad():
        for k in (1, 2, 3, 4):
            set_k(model, k)
            lost.append(relative_error(model(**batches[0])[real].cpu(), dense[real].cpu()))
        set_budget(model, 0.5)
        with record(model) as usage:
            for batch in batches:
                model(**batch)
    assert lost[3] <= 1e-4 < lost[2] < lost[0]
    assert abs(usage.budget - 0.5) < 0.05


def test_gradients_equal_those_of_the_reference():
    inputs = inputs_of(Case(), "cuda")
    weights = to(inputs.weights, torch.float64)
    leaves = [w.requires_grad_() for w in (inputs.x, inputs.weights.w_in, inputs.weights.w_out, inputs.weights.b_out)]
    exact = [w.requires_grad_() for w in (leaves[0].detach().double(), weights.w_in.detach(), weights.w_out.detach())]
    weights = replace(weights, w_in=exact[1], w_out=exact[2], b_out=weights.b_out.detach())
    ours = torch.autograd.grad(learners(inputs).square().sum(), leaves)
    y = run_learners(exact[0], inputs.k, weights) + inputs.residual.double()
    for a, b in zip(ours[:3], torch.autograd.grad(y.square().sum(), exact), strict=True):
        assert relative_error(a.cpu(), b.cpu()) <= 1e-5
