"""Models on other devices than the CPU, told from the CPU by `meta` and by stand-ins for an accelerator's module."""

from types import SimpleNamespace

import pytest
import torch

from acm_compiler.acm.reference import choose_k
from acm_compiler.calibration import lowest_k
from acm_compiler.conversion import sites
from acm_compiler.measure import _mean_over_ranks, _Search
from acm_compiler.passes.capture import capture
from acm_compiler.training.generators import generator_states, restore_generators
from tests.build import planned_site, stack_of


@pytest.mark.parametrize("rule", ["damage", "logits"])
def test_knobs_are_guessed_where_the_scores_are(rule, monkeypatch):
    model = stack_of(planned_site("a"), planned_site("b", k_min=1))
    chosen = []

    def choose(u_TC, *bounds):
        chosen.append(choose_k(u_TC, *bounds))
        return torch.full(chosen[-1].shape, 2)  # what was chosen has no value on meta

    monkeypatch.setattr(lowest_k, "choose_k", choose)
    for acm in sites(model).values():
        acm.gate.rule = rule
    scores = {name: torch.empty(7, acm.count - acm.k_min + 1, device="meta") for name, acm in sites(model).items()}
    assert lowest_k._share_of(model, scores, 0.3, 1) == pytest.approx(0.5)
    assert [(k_T.device.type, k_T.shape) for k_T in chosen] == [("meta", (7,))] * 2


class Sent(Exception):
    """A sum over processes began."""


def test_processes_add_up_shares_on_the_models_device(monkeypatch):
    def send(tensor):
        raise Sent(tensor.device.type)

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", send)
    search = _Search(stack_of(planned_site("a")).to("meta"), [], 0, None)
    with pytest.raises(Sent, match="meta"):
        _mean_over_ranks(torch.rand(3, dtype=torch.float64), search.device)


class Accelerator(SimpleNamespace):
    """What `torch.xpu` and its like are asked for; draws are counted by `advance`."""

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
    assert capture(Drawing(2, 2), torch.zeros(1, 2)).method == "recorder"
    assert module.drawn == {(0,): 0, (1,): 0}
