"""Random numbers as a function of what they are for, so that no order of asking can change them.

Everything random about data is derived from integers that name it: (seed, epoch, index). An example is then the
same whoever loads it, after whatever came before: the base of exact resumption and of runs on several processes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = (1 << 64) - 1


def _scramble(x: np.ndarray) -> np.ndarray:
    """The splitmix64 finaliser, on uint64 of any shape."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_FIRST)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_SECOND)
    return x ^ (x >> np.uint64(31))


def derive(*names: int) -> int:
    """One seed in [0, 2**63) for a sequence of integers; the order counts."""
    state = np.zeros(1, dtype=np.uint64)
    for name in names:
        state = _scramble((state ^ np.uint64(name & _WORD)) + np.uint64(_STEP))
    return int(state[0] >> np.uint64(1))


def words(seed: int, indices: Sequence[int] | np.ndarray, count: int) -> np.ndarray:
    """Random uint64 [B, count]: row b depends on `seed` and `indices[b]` alone."""
    rows = np.asarray(indices, dtype=np.int64).astype(np.uint64)
    rows = _scramble(rows * np.uint64(_STEP) + np.uint64(derive(seed)))
    lanes = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_STEP)
    return _scramble(rows[:, None] + lanes[None, :])


def uniform(seed: int, indices: Sequence[int] | np.ndarray, count: int) -> torch.Tensor:
    """Floats [B, count] in [0, 1): row b depends on `seed` and `indices[b]` alone."""
    bits = words(seed, indices, count) >> np.uint64(40)
    return torch.from_numpy(bits.astype(np.float32)) * 2.0**-24


def normal(seed: int, indices: Sequence[int] | np.ndarray, count: int) -> torch.Tensor:
    """Floats [B, count], about normal (sums of four uniforms), mean 0 and variance 1."""
    quarters = words(seed, indices, count).view(np.uint16).reshape(len(indices), count, 4)
    total = quarters.astype(np.float32).sum(-1) * np.float32(2.0**-16)
    return torch.from_numpy((total - 2.0) * np.float32(3.0**0.5))


@contextmanager
def seeded(*names: int) -> Iterator[None]:
    """Inside, torch's CPU generator, `random` and NumPy's old global one start from `names`; restored after."""
    seed = derive(*names)
    with generators_restored():
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        yield


@contextmanager
def generators_restored() -> Iterator[None]:
    """After it, these three generators are as they were before."""
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])
