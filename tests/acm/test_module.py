"""The ACM module: choices, state, dtypes, compiled graphs."""

import copy
import pickle
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import acm_compiler
from acm_compiler.acm import tokens
from acm_compiler.acm.context import Said, batch_held, called, observed
from acm_compiler.acm.reference import run_learners
from acm_compiler.errors import LayoutUnknown, NoDenseRegion, UsageError
from acm_compiler.site import Layout
from tests.helpers.build import acm_for, planned_site, sliced_site, stack_of

PACKAGE = Path(acm_compiler.__file__).parent
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@given(order=st.permutations(range(9)), size=st.integers(0, 9))
@settings(max_examples=15, deadline=None)
def test_an_acm_treats_every_token_alone(dtype, order, size):
    torch.manual_seed(2)
    acm = acm_for(planned_site(), dtype=dtype)
    x = torch.randn(9, 8, dtype=torch.float64).to(dtype)
    with torch.no_grad():
        y, part = acm(x), order[:size]
        torch.testing.assert_close(acm(x[part]), y[part], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_tokens_choose_different_k_and_each_gets_that_prefix():
    acm = acm_for(planned_site())
    with torch.no_grad():
        acm.gate.outer.weight.mul_(40)
        x = torch.randn(4, 6, 8)
        k = acm.choose(x.reshape(-1, 8), x.shape[:-1])
        assert len(k.unique()) >= 3
        torch.testing.assert_close(acm(x).reshape(-1, 8), run_learners(x.reshape(-1, 8), k, acm.learners.weights()))


@pytest.mark.parametrize("site", [planned_site(k_min=1), sliced_site(role="v"), sliced_site(role="o")])
def test_the_task_loss_reaches_the_gate(site):
    acm = acm_for(site).train()
    acm.temperature = 0.8
    acm(torch.randn(3, 5, 8)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in acm.gate.parameters())


def test_relaxed_output_is_that_of_the_sampled_k():
    acm = acm_for(planned_site(), dtype=torch.float64).train()
    acm.temperature = 0.8
    x = torch.randn(2, 7, 8, dtype=torch.float64)
    y = acm(x)
    k = acm.choices[0].nu.argmax(-1)
    torch.testing.assert_close(y.reshape(-1, 8), run_learners(x.reshape(-1, 8), k.flatten(), acm.learners.weights()))
    assert torch.equal(acm.eval()(x), acm(x))


def test_run_time_choices_survive_half_precision_and_copies():
    acm = acm_for(planned_site())
    acm.set_choices(knob=0.123456789, k_lo=1, k_hi=3)
    clone = copy.deepcopy(acm).half().bfloat16().to(torch.float64)
    assert clone.knob_value == acm.knob_value == pytest.approx(0.123456789, rel=1e-6)
    assert (int(clone.k_lo), int(clone.k_hi)) == (1, 3)
    assert not any(name in ("knob", "k_lo", "k_hi") for name in acm.state_dict())


@torch.no_grad()
def test_copies_of_an_acm_that_is_compiled_in_place_run_their_own_weights():
    acm, x = acm_for(planned_site()), torch.randn(5, 8)
    acm.compile(backend="eager")
    for clone in (copy.deepcopy(acm), pickle.loads(pickle.dumps(acm))):
        clone.learners.b_out.fill_(7.0)
        assert not torch.allclose(clone(x), acm(x))


def test_bounds_are_clamped_to_the_site():
    acm = acm_for(planned_site(k_min=1))
    acm.set_choices(knob=0.0, k_lo=0, k_hi=0)
    assert (int(acm.k_lo), int(acm.k_hi)) == (1, 1)
    acm.set_choices(knob=0.0, k_lo=99, k_hi=99)
    assert (int(acm.k_lo), int(acm.k_hi)) == (4, 4)


def test_the_dense_region_stays_out_of_the_state_dict_and_loading_keeps_it():
    acm = acm_for(planned_site())
    acm.dense = nn.Linear(8, 8)
    names = set(acm.state_dict())
    assert not any(name.startswith("dense") for name in names)
    wrapper = nn.Sequential(acm)
    before = acm.dense.weight.clone()
    wrapper.load_state_dict(wrapper.state_dict(), strict=True)
    assert torch.equal(acm.dense.weight, before)
    acm.state = "dense"
    assert "dense.weight" in acm.state_dict()


def test_a_dense_site_answers_by_its_region_and_a_missing_region_is_named():
    acm = acm_for(planned_site("block.mlp"))
    acm.state, acm.dense = "dense", nn.Linear(8, 8)
    x = torch.randn(2, 3, 8)
    assert torch.equal(acm(x), acm.dense(x))
    acm.dense = None
    with pytest.raises(NoDenseRegion, match=r"block\.mlp"):
        acm(x)


def test_a_site_without_layout_runs_but_refuses_per_example_figures():
    acm = acm_for(planned_site("odd", layout=None))
    acm(torch.randn(2, 3, 8))
    with observed(acm.conversion, lambda *_: None), pytest.raises(LayoutUnknown, match="odd"):
        acm(torch.randn(2, 3, 8))


@pytest.mark.parametrize(
    ("layout", "shape"), [(Layout(), (2, 3)), (Layout(batch_axis=1), (3, 2)), (Layout(folds=3), (6, 1))]
)
def test_observers_see_k_by_example(layout, shape):
    acm = acm_for(planned_site(layout=layout))
    seen = []
    x = torch.randn(*shape, 8)
    with observed(acm.conversion, lambda _, k, mask, x: seen.append(k)):
        acm(x)
    k = acm.choose(x.reshape(-1, 8), x.shape[:-1]).view(shape)
    assert torch.equal(seen[0], k.T if layout.batch_axis else k.reshape(2, 3))


def test_examples_of_another_length_than_planned_are_refused_where_their_tokens_lie_along_the_batch():
    acm = acm_for(planned_site("flat", layout=Layout(folds=3)))
    with observed(acm.conversion, lambda *_: None), pytest.raises(LayoutUnknown, match="a multiple of 3") as caught:
        acm(torch.randn(8, 8))
    assert caught.value.where == "flat" and "length of the example inputs" in caught.value.fix


def test_a_call_that_tells_its_examples_tells_how_many_tokens_lie_along_the_batch():
    acm = acm_for(planned_site("flat", layout=Layout(folds=3)))
    x, seen = torch.randn(8, 8), []
    mask = torch.tensor([[True] * 4, [True, False, False, False]])
    with observed(acm.conversion, lambda _, k, mask, x: seen.append((k, mask))):
        with called(acm.conversion, lambda: 2):
            acm(x)
        with batch_held(acm.conversion, Said(mask=mask)):
            acm(x)
    k = acm.choose(x, x.shape[:-1]).view(2, 4)
    assert torch.equal(seen[0][0], k) and torch.equal(seen[1][0], k)
    assert seen[0][1] is None and torch.equal(seen[1][1], mask)
    with batch_held(acm.conversion, Said(mask=mask)), pytest.raises(LayoutUnknown, match="windows"):
        acm(x[:, None])


def test_where_a_call_is_one_example_all_tokens_are_its_own():
    acm = acm_for(planned_site(layout=Layout(batch_axis=None)))
    seen = []
    x = torch.randn(3, 2, 8)
    with observed(acm.conversion, lambda _, k, mask, x: seen.append(k)):
        acm(x)
    assert torch.equal(seen[0], acm.choose(x.reshape(-1, 8), x.shape[:-1]).view(1, 6))
    assert tokens.examples(x.shape[:-1], acm.layout, site="s").tolist() == [0] * 6
    assert tokens.of_examples(torch.tensor([0.5]), x.shape[:-1], acm.layout, site="s").tolist() == [0.5] * 6
    with pytest.raises(LayoutUnknown, match="the number of examples"):
        tokens.of_examples(torch.tensor([0.5, 0.5]), x.shape[:-1], acm.layout, site="s")


def test_loading_into_memory_that_was_emptied_brings_the_choices_back():
    acm = acm_for(planned_site())
    acm.set_choices(knob=-1.5, k_lo=1, k_hi=3)
    emptied = copy.deepcopy(acm).to("meta").to_empty(device="cpu")
    for name in acm.run_time():
        getattr(emptied, name).fill_(7)
    emptied.load_state_dict(acm.state_dict())
    assert emptied.run_time() == acm.run_time()


def test_a_symbolic_trace_has_acms_as_leaves_that_follow_the_budget():
    acm, x = acm_for(planned_site()), torch.randn(4, 5, 8)
    traced = torch.fx.symbolic_trace(nn.Sequential(acm))
    for k in (1, 4):
        acm.set_choices(knob=0.0, k_lo=k, k_hi=k)
        assert torch.equal(traced(x), acm(x))
    assert [node.op for node in traced.graph.nodes] == ["placeholder", "call_module", "output"]


def test_weights_that_another_library_has_offloaded_are_refused_with_what_to_do():
    acm = acm_for(planned_site())
    acm.gate.to("meta")
    with pytest.raises(UsageError, match=r"on meta(.|\n)*acm\.rewrite and acm\.calibrate have offload="):
        acm(torch.randn(2, 5, 8))


def test_zero_tokens_pass_through():
    acm = acm_for(planned_site())
    assert acm(torch.randn(0, 5, 8)).shape == (0, 5, 8)
    acm.train().temperature = 0.8
    assert acm(torch.randn(0, 5, 8)).shape == (0, 5, 8)


@pytest.mark.parametrize("relaxed", [False, True])
def test_a_model_on_the_meta_device_gives_shapes_and_other_devices_are_refused(relaxed):
    acm = acm_for(planned_site()).to("meta").train(relaxed)
    acm.temperature = 0.8 if relaxed else None
    x = torch.randn(2, 5, 8)
    assert acm(x.to("meta")).shape == x.shape
    with pytest.raises((RuntimeError, UsageError), match="meta"):
        acm(x)


def test_autocast_runs_the_learners_in_its_type_and_the_gate_in_its_own():
    acm = acm_for(planned_site())
    x = torch.randn(4, 5, 8)
    k = acm.choose(x.reshape(-1, 8), x.shape[:-1])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert acm(x).dtype == torch.bfloat16
        assert torch.equal(acm.choose(x.reshape(-1, 8), x.shape[:-1]), k)
    torch.testing.assert_close(acm(x), acm.bfloat16()(x.bfloat16()).float(), rtol=0.1, atol=0.1)


@pytest.mark.parametrize("form", ["mlp", "gated", "linear", "rows", "cols"])
def test_a_compiled_acm_is_one_graph_that_follows_its_budget(form):
    import torch._dynamo.utils as dynamo

    site = {
        "mlp": planned_site(),
        "gated": planned_site(kind="gated_mlp"),
        "linear": planned_site(kind="linear", learner_act="identity"),
        "rows": sliced_site(role="q"),
        "cols": sliced_site(role="o"),
    }[form]
    assert site.learner_form == form
    acm = acm_for(site)
    compiled = torch.compile(acm, backend="aot_eager", fullgraph=True)
    x = torch.randn(3, 5, 8, requires_grad=True)
    dynamo.counters.clear()
    for k_lo, knob in ((0, 0.0), (0, 0.3), (2, -1.5), (4, 0.0)):
        acm.set_choices(knob=knob, k_lo=k_lo, k_hi=4)
        torch.testing.assert_close(compiled(x), acm(x))
    assert dynamo.counters["stats"]["unique_graphs"] == 1
    parameters = [x, *acm.learners.parameters()]
    ours = torch.autograd.grad(compiled(x).square().sum(), parameters)
    plain = torch.autograd.grad(acm(x).square().sum(), parameters)
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_the_operator_keeps_torchs_rules():
    acm = acm_for(planned_site())
    k = torch.randint(0, 5, (11,), dtype=torch.int32)
    args = (torch.randn(11, 8, requires_grad=True), k, *acm.learners.weights().tensors)
    torch.library.opcheck(torch.ops.acm.learners, args, {"form": "mlp", "act": "gelu"})


@pytest.fixture
def one_process(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_gates_that_take_no_part_are_refused_where_data_parallel_training_waits_for_them():
    model, x = stack_of(planned_site("a")), torch.randn(2, 5, 8)

    def steps(count=2, **options):
        wrapped = DistributedDataParallel(copy.deepcopy(model), **options).train()
        for _ in range(count):
            wrapped(x).sum().backward()

    with pytest.raises(
        UsageError, match=r"a: gates that are not relaxed take no part (?s:.*) acm\.relax\(model, 0\.8\)"
    ):
        steps()
    steps(find_unused_parameters=True)
    with torch.no_grad():
        DistributedDataParallel(copy.deepcopy(model)).train()(x)
    DistributedDataParallel(copy.deepcopy(model)).eval()(x)
    model.acms[0].gate.requires_grad_(False)
    steps()
    model.acms[0].gate.requires_grad_(True)
    model.acms[0].temperature = 0.8
    steps()
    model.acms[0].state, model.acms[0].dense = "dense", nn.Linear(8, 8)
    with pytest.raises(UsageError, match=r"a: learners that were never fitted take no part (?s:.*) acm\.calibrate"):
        steps()


def test_an_eager_forward_makes_few_calls_of_python():
    """Beside a small kernel they are what its time goes into; torch's search for an attribute is the dearest."""
    acm, calls = acm_for(planned_site()).eval(), []

    def see(frame, event, _):
        if event == "call":
            calls.append((frame.f_code.co_filename, frame.f_code.co_qualname))

    with torch.no_grad():
        acm(torch.randn(1, 4, 8))
        sys.setprofile(see)
        try:
            acm(torch.randn(1, 4, 8))
        finally:
            sys.setprofile(None)
    own = [name for file, name in calls if Path(file).is_relative_to(PACKAGE)]
    searches = [name for _, name in calls if name == "Module.__getattr__"]
    assert len(own) + len(searches) <= 40, [name for _, name in calls]
