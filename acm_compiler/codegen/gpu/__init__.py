"""`acm::learners` on a CUDA device by Triton kernels: dispatch, layer 1, layer 2; else the reference, and why."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from acm_compiler import env
from acm_compiler.acm.arguments import GateArguments, GatedArguments, LearnersArguments, LearnerWeights, part
from acm_compiler.acm.gated_learners import gate_call, run_apart
from acm_compiler.acm.operands import require_gate, require_gated, require_learners
from acm_compiler.acm.ops import GATE_REFERENCE, LIBRARY, REFERENCE
from acm_compiler.acm.reference import Norm, Weights
from acm_compiler.codegen.compare import require_equal
from acm_compiler.codegen.gpu.spec import DTYPES
from acm_compiler.codegen.gpu.stages import Machine, puts_fences
from acm_compiler.errors import KernelUnavailable
from acm_compiler.site import ACTIVATIONS

OLDEST = 80
"""The compute capability that the kernels need."""
_UNBUILT: dict[Hashable, str] = {}  # kinds of calls whose kernels could not be built, and why
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
    torch.library.impl("acm::learners", "CUDA", _checked if env.check() else learners, lib=LIBRARY)
    torch.library.impl("acm::gate", "CUDA", gate, lib=LIBRARY)
    if not env.check():
        torch.library.impl("acm::gated_learners", "CUDA", gated_learners, lib=LIBRARY)
    return True


def _lacking() -> str | None:
    """Obstacle to the kernels in this installation, None where there is none."""
    if torch.version.hip is not None:
        return "the kernels hold instructions of NVIDIA GPUs, and this torch is built for AMD"
    return "Triton is not installed" if importlib.util.find_spec("triton") is None else None


def learners(x: Tensor, k: Tensor, *tensors: Any, form: str, act: str) -> Tensor:
    """Run the operator; where no kernel fits, the reference, logged once."""
    call = LearnersArguments(x, k, *tensors)
    require_learners(call, form=form)
    machine, shape = machine_of(x.device), call.w_in.shape
    reason = not_covered(
        form=form, act=act, dtype=x.dtype, shape=shape, arch=machine.arch, is_int8=call.s_in is not None
    )
    if reason is None:
        from acm_compiler.codegen.gpu.launch import run  # imports triton

        with torch.cuda.device(x.device), _unless_unbuilt((form, act, x.dtype, shape)):  # kernels start on that device
            weights = Weights(*part(LearnerWeights, call), act=act, form=form)
            return run(x, k, weights, residual=call.residual, machine=machine)
        reason = _UNBUILT[form, act, x.dtype, shape]
    _say_once(reason)
    return REFERENCE(x, k, *tensors, form=form, act=act)


def gate(x: Tensor, *tensors: Tensor, cost: float, k_min: int, rule: str) -> Tensor:
    """The gate's operator: k of every token."""
    call = GateArguments(x, *tensors)
    require_gate(call, k_min=k_min, rule=rule)
    machine, w_inner = machine_of(x.device), call.w_inner
    dtypes, width = (x.dtype, w_inner.dtype), w_inner.shape[0]
    reason = gate_not_covered(dtypes, width=width, arch=machine.arch)
    if reason is None:
        from acm_compiler.codegen.gpu.gate_kernel import run_gate  # imports triton

        with torch.cuda.device(x.device), _unless_unbuilt((dtypes, width)):
            return run_gate(call, cost=cost, k_min=k_min, rule=rule, machine=machine)
        reason = _UNBUILT[dtypes, width]
    _say_once(reason)
    return GATE_REFERENCE(x, *tensors, cost=cost, k_min=k_min, rule=rule)


