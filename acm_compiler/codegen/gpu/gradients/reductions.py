"""Launches of a backward that sum over tokens, or over tiles: gradients of weights and of biases."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from acm_compiler.codegen.gpu.activation import INTERPRETED
from acm_compiler.codegen.gpu.dispatch import Order
from acm_compiler.codegen.gpu.gradients.kernels import biases_kernel, sums_kernel, total_kernel, weights_kernel
from acm_compiler.codegen.gpu.gradients.stages import (
    SUMS,
    biases_constants,
    parts_of,
    parts_of_sums,
    plain_options,
    sums_constants,
    sums_options,
    total_constants,
    weights_constants,
    weights_loads,
    weights_tile,
)
from acm_compiler.codegen.gpu.spec import KernelSpec
from acm_compiler.codegen.gpu.stages import Machine, build_options, constants_for
from acm_compiler.codegen.gpu.start import Launcher, blocks_in, blocks_of


class Total:
    """The launch that adds up parts [PARTS, SIZE], fp32."""

    def __init__(self, parts: int, size: int) -> None:
        constants = total_constants(parts, size)
        self._programs = blocks_in(size, constants["BN"])
        self._start = Launcher(total_kernel, constants, plain_options())

    def __call__(self, parts: Tensor, total: Tensor) -> Tensor:
        """Their sum, written into `total`, of any shape."""
        self._start(self._programs, total, parts)
        return total


class Products:
    """left.T right of sorted rows, [N * H, wide] or turned, of the tokens that run each learner."""

    def __init__(
        self, spec: KernelSpec, machine: Machine, wide: int, tokens: int, *, turned: bool, turns: bool
    ) -> None:
        m, loads = spec.learners * spec.width, weights_loads(spec, machine, wide)
        tile = weights_tile(spec, loads, turns=turns)
        tiles = blocks_in(m, tile.m) * blocks_in(wide, tile.n)
        slots = machine.processors * tile.resident
        self._split = split = parts_of(tiles, slots, tokens)
        self._programs, self._wide = min(tiles * split, slots) if tile.turns else tiles * split, wide
        self._shape = (wide, m) if turned else (m, wide)
        self._blocks = ((tile.k, tile.m), (tile.k, tile.n)) if loads.a_desc else None
        self._turns, self._swaps = tile.turns, tile.turns and turned
        kernel = weights_kernel
        constants = weights_constants(spec, tile, loads, split, turned=turned, interpret=INTERPRETED)
        if tile.turns:
            from acm_compiler.codegen.gpu.turns.gradients import weights_kernel as kernel

            constants = constants_for(kernel, constants, tile)
        self._start = Launcher(kernel, constants, build_options(spec, tile, loads, machine))
        self._total = Total(split, m * wide) if split > 1 else None

    def __call__(self, left: Tensor, right: Tensor, order: Order) -> Tensor:
        total = right.new_empty(self._shape)
        parts = total if self._total is None else right.new_empty(self._split, *self._shape, dtype=torch.float32)
        operands: Any = left, right
        if self._blocks is not None:
            pairs = zip(operands, self._blocks, strict=True)
            operands = [blocks_of(rows, *block, turns=self._turns) for rows, block in pairs]
        if self._swaps:
            operands = operands[::-1]
        self._start(self._programs, parts, *operands, order.counts, self._wide)
        return total if self._total is None else self._total(parts, total)


class Sums:
    """Sums over tokens: of rows [T, columns] those of each k, [N + 1, columns].

    is_sorted: of rows in sorted order, with as many numbers for each learner, what the tokens run, [columns].
    """

    def __init__(self, spec: KernelSpec, machine: Machine, columns: int, *, is_sorted: bool) -> None:
        bands = spec.learners + 1
        tiles = bands * blocks_in(columns, SUMS.n)
        split = parts_of_sums(tiles, machine.processors * SUMS.resident)
        self._programs, self._columns, self._is_sorted = tiles * split, columns, is_sorted
        self._parts = split, bands, columns
        self._shape = (columns,) if is_sorted else (bands, columns)
        self._start = Launcher(sums_kernel, sums_constants(spec, split), sums_options())
        self._total = Total(split * bands, columns) if is_sorted else Total(split, bands * columns)

    def __call__(self, rows: Tensor, order: Order) -> Tensor:
        parts = rows.new_empty(self._parts, dtype=torch.float32)
        perm = None if self._is_sorted else order.perm
        self._start(self._programs, parts, rows, perm, order.counts, self._columns, rows.stride(0))
        return self._total(parts, rows.new_empty(self._shape))


class Biases:
    """Sums of what `hidden` left in parts, of tiles of so many rows: gradients of biases [N * H]."""

    def __init__(self, spec: KernelSpec, rows: int) -> None:
        constants = biases_constants(spec, rows)
        self._programs = spec.learners * blocks_in(spec.width, constants["BN"])
        self._start = Launcher(biases_kernel, constants, plain_options())

    def __call__(self, sums: Tensor, order: Order, dtype: torch.dtype) -> Tensor:
        total = sums.new_empty(sums.shape[1], dtype=dtype)
        self._start(self._programs, total, sums, order.counts)
        return total
