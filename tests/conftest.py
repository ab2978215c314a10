"""Settings shared by all tests: no network, one thread, the same random numbers every time."""

import os
import signal

# before torch is loaded: on busy cores two threads wait for each other at every tiny operation
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch


def pytest_ignore_collect(collection_path, config):
    """With `-m gpu` files without such a test are not imported: a GPU machine may lack what they need."""
    if config.option.markexpr == "gpu" and collection_path.suffix == ".py":
        return True if "pytest.mark.gpu" not in collection_path.read_text(encoding="utf-8") else None
    return None


@pytest.fixture(autouse=True)
def seeded():
    """Every test starts from the same generator state."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def interruptible():
    """A session started in the background ignores Ctrl-C, and what it starts would too: tests send that signal."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)