def gated_learners(*tensors: Any, norm_eps: float | None = None, form: str, act: str, **choices) -> Tensor:
    """The operator that is gate and learners, and perhaps the norm in front of them: then rows are normalised where
    kernels first read them.
    """
    if norm_eps is not None:
        call = GatedArguments(*tensors)
        require_gated(call, form=form, k_min=choices["k_min"], rule=choices["rule"], norm_eps=norm_eps)
        x, w_inner = call.x, call.w_inner
        machine, shape = machine_of(x.device), call.w_in.shape
        reason = gate_not_covered((x.dtype, w_inner.dtype), width=w_inner.shape[0], arch=machine.arch)
        reason = reason or not_covered(
            form=form, act=act, dtype=x.dtype, shape=shape, arch=machine.arch, is_int8=call.s_in is not None
        )
        normed = ("norm", form, act, x.dtype, shape, w_inner.shape)
        if reason is None and normed not in _UNBUILT:
            from acm_compiler.codegen.gpu.gate_kernel import run_gate  # imports triton
            from acm_compiler.codegen.gpu.launch import run

            with torch.cuda.device(x.device), _unless_unbuilt(normed):  # each kernel normalises as it reads x
                norm = Norm(weight=call.norm_weight, bias=call.norm_bias, eps=norm_eps)
                k = run_gate(gate_call(call, x), **choices, machine=machine, norm=norm)
                weights = Weights(*part(LearnerWeights, call), act=act, form=form)
                return run(x, k, weights, residual=call.residual, norm=norm, machine=machine)
    return run_apart(*tensors, norm_eps=norm_eps, form=form, act=act, **choices)


def _checked(x: Tensor, k: Tensor, w_in: Tensor, *tensors: Tensor | None, form: str, act: str) -> Tensor:
    """The kernels' output after it was compared with the reference's (ACM_CHECK=1)."""
    y = learners(x, k, w_in, *tensors, form=form, act=act)
    require_equal(y, REFERENCE(x, k, w_in, *tensors, form=form, act=act), w_in)
    return y


def not_covered(
    *, form: str, act: str, dtype: torch.dtype, shape: tuple[int, ...], arch: int, is_int8: bool = False
) -> str | None:
    """Reason why such an ACM is handed to the reference, None when the kernels run it. shape: of w_in."""
    if is_int8:
        return "the Triton kernels know no int8 learners"
    if act not in ACTIVATIONS:
        return f"activation {act} is none of the Triton kernels'"
    return _machine_lacks(dtype, arch) or _UNBUILT.get((form, act, dtype, shape))


def gate_not_covered(dtypes: tuple[torch.dtype, ...], *, width: int, arch: int) -> str | None:
    """Reason why such a gate is handed to the reference, None when the kernel runs it."""
    from acm_compiler.codegen.gpu.gate_kernel import WIDEST  # imports triton

    if width > WIDEST:
        return f"the Triton kernel holds gates of up to {WIDEST} columns, not {width}"
    lacking = next((reason for dtype in dtypes if (reason := _machine_lacks(dtype, arch))), None)
    return lacking or _UNBUILT.get((dtypes, width))


@contextmanager
def _unless_unbuilt(kind: Hashable) -> Iterator[None]:
    """Keep what Triton refuses to build or has no room for, as the reason why calls of that kind run elsewhere."""
    from triton.errors import TritonError

    try:
        yield
    except TritonError as error:
        first = next(iter(str(error).splitlines()), "no message")
        _UNBUILT[kind] = f"Triton cannot build its kernel here: {type(error).__name__}: {first}"
    except RuntimeError as error:  # of a compiler pass
        if "PassManager" not in str(error):
            raise
        _UNBUILT[kind] = f"Triton cannot build its kernel here: {error}"


def _machine_lacks(dtype: torch.dtype, arch: int) -> str | None:
    if arch < OLDEST:
        return f"the GPU is sm_{arch}, the Triton kernels need sm_{OLDEST}"
    if dtype not in DTYPES:
        return f"the Triton kernels know float32, float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    return None


@lru_cache
def _say_once(reason: str) -> None:
    _LOG.info("an ACM, or its gate, runs on plain torch operations: %s", reason)


@lru_cache
def machine_of(device: torch.device) -> Machine:
    """The facts of a device that kernels depend on."""
    major, minor = torch.cuda.get_device_capability(device)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return Machine(arch=10 * major + minor, processors=processors, fenced=puts_fences())


def current_machine() -> Machine:
    """The device that new CUDA tensors go to."""
    return machine_of(torch.device("cuda", torch.cuda.current_device()))
