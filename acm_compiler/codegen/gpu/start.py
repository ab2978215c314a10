"""Start a kernel: at once, or as a node of a graph that a compiler traces; or only build it, before the first call.

A `Launcher` is built by its first call and from then on goes past Triton's search for a compiled kernel, which takes
longer than the kernels of a small site. Its owner promises that later calls have arguments of the same kind: types,
alignment, and the numbers that are no `do_not_specialize`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import torch
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

_MODE: ContextVar[Literal["start", "build", "trace"]] = ContextVar("acm_compiler.start", default="start")


@contextmanager
def building() -> Iterator[None]:
    """While open, launchers that were never called build their kernels, and start none."""
    token = _MODE.set("build")
    try:
        yield
    finally:
        _MODE.reset(token)


@contextmanager
def tracing() -> Iterator[None]:
    """While open, new launchers leave nodes in the graph that is traced, from which Inductor starts the kernels."""
    token = _MODE.set("trace")
    try:
        yield
    finally:
        _MODE.reset(token)


def is_starting() -> bool:
    """True while launches are launches."""
    return _MODE.get() == "start"


def is_tracing() -> bool:
    """True while launches become nodes of a graph."""
    return _MODE.get() == "trace"


class Launcher:
    """One kernel with its constants, which follow its other arguments, and its options (warps, stages)."""

    __slots__ = ("_built", "_device", "_run", "_tail", "constants", "function", "options")

    def __init__(self, function: Any, constants: dict[str, Any], options: dict[str, Any]) -> None:
        self.function, self.constants, self.options = function, constants, options
        self._built: Any = None
        self._tail = tuple(constants[name] for name in function.arg_names if name in constants)

    def __call__(self, programs: Any, *args: Any) -> None:
        """Start so many programs; args: all that are no constants, in the kernel's order."""
        built = self._built
        if built is None:
            self._start_first(programs, args)
        elif _observed():
            built[programs, 1, 1](*args, *self._tail)
        else:  # as CompiledKernel does, without facts for observers
            stream = driver.active.get_current_stream(self._device)
            function, facts = built.function, built.packed_metadata
            self._run(programs, 1, 1, stream, function, facts, None, None, None, *args, *self._tail)

    def _start_first(self, programs: Any, args: tuple[Any, ...]) -> None:
        mode, given = _MODE.get(), {**self.constants, **self.options}
        if mode == "trace":
            _trace(self.function, programs, args, given)
            return
        if mode == "build":
            found = self.function.warmup(*args, grid=(1,), **given)
        else:
            found = self.function[(programs,)](*args, **given)
        if isinstance(found, CompiledKernel):  # the interpreter has none
            self._built, self._run, self._device = found, found.run, driver.active.get_current_device()


def _observed() -> bool:
    """True if someone, a profiler of Triton's, wants to hear of every launch."""
    hooks = knobs.runtime
    return bool(hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls)


def _trace(function: Any, programs: Any, args: tuple[Any, ...], given: dict[str, Any]) -> None:
    """Leave a node for a launch; what a kernel reads by descriptors enters the graph as tensors and their blocks."""
    from torch._higher_order_ops.triton_kernel_wrap import (
        TraceableTritonKernelWrapper,
        TracingTritonHOPifier,
        triton_kernel_wrapper_mutation,
    )

    blocks: Any = {
        name: ("stable", (list(value.block_shape),))
        for name, value in zip(function.arg_names, args, strict=False)
        if isinstance(value, TensorDescriptor)
    }
    plain = [value.base if isinstance(value, TensorDescriptor) else value for value in args]

    class Tracer(TracingTritonHOPifier):
        """torch's own, which knows no descriptors."""

        def call_HOP(self, variable, grids, combined_args, *others):
            graphable, constants = self.store_non_graphable_args(combined_args)
            names = {"launch_kwargs": others[0]} if len(others) > 2 else {}  # since torch 2.14
            return triton_kernel_wrapper_mutation(
                kernel_idx=variable.kernel_idx,
                constant_args_idx=constants,
                grid=grids,
                tma_descriptor_metadata=blocks,
                kwargs=graphable,
                **names,
            )

    options = {name: value for name, value in given.items() if name != "enable_fp_fusion"}  # Triton's default, so far
    wrapped = TraceableTritonKernelWrapper(function, None, (programs,))
    Tracer().call_triton_kernel(wrapped, plain, options, None)


_CHECKED: dict[tuple[torch.dtype, int, int, bool], tuple[type, dict[str, Any]]] = {}  # descriptors, by type and block


def blocks_of(matrix: Tensor, rows: int, columns: int, *, turns: bool = False) -> Any:
    """A matrix as kernels take it that read it by bulk copies, in blocks of so many rows and columns.

    Its rows and its address must be aligned; Triton checks that of the first of a kind alone, as it takes long.
    turns: for kernels in Gluon, which must be told how a block lies in shared memory.
    """
    kind = matrix.dtype, rows, columns, turns
    checked = _CHECKED.get(kind)
    if checked is None or not is_starting():
        made: Any = TensorDescriptor.from_tensor(matrix, [rows, columns])
        if turns:  # Gluon is not imported where a Triton has another one, or none
            from acm_compiler.codegen.gpu.turns.pipeline import described

            made = described(matrix, rows, columns)
        if is_starting():
            _CHECKED[kind] = type(made), {**vars(made), "base": None}
        return made
    made = object.__new__(checked[0])
    made.__dict__.update(checked[1], base=matrix, shape=matrix.shape, strides=matrix.stride())
    return made


def fewer(programs: int, tiles: Any) -> Any:
    """The smaller number; of one that a compiler traces as free, without a condition on it."""
    return min(programs, tiles) if isinstance(tiles, int) else torch.sym_min(programs, tiles)


def blocks_in(length: Any, block: int) -> Any:
    """Number of blocks that cover a length."""
    return (length + block - 1) // block  # triton.cdiv takes as long as a launch
