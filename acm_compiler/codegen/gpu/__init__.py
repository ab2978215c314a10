"""`acm::learners` on a CUDA device by Triton kernels: dispatch, layer 1, layer 2; else the reference, and why."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch

from acm_compiler import env
from acm_compiler.acm.ops import SITES, VECTOR_KERNELS
from acm_compiler.codegen.gpu.spec import DTYPES
from acm_compiler.codegen.gpu.stages import Machine, puts_fences, takes_turns_on
from acm_compiler.errors import KernelUnavailable
from acm_compiler.site import ACTIVATIONS

OLDEST = 80
"""The compute capability that the kernels need."""
UNBUILT: dict[Hashable, str] = {}
"""Kinds of calls whose kernels could not be built, and why."""
_LOG = logging.getLogger("acm_compiler.backend")


def take_over() -> bool:
    """Make the Triton kernels the implementation on CUDA devices; False when the reference stays (one INFO line).

    KernelUnavailable when ACM_KERNEL=triton asks for the kernels and they cannot be had.
    """
    chosen = env.kernel()
    if chosen not in (None, "triton"):
        _LOG.info("ACM_KERNEL=%s: ACMs run without the Triton kernels", chosen)
        return False
    lacking = _lacking()
    if lacking is not None:
        if chosen == "triton":
            raise KernelUnavailable(lacking, fix=f"unset {env.KERNEL}")
        _LOG.info("ACMs run on plain torch operations, not on the Triton kernels: %s", lacking)
        return False
    from acm_compiler.codegen.gpu.calls import operators  # imports triton

    operators.register(check=env.check())
    if not env.check():
        from acm_compiler.codegen.gpu.calls import traced
        from acm_compiler.codegen.gpu.calls.sites import run_site
        from acm_compiler.codegen.gpu.gradients import operators as gradients
        from acm_compiler.codegen.gpu.gradients import rule
        from acm_compiler.codegen.gpu.gradients import traced as traced_gradients

        for part in (traced, gradients, traced_gradients, rule):
            part.register()
        SITES["cuda"] = run_site
        if is_here() and current_machine().arch >= OLDEST:
            VECTOR_KERNELS.add("cuda")
    return True


def _lacking() -> str | None:
    """Obstacle to the kernels in this installation, None where there is none."""
    if torch.version.hip is not None:
        return "the kernels hold instructions of NVIDIA GPUs, and this torch is built for AMD"
    return "Triton is not installed" if importlib.util.find_spec("triton") is None else None


def not_covered(
    *, form: str, act: str, dtype: torch.dtype, shape: tuple[int, ...], arch: int, is_quantized: bool = False
) -> str | None:
    """Reason why such an ACM is handed to the reference, None when the kernels run it. shape: of w_in."""
    if is_quantized:
        return "the Triton kernels do not support quantised learners"
    if act not in ACTIVATIONS:
        return f"activation {act} is not supported by the Triton kernels"
    return _machine_lacks(dtype, arch) or UNBUILT.get((form, act, dtype, shape))


def gate_not_covered(dtypes: tuple[torch.dtype, ...], *, width: int, arch: int) -> str | None:
    """Reason why such a gate is handed to the reference, None when the kernel runs it."""
    lacking = next((reason for dtype in dtypes if (reason := _machine_lacks(dtype, arch))), None)
    return lacking or UNBUILT.get((dtypes, width))


@contextmanager
def unless_unbuilt(kind: Hashable) -> Iterator[None]:
    """Keep what Triton refuses to build or has no room for, as the reason why calls of that kind run elsewhere."""
    from triton.errors import TritonError

    try:
        yield
    except TritonError as error:
        first = next(iter(str(error).splitlines()), "no message")
        UNBUILT[kind] = f"Triton cannot build its kernel here: {type(error).__name__}: {first}"
    except RuntimeError as error:  # of a compiler pass
        if "PassManager" not in str(error):
            raise
        UNBUILT[kind] = f"Triton cannot build its kernel here: {error}"


def _machine_lacks(dtype: torch.dtype, arch: int) -> str | None:
    if arch < OLDEST:
        return f"the GPU is sm_{arch}, the Triton kernels need sm_{OLDEST}"
    if dtype not in DTYPES:
        return f"the Triton kernels support float32, float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    return None


@lru_cache
def say_once(reason: str) -> None:
    _LOG.info("an ACM, or its gate, runs on plain torch operations: %s", reason)


@lru_cache
def machine_of(device: torch.device) -> Machine:
    """The facts of a device that kernels depend on."""
    major, minor = torch.cuda.get_device_capability(device)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    arch = 10 * major + minor
    return Machine(arch=arch, processors=processors, fenced=puts_fences(), turns=takes_turns_on(arch))


def is_here() -> bool:
    """True if there is a device to compile for."""
    return torch.cuda.is_available()


def current_machine() -> Machine:
    """The device that new CUDA tensors go to."""
    return machine_of(torch.device("cuda", torch.cuda.current_device()))
