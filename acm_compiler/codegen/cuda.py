"""`acm::learners` on a CUDA device by Triton kernels: dispatch, layer 1, layer 2; else the reference, and why."""

from __future__ import annotations

import importlib.util
import logging
from functools import lru_cache

import torch
from torch import Tensor

from acm_compiler import env
from acm_compiler.acm.activations import NAMES
from acm_compiler.acm.ops import LIBRARY, REFERENCE
from acm_compiler.acm.reference import Weights
from acm_compiler.codegen.compare import require_equal
from acm_compiler.codegen.spec import DTYPES
from acm_compiler.codegen.stages import Machine
from acm_compiler.errors import KernelUnavailable

OLDEST = 80
"""The compute capability that the kernels need."""
_LOG = logging.getLogger("acm_compiler.backend")


def take_over() -> bool:
    """Make the Triton kernels the implementation on CUDA devices; False when the reference stays (one INFO line).

    KernelUnavailable when ACM_KERNEL=triton asks for the kernels and Triton is not installed.
    """
    chosen = env.kernel()
    if chosen not in (None, "triton"):
        _LOG.info("ACM_KERNEL=%s: ACMs run without the Triton kernels", chosen)
        return False
    if importlib.util.find_spec("triton") is None:
        if chosen == "triton":
            raise KernelUnavailable("Triton is not installed", fix="pip install triton, or unset ACM_KERNEL")
        _LOG.info("ACMs run on plain torch operations, not on the Triton kernels: Triton is not installed")
        return False
    torch.library.impl("acm::learners", "CUDA", _checked if env.check() else learners, lib=LIBRARY)
    return True


def learners(x: Tensor, k: Tensor, *tensors: Tensor | None, form: str, act: str) -> Tensor:
    """The operator; where no kernel fits, the reference, said once."""
    w_in, b_in, w_up, b_up, w_out, b_out, w_top, *residual = tensors
    assert w_in is not None and b_out is not None
    machine = machine_of(x.device)
    reason = not_covered(act=act, dtype=x.dtype, arch=machine.arch)
    if reason is not None:
        _say_once(reason)
        return REFERENCE(x, k, *tensors, form=form, act=act)
    weights = Weights(
        w_in=w_in, b_in=b_in, w_up=w_up, b_up=b_up, w_out=w_out, b_out=b_out, w_top=w_top, form=form, act=act
    )
    from acm_compiler.codegen.launch import run  # imports triton

    return run(x, k, weights, residual=residual[0] if residual else None, machine=machine)


def _checked(x: Tensor, k: Tensor, *tensors: Tensor | None, form: str, act: str) -> Tensor:
    """The kernels' answer after it was compared with the reference's (ACM_CHECK=1)."""
    y = learners(x, k, *tensors, form=form, act=act)
    require_equal(y, REFERENCE(x, k, *tensors, form=form, act=act), tensors[0])
    return y


def not_covered(*, act: str, dtype: torch.dtype, arch: int) -> str | None:
    """Why such an ACM is handed to the reference, None when the kernels run it."""
    if arch < OLDEST:
        return f"the GPU is sm_{arch}, the Triton kernels need sm_{OLDEST}"
    if act not in NAMES:
        return f"activation {act} is none of the Triton kernels'"
    if dtype not in DTYPES:
        return f"the Triton kernels know float32, float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    return None


@lru_cache
def _say_once(reason: str) -> None:
    _LOG.info("an ACM runs on plain torch operations: %s", reason)


@lru_cache
def machine_of(device: torch.device) -> Machine:
    """What the kernels need to know of a device."""
    from acm_compiler.codegen.launch import puts_fences  # imports triton

    major, minor = torch.cuda.get_device_capability(device)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return Machine(arch=10 * major + minor, processors=processors, fenced=puts_fences())
