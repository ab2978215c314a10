"""The operators in graphs that Inductor compiles: launches of kernels, which it starts itself, without Python's help.

The mechanism is that of `torch.library.triton_op`: where a graph is made functional, an operator becomes what it does.
torch.export keeps operators whole; its programs are decomposed when Inductor compiles them. What the kernels do not
cover, or Triton cannot build, stays an operator, which Inductor calls.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from acm_compiler.acm.arguments import GateArguments, GatedArguments, LearnersArguments, LearnerWeights, Weights, part
from acm_compiler.acm.gated_learners import GATED, gate_call
from acm_compiler.acm.ops import GATE, LEARNERS, LIBRARY
from acm_compiler.codegen import gpu
from acm_compiler.codegen.gpu.dispatch import Histogram
from acm_compiler.codegen.gpu.gate_plan import Choice, GatePlan
from acm_compiler.codegen.gpu.launch import plan_of
from acm_compiler.codegen.gpu.products import by_rows
from acm_compiler.codegen.gpu.spec import KernelSpec, spec_of
from acm_compiler.codegen.gpu.start import building, tracing
from acm_compiler.codegen.gpu.tiles import choose_tiles

_LEAST = 1 << 24  # hidden values from which on an operator's microseconds of Python do not count
_BUILT: set[Any] = set()  # kinds of calls whose kernels were built


def register() -> None:
    """Decompose the operators in graphs of CUDA tensors from now on."""
    for op, launches in ((LEARNERS, learners), (GATE, _gate), (GATED, _gated)):
        decompose(op, launches)


def decompose(op: Any, launches: Callable[..., Any]) -> None:
    """Make an operator its launches in graphs of CUDA tensors, but where those are None."""
    rule = partial(_decompose, launches)
    torch.library.register_torch_dispatch(op._qualified_op_name, FunctionalTensorMode, rule, lib=LIBRARY)


def _decompose(launches: Callable[..., Any], mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """The rule of an operator: its launches, or the operator itself."""
    kwargs = kwargs or {}
    if args[0].device.type == "cuda" and not _exports() and gpu.is_here():
        with mode, tracing():
            y = launches(*args, **kwargs)
        if y is not None:
            return y
    return mode.__torch_dispatch__(op, types, args, kwargs)


def _exports() -> bool:
    """True within torch.export, whose programs keep operators."""
    from torch.export._trace import custom_triton_ops_decomposition_disabled

    return custom_triton_ops_decomposition_disabled()


def learners(*tensors: Any, form: str, act: str) -> Tensor | None:
    """Launches of `acm::learners`."""
    call = LearnersArguments(*tensors)
    weights = Weights.of(call, form=form, act=act)
    return _launched(call, weights, None) if _can_launch(call, weights) else None


def _gate(*tensors: Any, **choices: Any) -> Tensor | None:
    choice = _chosen(GateArguments(*tensors), **choices)
    return None if choice is None else choice.k


def _gated(
    *tensors: Any, form: str, act: str, norm_eps: float | None = None, norm_centred: bool = True, **choices: Any
) -> Tensor | None:
    call = GatedArguments(*tensors)
    weights = Weights.of(call, form=form, act=act)
    # first of all learners: a gate by itself would leave launches behind
    if norm_eps is not None or not _can_launch(call, weights):
        return None
    choice = _chosen(gate_call(call, call.x), **choices)
    if choice is None:
        return None
    apart = LearnersArguments(call.x, choice.k, *part(LearnerWeights, call), call.residual)
    return _launched(apart, weights, choice.histogram)


def _launched(call: LearnersArguments, weights: Weights, histogram: Histogram | None) -> Tensor:
    x, residual = by_rows(call.x), None if call.residual is None else by_rows(call.residual)
    spec, machine = spec_of(x, weights, residual), machine_in_graphs(x.device)
    plan, k = plan_of(spec, weights, machine, x.shape[0]), call.k.contiguous()
    return plan(x, k, residual, plan.order(k, histogram, x))


def _can_launch(call: LearnersArguments | GatedArguments, weights: Weights) -> bool:
    """True if kernels run these learners and Triton has built them: a failure would end Inductor's compilation."""
    x, shape = call.x, tuple(weights.w_in.shape)
    machine = machine_in_graphs(x.device)
    facts: dict[str, Any] = {
        "form": weights.form,
        "act": weights.act,
        "dtype": x.dtype,
        "shape": shape,
        "arch": machine.arch,
    }
    if gpu.not_covered(**facts, is_quantized=weights.is_quantized) is not None:
        return False
    spec = spec_of(x, weights, call.residual)
    if stays_whole(spec, x):
        return False

    def build() -> None:
        own = weights.map(empty)
        row = empty(x, 1)
        k, beside = row.new_zeros(1, dtype=torch.int32), None if call.residual is None else empty(call.residual, 1)
        plan_of(spec, own, machine, x.shape[0])(row, k, beside)

    return builds((weights.form, weights.act, x.dtype, shape), (spec, machine, size(x)), build)


def _chosen(call: GateArguments, **choices: Any) -> Choice | None:
    x, w_inner = by_rows(call.x), call.w_inner
    machine = gpu.machine_of(x.device)
    dtypes, width = (x.dtype, w_inner.dtype), w_inner.shape[0]
    if gpu.gate_not_covered(dtypes, width=width, arch=machine.arch) is not None:
        return None

    def build() -> None:
        own = GateArguments(empty(x, 1), *(empty(tensor) for tensor in call[1:]))
        plan = GatePlan(own, **choices, machine=machine, tokens=x.shape[0])
        plan(own.x, own.knob, own.k_lo, own.k_hi)

    if not builds((dtypes, width), (*choices.values(), *map(_shape, call[1:5]), size(x)), build):
        return None
    plan = GatePlan(call._replace(x=x), **choices, machine=machine)
    return plan(x, call.knob, call.k_lo, call.k_hi)


def builds(kind: Hashable, facts: Hashable, build: Callable[[], None]) -> bool:
    """True if Triton builds the kernels of such a call; else the reason is kept for all calls of the kind."""
    if kind in gpu.UNBUILT:
        return False
    if (kind, facts) not in _BUILT:
        with _disable_current_modes(), building(), gpu.unless_unbuilt(kind):
            build()
            _BUILT.add((kind, facts))
    return kind not in gpu.UNBUILT


def size(x: Tensor) -> Any:
    """T, or nothing where a compiler traces it as free."""
    return x.shape[0] if isinstance(x.shape[0], int) else None


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def machine_in_graphs(device: torch.device) -> gpu.Machine:
    """A device as launches in graphs see it: Inductor starts no kernels in Gluon."""
    return replace(gpu.machine_of(device), turns=False)


def stays_whole(spec: KernelSpec, x: Tensor) -> bool:
    """True if a call of so many rows stays an operator, whose kernels in Gluon save more than its Python costs.

    Not in packages that run without Python.
    """
    from torch._inductor.virtualized import V

    tokens, machine = size(x), gpu.machine_of(x.device)
    if tokens is None or tokens * spec.learners * spec.width < _LEAST or V.aot_compilation:
        return False
    return choose_tiles(spec, machine.arch, tokens, machine.processors, turns=machine.turns).layer1.turns


def empty(tensor: Tensor, rows: int | None = None) -> Tensor:
    """A tensor of that shape (or so many rows), type and device with memory, which traced ones do not have."""
    shape = tensor.shape if rows is None else (rows, *tensor.shape[1:])
    return torch.empty(tuple(shape), dtype=tensor.dtype, device=tensor.device)
