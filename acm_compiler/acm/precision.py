"""float64 for data on any device: not all accelerators have it (Apple's mps, some XPUs), and there the CPU holds it."""

from __future__ import annotations

import torch
from torch import Tensor


def float64_device(device: torch.device) -> torch.device:
    """Where float64 tensors for data on `device` live."""
    return device if device.type in ("cpu", "cuda", "meta") else torch.device("cpu")


def to_float64(tensor: Tensor) -> Tensor:
    """`tensor` in float64, on `float64_device` of its own."""
    # two steps: mps refuses to copy to the CPU and into float64 at once
    return tensor.to(float64_device(tensor.device)).double()
