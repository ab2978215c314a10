"""Closed forms in the floating types of their tensors, whatever autocast is open around them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def own_types(devices: Iterable[torch.device]) -> Iterator[None]:
    """Autocast is off inside, on `devices` and on the CPU, where float64 may live."""
    with ExitStack() as off:
        for kind in sorted({"cpu", *(device.type for device in devices)}):
            off.enter_context(torch.autocast(kind, enabled=False))
        yield
