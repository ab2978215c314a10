"""The kernels of a backward as `codegen/gpu/ahead` builds them, without a GPU."""

from __future__ import annotations

from typing import Any

from acm_compiler.codegen.gpu.ahead import Kernel
from acm_compiler.codegen.gpu.gradients.kernels import (
    bias_kernel,
    hidden_kernel,
    tokens_kernel,
    weights_kernel,
)
from acm_compiler.codegen.gpu.gradients.launch import constants_of, gradient_tile
from acm_compiler.codegen.gpu.spec import KernelSpec
from acm_compiler.codegen.gpu.stages import POINTERS, Machine, build_options, puts_fences

_NUMBERS = ("stride_y", "stride_r", "stride_m", "stride_n", "WIDE")


def gradient_kernels(spec: KernelSpec, arch: int) -> list[Kernel]:
    """All kernels of a backward, fixed choices and relaxed ones; of learners that share one second layer."""
    made = [_kernel(spec, arch, "hidden", hidden_kernel, f"hidden {every}", EVERY=every) for every in (False, True)]
    made.append(_kernel(spec, arch, "tokens", tokens_kernel, "tokens"))
    for name, one in (("weights", "stride_n"), ("weights turned", "stride_m")):
        made.append(_kernel(spec, arch, "weights", weights_kernel, name, BIAS=one == "stride_n", SPLIT=4, **{one: 1}))
    made.append(_kernel(spec, arch, "bias", bias_kernel, "bias", SPLIT=4))
    return made


def _kernel(spec: KernelSpec, arch: int, kind: str, function: Any, name: str, **own: Any) -> Kernel:
    tile, machine = gradient_tile(spec, kind), Machine(arch=arch, processors=1, fenced=puts_fences())
    constants = constants_of(spec, kind, interpret=False, **own)
    gated = spec.form == "gated"
    here = {"b_in": spec.bias_in, "b_up": gated and spec.bias_in, "w_up": gated, "dup": gated}
    here |= {"reach": own.get("EVERY", True), "bias": own.get("BIAS", True)}
    absent = {operand: None for operand in function.arg_names if not here.get(operand, True)}
    operands = dict.fromkeys(("reach", "parts", "bias"), "*fp32") | dict.fromkeys(_NUMBERS, "i32")
    return Kernel(
        name=name,
        function=function,
        constants=constants | absent,
        options=build_options(spec, tile, POINTERS, machine),
        operands={operand: kind for operand, kind in operands.items() if operand in function.arg_names},
        tile=tile,
    )
