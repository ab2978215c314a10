"""Models on other devices than the CPU, told from the CPU by `meta` and by stand-ins for an accelerator's module."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from acm_compiler import batch, evaluate, export, meter, plan, recalibrate, record, rewrite, set_budget, set_k, status
from acm_compiler.acm import precision as float64
from acm_compiler.acm.context import batch_of
from acm_compiler.acm.reference import choice_costs, choose_k, utilities
from acm_compiler.calibration import choose_gates
from acm_compiler.calibration.calibrate import calibrate_on
from acm_compiler.calibration.examples import Options, masked
from acm_compiler.errors import UsageError
from acm_compiler.passes.capture.capture import capture
from acm_compiler.passes.rewrite.conversion import conversion, rewritten, sites
from acm_compiler.runtime import measure_budgets as measure
from acm_compiler.runtime import ranks
from acm_compiler.runtime.masks import CallPadding
from acm_compiler.runtime.usage import Usage
from acm_compiler.tasks import Task
from acm_compiler.training.finetune import _Seen
from acm_compiler.training.live_state import generator_states, restore_generators
from tests.helpers import tour_model
from tests.helpers.build import planned_site, stack_of
from tests.helpers.calibration_tiny import make_tiny, texts


@pytest.mark.parametrize("rule", ["damage", "logits"])
def test_knobs_are_guessed_where_the_scores_are(rule, monkeypatch):
    model = stack_of(planned_site("a"), planned_site("b", k_min=1))
    chosen = []

    def choose(u_TC, *bounds):
        chosen.append(choose_k(u_TC, *bounds))
        return torch.full(chosen[-1].shape, 2)  # what was chosen has no value on meta

    monkeypatch.setattr(choose_gates, "choose_k", choose)
    for acm in sites(model).values():
        acm.gate.rule = rule
    scored = {
        name: choose_gates.ScoredGate(gate=acm.gate, scores=torch.empty(7, acm.count - acm.k_min + 1, device="meta"))
        for name, acm in sites(model).items()
    }
    assert choose_gates._share_of(rewritten(model), scored, 0.3, 1) == pytest.approx(0.5)
    assert [(k_T.device.type, k_T.shape) for k_T in chosen] == [("meta", (7,))] * 2


class Sent(Exception):
    """A sum over processes began."""


def test_processes_add_up_sums_of_the_cpu_where_their_group_carries_none(monkeypatch):
    def send(tensor):
        raise Sent(tensor.device.type)

    asked = torch.distributed
    monkeypatch.setattr(asked, "is_initialized", lambda: True)
    monkeypatch.setattr(asked, "get_world_size", lambda: 2)
    monkeypatch.setattr(asked, "all_reduce", send)
    monkeypatch.setattr(asked, "all_gather_object", lambda every, own: every.__setitem__(slice(None), [own, own + 1]))
    sums = torch.rand(3, dtype=torch.float64)
    monkeypatch.setattr(asked, "get_backend_config", lambda: "xpu:xccl")
    assert torch.equal(ranks.total(sums), sums + (sums + 1))
    monkeypatch.setattr(asked, "get_backend_config", lambda: "cpu:gloo,cuda:gloo")
    with pytest.raises(Sent, match="cpu"):
        ranks.total(sums)


class Float64Apart(TorchDispatchMode):
    """A device without float64, to which none can be moved: `to_float64` alone takes tensors elsewhere."""

    taken = 0

    def __init__(self, monkeypatch):
        super().__init__()
        where = float64.float64_device

        def leave(device):
            self.taken += 1
            return where(device)

        monkeypatch.setattr(float64, "float64_device", leave)
        self.seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        given = [t for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)]
        wide = [t for t in tree_iter(made) if isinstance(t, torch.Tensor) and t.dtype == torch.float64]
        if given and wide and all(t.dtype != torch.float64 for t in given):
            self.seen += 1
            assert func is torch.ops.aten._to_copy.default and self.seen <= self.taken, func
        return made


def attention():
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    return rewrite(model, plan(model, torch.randn(1, 5, 16))), list(torch.randn(12, 8, 5, 16))


@pytest.mark.filterwarnings("ignore:too few tokens")
@pytest.mark.parametrize("kind", ["shared_top", "slices"])
def test_calibration_makes_float64_on_devices_that_have_it_alone(kind, monkeypatch):
    monkeypatch.setattr(measure, "GRID", (0.5,))
    model, batches = attention() if kind == "slices" else (make_tiny(second_layer=kind), texts(12))
    with Float64Apart(monkeypatch) as mode:
        calibrate_on(model, masked(batches), options=Options(tokens=200, gate_steps=2, sample=200))
        set_budget(model, 0.8)
        with record(model) as usage, torch.no_grad():
            model(**batches[0]) if isinstance(batches[0], dict) else model(batches[0])
        assert 0 < usage.budget < 1 and usage.macs.sum() > 0
    assert mode.seen


@pytest.mark.parametrize("rule", ["damage", "logits"])
def test_costs_of_choices_need_no_float64_where_the_tokens_are(rule):
    costs = choice_costs(0.5, k_min=1, n_learners=4, device=torch.device("mps"))
    assert costs.device.type == "cpu" and costs.tolist() == [0.5, 1.0, 1.5, 2.0]
    u_TC = utilities(torch.empty(7, 4, device="meta"), torch.empty((), device="meta"), costs, rule)
    assert (u_TC.device.type, u_TC.shape, u_TC.dtype) == ("meta", (7, 4), torch.float32)


def test_a_mask_that_is_added_to_scores_is_refused():
    added = torch.zeros(2, 5)
    added[1, 3:] = -torch.inf
    with (
        pytest.raises(UsageError, match=r"(?s)numbers below 0.*mask == 0"),
        batch(stack_of(planned_site("a")), mask=added),
    ):
        pass


def test_every_site_takes_what_a_batch_says_to_its_own_device():
    model = stack_of(planned_site("a"), planned_site("b"))
    sites(model)["b"].to("meta")
    with batch(model, mask=torch.ones(2, 5), budgets=[1.0, 1.0]):
        said = batch_of(conversion(model))
        for name, device in (("a", "cpu"), ("b", "meta")):
            assert sites(model)[name]._of_examples(said.knob, torch.Size((2, 5))).device.type == device
            assert sites(model)[name].mask_of(torch.Size((2, 5))).device.type == device
    assert said.mask.all() and said.k_lo.tolist() == [4, 4] and said.most.tolist() == [0, 1, 2, 3, 4]


def test_metrics_and_figures_of_training_need_no_float64_where_the_model_is(monkeypatch):
    with Float64Apart(monkeypatch) as mode:
        assert Task().value(torch.tensor([1.0, 0.0]), torch.ones(2)) == 0.5
    assert mode.seen == 2
    shares_B = torch.tensor([0.25, 0.5], dtype=torch.float64)
    seen = _Seen.of([torch.empty((), device="meta")] * 5, shares_B, (shares_B, shares_B), {})
    assert (seen.shares.device.type, seen.shares.dtype, seen.shares.shape) == ("meta", torch.float32, (4,))


class MetaHoldsOnes(TorchDispatchMode):
    """Copies from `meta` to the CPU are all ones."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and args[0].is_meta and kwargs.get("device") == torch.device("cpu"):
            return torch.ones(args[0].shape, dtype=args[0].dtype)
        return func(*args, **(kwargs or {}))


