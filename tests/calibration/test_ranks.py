"""Processes that calibrate together share batches out, and end where one process ends."""

import pytest
import torch

from tests.helpers.calibration_ranks import calibrated
from tests.helpers.launch import run_all


@pytest.fixture(scope="module")
def alone():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield calibrated()
    torch.set_num_threads(threads)


def results(directory, processes):
    run_all("tests.helpers.calibration_ranks", str(directory), processes=processes)
    return [torch.load(directory / f"rank{rank}.pt") for rank in range(processes)]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return results(tmp_path_factory.mktemp("ranks"), 2)


def check(ranks, alone):
    for found in ranks:
        assert found["examples"] == alone["examples"]
        torch.testing.assert_close(found["seen"], alone["seen"], rtol=1e-9, atol=1e-12)
        for part in ("weights", "rows", "damage"):  # gates are fitted in float32
            torch.testing.assert_close(found[part], alone[part], rtol=1e-5, atol=1e-5)
    for name, tensor in ranks[0]["weights"].items():
        assert all(tensor.equal(found["weights"][name]) for found in ranks), name


def test_two_processes_end_as_one(two, alone):
    assert all(len(vectors) == 100 < tokens for tokens, vectors, _ in alone["seen"].values())
    check(two, alone)


@pytest.mark.slow
def test_four_processes_end_as_one(alone, tmp_path):
    check(results(tmp_path, 4), alone)


def test_batches_that_differ_are_refused(two):
    for found in two:
        assert "must read the same batches" in found["refused"]
