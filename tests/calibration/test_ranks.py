"""Two processes that calibrate together see what one would have seen, and end with one model."""

import os
import subprocess
import sys

import pytest
import torch

from acm_compiler.calibration.answer import default_answer
from tests.helpers import ROOT
from tests.helpers.calibration_tiny import make_tiny, observed, texts


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Results of each of two processes."""
    directory = tmp_path_factory.mktemp("ranks")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.helpers.calibration_ranks", str(directory)]
    runs = [
        subprocess.Popen([*command, str(rank)], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for run in runs:
        _, errors = run.communicate(timeout=600)
        assert run.returncode == 0, errors
    return [torch.load(directory / f"rank{rank}.pt") for rank in range(2)]


def test_what_they_saw_is_joined(found):
    batches = texts(16)
    whole, _ = observed(make_tiny(), batches, answer=default_answer, seed=0)
    halves = [observed(make_tiny(), batches[r::2], answer=default_answer, seed=r)[0] for r in range(2)]
    for name, record in whole.items():
        tokens, mean, covariance, metric, sample = found[0]["seen"][name]
        assert tokens == record.tokens
        torch.testing.assert_close(mean, record.moments.mean)
        torch.testing.assert_close(covariance, record.moments.covariance, rtol=1e-5, atol=1e-7)
        # the projections differ from process to process, so the metric is compared with that of the halves
        wanted = sum(half[name].metric.value(12, record.home) * half[name].tokens for half in halves) / tokens
        torch.testing.assert_close(metric, wanted)
        rows = {tuple(row) for row in record.sample.vectors.tolist()}
        assert {tuple(row) for row in sample.tolist()} <= rows and len(sample) == len(rows)


def test_they_end_with_one_model_and_one_table(found):
    first, second = found
    assert first["table"] == second["table"] and first["damage"] == second["damage"]
    for name, tensor in first["weights"].items():
        assert torch.equal(tensor, second["weights"][name]), name