def test_loads_of_a_model_on_two_devices_are_averaged():
    model = stack_of(planned_site("a"), planned_site("b"))
    usage = Usage(conversion(model).plan, CallPadding(model))
    usage.observe(sites(model)["a"], torch.full((2, 5), 2), None, torch.empty(2, 5, 8))
    usage.observe(sites(model)["b"], torch.full((2, 5), 2, device="meta"), None, torch.empty(2, 5, 8))
    with MetaHoldsOnes():
        assert torch.equal(usage.load(), torch.full((2, 5), 0.75))


ASKED = {
    "evaluate": lambda model: evaluate(model, [torch.zeros(1, 5, 16)], metric=lambda *_: 0, budgets=[1.0]),
    "export": lambda model: export(model, "unwritten", torch.zeros(1, 5, 16)),
    "meter": meter,
    "recalibrate": lambda model: recalibrate(model, [torch.zeros(1, 5, 16)]),
    "record": record,
    "set_budget": lambda model: set_budget(model, 1.0),
    "set_k": lambda model: set_k(model, 2),
    "status": status,
}


@pytest.mark.parametrize("asked", ASKED)
def test_a_model_without_weights_is_refused_in_words(asked):
    with pytest.raises(
        UsageError, match=r"^\S+: this model has no weights: it is on the meta device\n  load the weights"
    ):
        ASKED[asked](attention()[0].to("meta"))


