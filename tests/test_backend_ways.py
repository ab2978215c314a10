"""The other ways in which compiled models are used: phases of decoding, vmap, data parallel training."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

from tests.backend_ranks import RANKS, examples, gradients, make_model
from tests.build import planned_site, stack_of

ONE_THREAD = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent)}
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def fresh():
    """Graphs of other tests do not count."""
    torch._dynamo.reset()
    counters.clear()


def test_choices_of_both_phases_change_without_a_new_graph():
    model = stack_of(planned_site("a"), planned_site("b", k_min=1))
    uniform = copy.deepcopy(model)
    compiled = torch.compile(model, backend="acm", fullgraph=True, dynamic=True)
    prompt, token = torch.randn(3, 5, 8), torch.randn(3, 1, 8)
    with torch.no_grad():
        for prefill, decode in ((4, 1), (2, 4), (1, 2)):
            set_k(model, prefill, phase="prefill")
            set_k(model, decode, phase="decode")
            for x, k in ((prompt, prefill), (token, decode)):
                set_k(uniform, k)
                torch.testing.assert_close(compiled(x), uniform(x))
    assert counters["stats"]["unique_graphs"] == 2  # inputs of one token per example have their own


def set_k(model, k: int, *, phase=None) -> None:
    for site in model.acms:
        site.set_choices(knob=0.0, k_lo=k, k_hi=k, phase=phase)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_model_may_be_mapped_over(compiled):
    model = stack_of(planned_site("a"), planned_site("b", kind="gated_mlp", learner_act="silu"))
    # by name: torch 2.11 asks a callable without one for its repr, which it cannot compile for a Sequential
    mapped = torch.func.vmap(lambda part: model(part))
    x = torch.randn(4, 3, 5, 8)
    with torch.no_grad():
        answer = torch.compile(mapped, backend="acm", fullgraph=True)(x) if compiled else mapped(x)
        torch.testing.assert_close(answer, torch.stack([model(part) for part in x]))


@pytest.fixture
def one_rank(tmp_path):
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_data_parallel_training_compiles_to_the_same_gradients():
    model, x = stack_of(planned_site("a", k_min=1), planned_site("b")), torch.randn(3, 5, 8)
    set_k(model, 3)
    learned = {name: p for name, p in model.named_parameters() if ".learners." in name}
    expected = torch.autograd.grad(model(x).square().sum(), list(learned.values()))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in learned)
    compiled = torch.compile(DistributedDataParallel(model), backend="acm")
    compiled(x).square().sum().backward()
    assert counters["stats"]["unique_graphs"] >= 1
    for parameter, grad in zip(learned.values(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_two_ranks_train_compiled_with_the_gradients_of_one_eager_process(tmp_path):
    command, environment = [sys.executable, "-m", "tests.backend_ranks", str(tmp_path)], os.environ | ONE_THREAD
    runs = [subprocess.Popen([*command, str(rank)], env=environment, stderr=subprocess.PIPE) for rank in range(RANKS)]
    for run in runs:
        _, errors = run.communicate(timeout=300)
        assert run.returncode == 0, errors.decode()
    expected = gradients(make_model(), examples())
    for rank in range(RANKS):
        found = torch.load(tmp_path / f"rank{rank}.pt")
        assert found.keys() == expected.keys()
        for name, grad in expected.items():
            torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-6)
