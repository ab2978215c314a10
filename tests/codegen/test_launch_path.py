"""Launches without a GPU: Triton's own launcher starts, compiles and traces on a driver that does nothing."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.helpers import ROOT

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler builds the stub of the driver")


def run_cases(*options: str) -> None:
    """Run tests/helpers/faked_gpu_cases.py in a process of its own, which then believes in a GPU."""
    command = [sys.executable, "-m", "pytest", "tests/helpers/faked_gpu_cases.py", "-q", "-x", *options]
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_calls_and_graphs_start_what_they_should():
    run_cases("-m", "not slow")


@pytest.mark.slow
def test_warm_up_leaves_nothing_to_compile_and_inductor_starts_kernels():
    run_cases("-m", "slow")
