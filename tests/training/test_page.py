"""The page about models in parts: its commands run, in a copy of the examples."""

import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from ruamel.yaml import YAML

import acm_compiler as acm
from tests.helpers import ROOT
from tests.helpers.launch import free_port
from tests.training.test_sharding import ACCELERATE

PAGE = (ROOT / "docs/shard.md").read_text()
LINES = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
NODES = [line for line in LINES if "--nnodes" in line]
ALONE = [line for line in LINES if "--nnodes" not in line]


def start(line, folder):
    """A command of the page as a process."""
    program, *words = shlex.split(line)
    assert program == "torchrun"
    command = [sys.executable, "-m", "torch.distributed.run", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(ROOT / "examples", tmp_path / "examples")


@pytest.mark.slow
@pytest.mark.parametrize("line", ALONE, ids=lambda line: re.search(r"\w+\.(py|yaml)", line)[0])
def test_a_command_of_the_page_runs(line, folder, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    process = start(line, folder)
    output = process.communicate(timeout=600)[0].decode()
    assert process.returncode == 0, output[-3000:]
    if "--out" in line:
        assert len(acm.sites(acm.load(folder / "out/sharded", allow_code=True))) == 2


@pytest.mark.slow
def test_the_commands_for_two_machines_run_on_one(folder):
    port = free_port()
    nodes = [start(line.replace("29500", str(port)), folder) for line in NODES]
    assert len(nodes) == 2
    outputs = [node.communicate(timeout=600)[0].decode() for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert (folder / "out/nodes/model.safetensors").exists()


def test_the_configuration_of_accelerate_is_the_one_that_is_run():
    shown = re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[1]
    assert YAML().load(shown) == YAML().load(ACCELERATE)


def test_the_script_for_slurm_is_bash_and_names_options_that_exist():
    script = re.search(r"```bash\n(.*?)```", PAGE, re.DOTALL)[1]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    torchrun = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--help"], capture_output=True, text=True, check=True
    ).stdout
    options = set(re.findall(r" (--[a-z-]+)", script[script.index("torchrun") : script.index("-m acm_compiler")]))
    assert options and all(option in torchrun for option in options)
