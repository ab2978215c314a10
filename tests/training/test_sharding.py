"""Sharded training ends where one process ends, and each process holds its part of what is trained."""

import copy
import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import acm_compiler as acm
from acm_compiler.errors import StorageError, UsageError
from acm_compiler.training.machine import Machine, open_machine
from acm_compiler.training.sharding import gather, shard, units
from tests.helpers import ROOT
from tests.helpers.launch import free_port, launch
from tests.helpers.models import Mlp, Residual, Stack, example
from tests.helpers.training_process import weights
from tests.helpers.training_ranks import CONFIGS, train_each
from tests.helpers.training_runs import fitted, metrics
from tests.helpers.training_tiny import make_model

SHARDED = "tests.helpers.sharded_ranks"
QUICK = ("distill_accumulated", "gate", "finetune_accumulated", "uneven", "recalibrated")
# as `accelerate config` writes it
ACCELERATE = """compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: "no"
num_machines: 1
num_processes: 2
fsdp_config:
  fsdp_version: 2
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The weights that one process ends with, by phase, and where it wrote its metrics."""
    directory = tmp_path_factory.mktemp("one")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = {name: weights(model) for name, model in train_each(directory).items()}
    found["half"] = weights(train_each(directory / "half", ["finetune"], precision="bf16")["finetune"])
    torch.set_num_threads(threads)
    return found, directory


def compare(ranks, expected, *, phase, atol=1e-5):
    for name, tensor in expected.items():
        found = [rank[f"{phase}/{name}"] for rank in ranks]
        assert all(found[0].equal(other) for other in found[1:]), name
        torch.testing.assert_close(found[0], tensor, rtol=0, atol=atol)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    directory = tmp_path_factory.mktemp("two")
    return launch(SHARDED, directory, *QUICK), directory


@pytest.mark.parametrize("phase", QUICK[:3])
def test_two_sharded_processes_equal_one(phase, two, alone):
    compare(two[0], alone[0][phase], phase=phase)
    for found, expected in zip(metrics(two[1] / phase), metrics(alone[1] / phase), strict=True):
        assert found.pop("phase") == expected.pop("phase")
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_each_process_holds_its_part(two):
    whole = sum(parameter.nbytes for parameter in make_model().parameters())
    for name in ("distill", "gate", "finetune"):
        parameters, moments = zip(*(rank[f"held/{name}"].tolist() for rank in two[0]), strict=True)
        assert sum(parameters) == whole
        assert max(parameters) <= 0.51 * whole  # axes of odd length are cut unevenly
        assert max(moments) <= 0.51 * sum(moments)


def test_a_layer_that_ran_on_one_process_alone_gets_its_gradient(two):
    for rank in two[0]:
        assert rank["top/alone"].abs().max() > 0
        torch.testing.assert_close(rank["top/sharded"], rank["top/alone"])


def test_budgets_of_a_sharded_model_are_measured_anew(two):
    for rank in two[0]:
        assert len(rank["rows/whole"]) > 2
        torch.testing.assert_close(rank["rows/sharded"], rank["rows/whole"])


@pytest.mark.slow
def test_four_sharded_processes_equal_one(alone, tmp_path):
    whole = sum(parameter.nbytes for parameter in make_model().parameters())
    ranks = launch(SHARDED, tmp_path, *CONFIGS, "half", "resumed", "uneven", processes=4)
    for phase in CONFIGS:
        compare(ranks, alone[0][phase], phase=phase)
    # a gradient that bfloat16 rounds across 0 has Adam step the other way
    compare(ranks, alone[0]["half"], phase="half", atol=5e-3)
    apart = torch.cat([(ranks[0][f"half/{name}"] - t).flatten().abs() for name, t in alone[0]["half"].items()])
    assert apart.mean() < 1e-4
    assert max(rank["held/finetune"][0] for rank in ranks) <= 0.3 * whole
    for rank in ranks:  # an interrupted run ends bit for bit as the other
        ends = [{key: rank[f"{name}/{key}"] for key in weights(make_model())} for name in ("resumed", "straight")]
        assert all(tensor.equal(ends[1][key]) for key, tensor in ends[0].items())
    assert metrics(tmp_path / "resumed") == metrics(tmp_path / "straight")


@pytest.mark.slow
def test_two_nodes_on_one_host(two, tmp_path):
    start = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    start += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    work = ["-m", SHARDED, str(tmp_path), "finetune_accumulated"]
    nodes = [
        subprocess.Popen([*start, "--node-rank", str(node), *work], cwd=ROOT, env=environment) for node in range(2)
    ]
    assert [node.wait(600) for node in nodes] == [0, 0]
    for rank in range(2):
        for name, tensor in load_file(tmp_path / f"rank{rank}.safetensors").items():
            assert tensor.equal(two[0][rank][name]), name


@pytest.mark.slow
def test_accelerate_shards_by_its_own_configuration(two, tmp_path):
    pytest.importorskip("accelerate")
    (tmp_path / "fsdp.yaml").write_text(ACCELERATE)
    launcher = ("accelerate.commands.launch", "--config_file", str(tmp_path / "fsdp.yaml"), "--main_process_port")
    phase = "finetune_accumulated"
    ranks = launch("tests.helpers.training_ranks", tmp_path, phase, launcher=launcher)
    (facts,) = (tmp_path / phase / "state").glob("*/state.json")
    assert json.loads(facts.read_text())["sharded"] is True
    for found, expected in zip(ranks, two[0], strict=True):
        assert all(found[name].equal(expected[name]) for name in expected if name.startswith(phase))


