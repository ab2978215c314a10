"""The kernels of a backward as `codegen/gpu/ahead` builds them, without a GPU."""

from __future__ import annotations

from dataclasses import replace

from acm_compiler.codegen.gpu.ahead import Kernel, layer1_built, layer2_built
from acm_compiler.codegen.gpu.gradients.kernels import branches_kernel, sums_kernel, total_kernel, weights_kernel
from acm_compiler.codegen.gpu.gradients.stages import (
    branches_constants,
    branches_of,
    first_spec,
    of_tokens,
    plain_options,
    product_tiles,
    second_spec,
    sums_constants,
    sums_options,
    total_constants,
    weights_constants,
    weights_loads,
    weights_tile,
)
from acm_compiler.codegen.gpu.spec import KernelSpec
from acm_compiler.codegen.gpu.stages import Machine, build_options, machine_of_arch


def gradient_kernels(spec: KernelSpec, arch: int, tokens: int) -> list[Kernel]:
    """All kernels of a backward, fixed choices and relaxed ones; of learners that share one second layer."""
    machine = machine_of_arch(arch)
    first, second, tiles = first_spec(spec), second_spec(spec), product_tiles(spec, machine, tokens)
    of_branches = zip((first, replace(first, residual=True)), branches_of(spec), strict=False)
    return [
        layer1_built(first, machine, tiles.layer1, in_order=True),
        layer1_built(second, machine, tiles.layer1, in_order=True, turned=True),
        *(_branches(spec, every=every) for every in (False, True)),
        *(layer2_built(layer, machine, tiles.layer2, of_tokens(layer, w), turned=True) for layer, w in of_branches),
        _weights(first, machine, spec.d_in, split=4, turned=False),
        _weights(first, machine, spec.d_out, split=1, turned=True),
        *(_sums(first, in_order=in_order) for in_order in (True, False)),
        Kernel(
            name="total",
            function=total_kernel,
            constants=total_constants(4, first.learners * first.width * spec.d_in),
            options=plain_options(),
            operands={"parts": "*fp32"},
        ),
    ]


def _branches(spec: KernelSpec, *, every: bool) -> Kernel:
    absent = ({} if every else {"reach": None}) | ({} if spec.form == "gated" else {"up": None})
    return Kernel(
        name=f"branches {'every' if every else 'run'}",
        function=branches_kernel,
        constants=branches_constants(spec, every=every, interpret=False) | absent,
        options=plain_options(),
        operands={"reach": "*fp32"},
    )


def _weights(spec: KernelSpec, machine: Machine, wide: int, *, split: int, turned: bool) -> Kernel:
    """A product of rows, in so many parts."""
    loads = weights_loads(spec, machine, wide)
    tile = weights_tile(spec, loads)
    types = {"parts": "*{dtype}" if split == 1 else "*fp32", "WIDE": "i32"}
    if loads.a_desc:
        types |= {
            side: f"tensordesc<{{dtype}}[{tile.k},{width}]>" for side, width in (("left", tile.m), ("right", tile.n))
        }
    return Kernel(
        name="weights turned" if turned else "weights",
        function=weights_kernel,
        constants=weights_constants(spec, loads, split, turned=turned, interpret=False),
        options=build_options(spec, tile, loads, machine),
        operands=types,
        tile=tile,
    )


def _sums(spec: KernelSpec, *, in_order: bool) -> Kernel:
    return Kernel(
        name="sums" if in_order else "sums of dy",
        function=sums_kernel,
        constants=sums_constants(spec, 4) | ({"perm": None} if in_order else {}),
        options=sums_options(),
        operands={"parts": "*fp32"} | dict.fromkeys(("WIDE", "stride"), "i32"),
    )
