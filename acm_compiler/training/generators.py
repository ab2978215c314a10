"""The global random generators: seeded per phase, captured and restored for exact continuation."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from acm_compiler.data.draws import derive


def seed_generators(*names: int) -> None:
    """Start torch's (all devices'), Python's and NumPy's global generators from integers that name the use."""
    seed = derive(*names)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def generator_states(device: torch.device) -> dict[str, Any]:
    """The state of every generator this process draws from, as tensors and plain values."""
    name, keys, place, has_gauss, gauss = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (
            str(name),
            torch.from_numpy(np.asarray(keys, dtype=np.int64)),
            int(place),
            int(has_gauss),
            float(gauss),
        ),
    }
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(*_named(device))
    return states


def restore_generators(states: dict[str, Any], device: torch.device) -> None:
    """Continue from what `generator_states` captured."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    if device.type in states:
        torch.get_device_module(device).set_rng_state(states[device.type], *_named(device))


def _named(device: torch.device) -> tuple[torch.device, ...]:
    """How a device module is told which device: by no argument where there is only one."""
    return () if device.type == "mps" else (device,)
