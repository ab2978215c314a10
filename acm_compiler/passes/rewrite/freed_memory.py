"""Memory that is freed while a model is offloaded: held to be used again, or given back to the system at once.

glibc holds freed memory below a size of its own, since the system takes time to give pages. Tensors that are kept, as
for gradients or in files, split the room of those that were freed, and the next large one may not fit into it: one
batch of a model with 320 MiB of weights left 571 MiB held.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path

# mallopt: the size from which memory goes back at once, and how much of what was freed is held at most
_THRESHOLD, _HELD = -3, -1
# all of a weight's size goes back, or little of an activation's; 32 MiB is the most that glibc allows
_WEIGHTS, _ACTIVATIONS, _AT_MOST = 2**17, 2**25, 2**26
# bytes with which a process can afford to hold what was freed
_AMPLE = 2**33
# Linux's file of what the container may have, in bytes, or "max"
_CONTAINER = Path("/sys/fs/cgroup/memory.max")


def hold(*, activations: bool) -> None:
    """Hold what is freed from now on: of the size of activations, or only what is smaller than weights."""
    _mallopt(_THRESHOLD, _ACTIVATIONS if activations else _WEIGHTS)
    _mallopt(_HELD, _AT_MOST)


def give_back() -> None:
    """Give what was freed back to the system."""
    getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)


def has_room() -> bool:
    """True where this process may have so much memory that what was freed can be held while gradients are computed."""
    return _room() >= _AMPLE


def _room() -> int:
    """Bytes that this process may have, at most: of the machine, of its container, by its own limits."""
    room = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")] if hasattr(os, "sysconf") else []
    with suppress(OSError, ValueError):
        room.append(int(_CONTAINER.read_text()))
    with suppress(ImportError):
        import resource

        limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS)]
        room += [limit for limit in limits if limit != resource.RLIM_INFINITY]
    return min(room, default=0)


def _mallopt(setting: int, value: int) -> None:
    getattr(ctypes.CDLL(None), "mallopt", lambda *_: None)(setting, value)
