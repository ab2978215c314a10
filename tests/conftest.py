"""Settings shared by all tests: no network, one thread, the same random numbers every time, nothing left behind."""

import os
import random
import signal
import sys

# before torch is loaded: on busy cores two threads wait for each other at every tiny operation
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Inductor's second process would cost more than the few kernels of a test
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import pytest
import torch

from tests.helpers.global_state import global_state, left_behind


def pytest_ignore_collect(collection_path, config):
    """Leave out files without a GPU test under `-m gpu`: a GPU machine may lack what they need."""
    if config.option.markexpr == "gpu" and collection_path.suffix == ".py":
        return True if "pytest.mark.gpu" not in collection_path.read_text(encoding="utf-8") else None
    return None


@pytest.fixture(scope="module")
def one_thread():
    """One thread for all tests of a file: bits are promised for equal numbers of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def seeded():
    """Every test starts from the same state of all generators."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


@pytest.fixture(autouse=True)
def leaves_nothing_behind():
    """No test changes a setting for those after it, whichever they are."""
    before = global_state()
    yield
    assert not (left := left_behind(before, global_state())), "left behind: " + "; ".join(left)


@pytest.fixture(autouse=True, scope="module")
def nothing_compiled():
    """No graph of another file's counts against Dynamo's limit of them or answers for one of this file's."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture(autouse=True, scope="session")
def interruptible():
    """A session started in the background ignores Ctrl-C, and what it starts would too: tests send that signal."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)


@pytest.fixture(scope="module")
def rough_budgets():
    """A budget table of few rows, found by few forwards: most of the time of a recipe on a tiny model goes there.

    For files that are about something else; tests/runtime/test_measure_budgets.py has the whole search.
    """
    from acm_compiler.runtime import measure_budgets

    with pytest.MonkeyPatch.context() as rough:
        rough.setattr(measure_budgets, "GRID", (0.5,))
        rough.setattr(measure_budgets, "_STEPS", 3)
        yield
