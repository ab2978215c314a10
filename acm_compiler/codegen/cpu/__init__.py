"""The native CPU kernel as the CPU implementation of `acm::learners`; without it the reference stays in charge."""

from __future__ import annotations

import ctypes
import logging
import math
import sys
from collections.abc import Iterable

import torch
from torch import Tensor

from acm_compiler import env
from acm_compiler.acm.ops import LIBRARY
from acm_compiler.codegen.compare import TOLERANCE, checked, relative_error
from acm_compiler.codegen.cpu.build import levels_here, library_file
from acm_compiler.errors import KernelUnavailable
from acm_compiler.site import ACTIVATIONS

DTYPES = (torch.float32, torch.bfloat16)
_LOG = logging.getLogger("acm_compiler.backend")


def take_over() -> bool:
    """Make the native kernel the implementation on CPUs; False when the reference stays (logged in one INFO line).

    KernelUnavailable when ACM_KERNEL=cpu asks for the kernel and it cannot be had.
    """
    chosen = env.kernel()
    if chosen not in (None, "cpu"):
        _LOG.info("ACM_KERNEL=%s: ACMs run without the native CPU kernel", chosen)
        return False
    if chosen is None and sys.platform == "darwin":
        _LOG.info("ACMs run on plain torch operations: on macOS these use matrix units, the native CPU kernel does not")
        return False
    try:
        file = library_file()
    except KernelUnavailable as error:
        if chosen == "cpu":
            raise
        _LOG.info("ACMs run on plain torch operations, not on the native CPU kernel: %s", error)
        return False
    torch.ops.load_library(str(file))
    library = ctypes.CDLL(str(file))
    library.acm_keep_panels(ctypes.c_bool(False))  # of the sample
    verify_tiles(library)
    library.acm_keep_panels(ctypes.c_bool(env.keeps_panels()))
    if env.check():
        torch.library.impl("acm::learners", "CPU", checked(torch.ops.acm.learners_cpu), lib=LIBRARY)
    else:
        library.acm_take_over()
    return True


def verify_tiles(library: ctypes.CDLL) -> bool:
    """Compare products by tile registers (AMX) with those by vectors; False, and a line in the log, if they differ.

    The kernel then goes on without tiles. True also where the processor has none.
    """
    library.acm_want_tiles.restype = ctypes.c_bool
    if not library.acm_want_tiles(True):
        return True
    by_tiles = _sample()
    library.acm_want_tiles(False)
    by_vectors = _sample()
    same = relative_error(by_tiles, by_vectors) <= TOLERANCE[torch.bfloat16]
    library.acm_want_tiles(same)
    if not same:
        _LOG.warning("the CPU kernel goes on without AMX: its products differ from those of vectors on this machine")
    return same


def _sample() -> Tensor:
    """The native kernel's output, in float32, for a small MLP in bfloat16; of every k, with sizes that fill no tile.

    The buffers that a thread keeps are small after it.
    """

    def wave(*shape: int) -> Tensor:
        return torch.arange(math.prod(shape), dtype=torch.float32).sin().view(shape).bfloat16()

    x, k = wave(17, 34), torch.arange(17) % 4
    weights = (wave(3, 2, 34), wave(3, 2), None, None, wave(10, 3, 2), wave(4, 10), *[None] * 5)
    return torch.ops.acm.learners_cpu(x, k, *weights, form="mlp", act="relu").float()


def not_covered(*, act: str, dtype: torch.dtype, is_quantized: bool = False) -> str | None:
    """Reason why the native kernel hands such an ACM to the reference, None when it does not."""
    if is_quantized and not levels_here()[0].has_bytes:
        return "the native CPU kernel has products of bytes for AVX2, AVX-512 and ARM's dot products alone"
    if act not in ACTIVATIONS:
        return f"activation {act} is not supported by the native CPU kernel"
    return gate_not_covered((dtype,))


def gate_not_covered(dtypes: Iterable[torch.dtype]) -> str | None:
    """The same for a gate: the types of its tokens and of its weights."""
    unknown = [str(dtype).removeprefix("torch.") for dtype in dtypes if dtype not in DTYPES]
    return f"the native CPU kernel supports float32 and bfloat16, not {unknown[0]}" if unknown else None