class Accelerator(SimpleNamespace):
    """A device module such as `torch.xpu`; draws are counted by `advance`."""

    def __init__(self, devices):
        super().__init__(drawn=dict.fromkeys(devices, 0), is_initialized=lambda: True)

    def device_count(self):
        return len(self.drawn)

    def get_rng_state(self, *device):
        return torch.tensor([self.drawn[device]])

    def set_rng_state(self, state, *device):
        self.drawn[device] = int(state)


@pytest.mark.parametrize("name", ["cuda:1", "xpu:1", "mps"])
def test_a_resumed_run_draws_on_from_its_devices_generator(name, monkeypatch):
    device = torch.device(name)
    asked = () if name == "mps" else (device,)
    module = Accelerator([asked])
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    module.drawn[asked] = 5
    states = generator_states(device)
    module.drawn[asked] = 9
    restore_generators(states, device)
    assert module.drawn[asked] == 5
    restore_generators(generator_states(torch.device("cpu")), device)
    assert module.drawn[asked] == 5


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_a_capture_leaves_the_generators_of_accelerators_as_they_were(kind, monkeypatch):
    module = Accelerator([(0,), (1,)])

    class Drawing(torch.nn.Linear):
        def forward(self, x):
            module.drawn[1,] += 1
            return super().forward(x)

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: torch.device(kind))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    for name in ("device_count", "is_initialized", "get_rng_state", "set_rng_state"):  # torch 2.11 asks the module
        monkeypatch.setattr(getattr(torch, kind), name, getattr(module, name))
    assert capture(Drawing(2, 2), torch.zeros(1, 2)).method == "recorder"
    assert module.drawn == {(0,): 0, (1,): 0}


def in_numbers(original, batches):
    """Convert, measure and run a model: the plan, outputs at two budgets, their shares, an accuracy's interval."""
    planned = plan(original, batches[0], lossless=True)
    model = rewrite(original, plan(original, batches[0], sites="attn.o"))
    calibrate_on(model, masked(batches), options=Options(tokens=100, gate_steps=4))
    set_budget(model, 0.6)
    with torch.no_grad(), batch(model, budgets=[0.3, 1.0] * 4), record(model) as usage:
        output = model(batches[0])
    labelled = [(x, torch.zeros(8, dtype=torch.int64, device="cpu")) for x in batches]
    shown = str(evaluate(model, labelled, task="classify", dense=original))
    return planned.to_json(), output.tolist(), usage.shares.tolist(), shown


def test_default_devices_and_types_of_the_caller_change_nothing(monkeypatch):
    monkeypatch.setattr(measure, "GRID", (0.6,))
    original = tour_model.model()[0].eval()
    original.blocks = original.blocks[:1]
    batches = [torch.randn(8, tour_model.TOKENS, tour_model.WIDTH) for _ in range(4)]
    expected, before = in_numbers(original, batches), torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            assert in_numbers(original, batches) == expected
    finally:
        torch.set_default_dtype(before)
