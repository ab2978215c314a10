"""Number types of closed forms: float64 where a device has it, and no autocast around them.

Apple's mps and some XPUs have no float64; there the CPU holds what needs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch import Tensor


def float64_device(device: torch.device) -> torch.device:
    """The device of float64 tensors for data on `device`."""
    return device if device.type in ("cpu", "cuda", "meta") else torch.device("cpu")


def to_float64(tensor: Tensor) -> Tensor:
    """`tensor` in float64, on `float64_device` of its own."""
    # two steps: mps refuses to copy to the CPU and into float64 at once
    return tensor.to(float64_device(tensor.device)).double()


def autocast_type(device: torch.device) -> torch.dtype | None:
    """The type that autocast computes in on `device`; None where it is off, and on the meta device, which has none."""
    kind = device.type
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Autocast is off inside for tensors on `device`."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


@contextmanager
def own_types() -> Iterator[None]:
    """Autocast is off inside, on the CPU, where float64 may live, and on the accelerator, if there is one."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    with ExitStack() as off:
        for kind in ("cpu",) if accelerator is None else ("cpu", accelerator.type):
            off.enter_context(torch.autocast(kind, enabled=False))
        yield