@pytest.fixture
def one_process(tmp_path):
    """A group of this process alone, and the machine of a sharded run in it."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield Machine(rank=0, world=1, device=torch.device("cpu"), dtype=None, sharded=True)
    dist.destroy_process_group()


def test_a_gathered_model_is_what_it_was_and_can_be_sharded_again(one_process):
    model = fitted(make_model())
    before, classes = weights(model), [type(module) for module in model.modules()]
    x = torch.randn(2, 5, 6)
    expected = model(x)
    for _ in range(2):
        shard(model, one_process)
        assert isinstance(model, FSDPModule) and model(x).equal(expected)
        gather(model)
        again = copy.deepcopy(model)
        assert [type(module) for module in again.modules()] == classes
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in again.modules())
        assert all(tensor.equal(before[name]) for name, tensor in weights(again).items())


def test_layers_and_dense_regions_are_units(one_process):
    model = make_model()
    found = units(model)
    acms = acm.sites(model).values()
    assert found == [*(site.dense for site in acms), *model.blocks]


@pytest.mark.parametrize("parts", [("gate", "learners"), ("learners",), ("gate",)], ids="-".join)
def test_parts_of_an_acm_that_are_sharded_alone_are_refused(parts, one_process):
    model = fitted(make_model())
    site = next(iter(acm.sites(model).values()))
    for part in parts:
        fully_shard(getattr(site, part))
    with pytest.raises(UsageError, match=r"each process holds a part.*\n.*fully_shard\(acm\), or a module around"):
        model(torch.randn(2, 5, 6))


@pytest.mark.parametrize(
    "call",
    [lambda m: acm.calibrate(m, [torch.randn(2, 5, 6)]), acm.quantize, acm.revert],
    ids=["calibrate", "quantize", "revert"],
)
def test_what_needs_whole_parameters_is_refused_with_what_to_do(call, one_process):
    model = fitted(make_model())
    shard(model, one_process)
    with pytest.raises(UsageError, match=r"needs whole parameters.*\n.*before fully_shard"):
        call(model)


def test_a_state_that_cannot_be_written_in_parts_is_said(monkeypatch, tmp_path):
    from acm_compiler.training import state

    def fail(tensors, directory):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(state, "write_parts", fail)
    machine = Machine(rank=0, world=1, device=torch.device("cpu"), dtype=None, sharded=True)
    store = state.StateStore(tmp_path, machine, decisions={})
    with pytest.raises(StorageError, match="No space left on device"):
        store.save(make_model(), state.Position(step=1), metrics_bytes=0, optimization={"optimizer": {"state": {}}})
    assert not list((tmp_path / "state").iterdir())


def sharded_by_accelerate(monkeypatch, **options):
    """Environment as `accelerate launch --use_fsdp` makes it for two processes."""
    for name, value in {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", **options}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("acm_compiler.runtime.ranks.world", lambda: 2)
    monkeypatch.setattr("acm_compiler.runtime.ranks.rank", lambda: 0)


def test_fsdp_of_accelerate_shards_a_recipe(monkeypatch):
    sharded_by_accelerate(monkeypatch)
    assert open_machine(sharded=False).sharded


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"FSDP_VERSION": "1"}, r"asks for fsdp_version.*\n.*fsdp_version: 2"),
        ({"FSDP_OFFLOAD_PARAMS": "true"}, r"asks for fsdp_offload_params.*\n.*run.sharded=true"),
        ({"ACCELERATE_USE_FSDP": "false", "ACCELERATE_USE_DEEPSPEED": "true"}, r"DEEPSPEED is not supported"),
    ],
)
def test_what_accelerate_asks_for_beside_is_refused(options, message, monkeypatch):
    sharded_by_accelerate(monkeypatch, **options)
    with pytest.raises(UsageError, match=message):
        open_machine(sharded=False)


def test_work_that_shards_nothing_refuses_fsdp(monkeypatch):
    sharded_by_accelerate(monkeypatch)
    with pytest.raises(UsageError, match=r"only the phases of a recipe.*\n.*--multi_gpu"):
        open_machine()


def test_fp16_is_refused_where_parameters_are_in_parts(monkeypatch):
    sharded_by_accelerate(monkeypatch)
    with pytest.raises(UsageError, match=r"no fp16"):
        open_machine("fp16", sharded=True)


def test_a_sharded_model_is_saved_as_the_model_that_it_was(one_process, tmp_path):
    original = Stack(Residual(Mlp()), Residual(Mlp())).eval()
    model = acm.rewrite(original, acm.plan(original, example(), sites="mlp"))
    acm.calibrate(model, [example() for _ in range(8)], tokens=200, budgets=[0.5])
    acm.set_budget(model, 0.5)
    x = example()
    with torch.no_grad():
        expected = model(x)
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in model.blocks:
        fully_shard(block, mp_policy=half)
    fully_shard(model, mp_policy=half)
    with torch.no_grad():  # gates and learners are gathered in bfloat16, parts stay as they are
        torch.testing.assert_close(model(x).float(), expected, rtol=0.05, atol=0.05)
    acm.save(model, tmp_path / "saved")
    assert isinstance(model, FSDPModule)
    assert json.loads((tmp_path / "saved/model.json").read_text())["class"] == "tests.helpers.models.Stack"
    with torch.no_grad():
        assert acm.load(tmp_path / "saved", base_model=original)(x).equal(expected)
