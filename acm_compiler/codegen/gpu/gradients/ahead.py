"""The kernels of a backward as `codegen/gpu/ahead` builds them, without a GPU."""

from __future__ import annotations

from acm_compiler.codegen.gpu.ahead import Kernel, layer1_built, layer2_built
from acm_compiler.codegen.gpu.gradients.kernels import branches_kernel, sums_kernel, weights_kernel
from acm_compiler.codegen.gpu.gradients.launch import (
    branches_constants,
    branches_options,
    first_spec,
    of_tokens,
    product_tiles,
    second_spec,
    sums_constants,
    sums_options,
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
    return [
        *(layer1_built(layer, machine, tiles.layer1, in_order=True) for layer in (first, second)),
        *(_branches(spec, every=every) for every in (False, True)),
        layer2_built(first, machine, tiles.layer2, of_tokens(first)),
        _weights(first, machine, spec.d_in, split=4, turned=False),
        _weights(spec, machine, spec.d_out, split=1, turned=True),
        *(_sums(first, in_order=in_order) for in_order in (True, False)),
    ]


def _branches(spec: KernelSpec, *, every: bool) -> Kernel:
    return Kernel(
        name=f"branches {'every' if every else 'run'}",
        function=branches_kernel,
        constants=branches_constants(spec, every=every, interpret=False) | ({} if every else {"reach": None}),
        options=branches_options(),
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
