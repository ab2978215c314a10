"""Kernels that a backward starts, to be built without a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from acm_compiler.codegen.gpu.ahead.build import Kernel
from acm_compiler.codegen.gpu.ahead.forward import (
    Block,
    descriptor_type,
    layer1_built,
    layer2_built,
    product_built,
)
from acm_compiler.codegen.gpu.gradients.kernels import (
    biases_kernel,
    branches_kernel,
    hidden_kernel,
    sums_kernel,
    total_kernel,
    weights_kernel,
)
from acm_compiler.codegen.gpu.gradients.stages import (
    biases_constants,
    branches_constants,
    branches_of,
    first_spec,
    hidden_constants,
    hidden_loads,
    hidden_options,
    is_fused,
    of_tokens,
    plain_options,
    product_tiles,
    reached_constants,
    reaches_in_turn,
    second_spec,
    sums_constants,
    sums_options,
    total_constants,
    weights_constants,
    weights_loads,
    weights_tile,
)
from acm_compiler.codegen.gpu.spec import KernelSpec
from acm_compiler.codegen.gpu.stages import (
    Machine,
    build_options,
    constants_for,
    machine_of_arch,
    permutes_rows,
)
from acm_compiler.codegen.gpu.tiles import Tile, choose_tiles


def gradient_kernels(spec: KernelSpec, arch: int, tokens: int, *, turns: bool = True) -> list[Kernel]:
    """All kernels of a backward, fixed choices and relaxed ones; of learners that share one second layer.

    turns: those in Gluon among them, which graphs of Inductor's do without.
    """
    machine = machine_of_arch(arch)
    machine = replace(machine, turns=machine.turns and turns)
    first, kernels = first_spec(spec), []
    for every in (False, True):
        tiles = product_tiles(spec, machine, tokens, apart=every)
        fused = is_fused(spec, apart=every)
        kernels += _fused(spec, machine, tiles.layer1) if fused else _apart(spec, machine, tiles.layer1, every=every)
        of_branches = zip((first, replace(first, residual=True)), branches_of(spec), strict=False)
        kernels += [
            layer2_built(layer, machine, tiles.layer2, of_tokens(layer, w), turned=True) for layer, w in of_branches
        ]
    turns = product_tiles(spec, machine, tokens, apart=False).layer2.turns
    return [
        *kernels,
        *_kept(spec, machine, tokens),
        _weights(first, machine, spec.d_in, split=4, turned=False, turns=turns),
        _weights(first, machine, spec.d_out, split=1, turned=True, turns=turns),
        *(_sums(first, in_order=in_order) for in_order in (True, False)),
        Kernel(
            name="total",
            function=total_kernel,
            constants=total_constants(4, first.learners * first.width * spec.d_in),
            options=plain_options(),
            operands={"parts": "*fp32"},
        ),
    ]


def _fused(spec: KernelSpec, machine: Machine, tile: Tile) -> list[Kernel]:
    """The first layer of a plain MLP, and sums of what it leaves."""
    of_x, of_dy = loads = hidden_loads(spec, machine)
    rows = (tile.m, tile.k)
    blocks: dict[str, Block] = {
        "x": of_x.a_desc and rows,
        "w_in": of_x.w_desc and of_x.block_of_weights(tile),
        "dy": of_dy.a_desc and rows,
        "w_out": of_dy.w_desc and of_dy.block_of_weights(tile),
    }
    constants = hidden_constants(spec, tile, loads, interpret=False) | ({} if spec.bias_in else {"sums": None})
    options = hidden_options(spec, tile, loads, machine)
    facts: Any = {"spec": spec, "tile": tile, "options": options, "types": {"sums": "*fp32", "D_OUT": "i32"}}
    kernels = [product_built("hidden", hidden_kernel, constants, blocks=blocks, **facts)]
    if spec.bias_in:
        facts = {"options": plain_options(), "operands": {"sums": "*fp32"}}
        constants = biases_constants(spec, tile.m)
        kernels.append(Kernel(name="biases", function=biases_kernel, constants=constants, **facts))
    return kernels


def _apart(spec: KernelSpec, machine: Machine, tile: Tile, *, every: bool) -> list[Kernel]:
    """First layers of other learners: their products, and what is made of them."""
    return [
        layer1_built(first_spec(spec), machine, tile, in_order=True),
        layer1_built(second_spec(spec), machine, tile, in_order=True, turned=True),
        _branches(spec, every=every),
    ]


def _kept(spec: KernelSpec, machine: Machine, tokens: int) -> list[Kernel]:
    """The forward's first layer that keeps what a backward reads, and what that makes of it."""
    tiles = choose_tiles(spec, machine.arch, tokens, machine.processors, turns=machine.turns)
    in_order = tiles.layer1.turns or permutes_rows(spec, machine)
    keeps = spec.form == "gated" or spec.act != "identity"  # else h is all that there is
    kernels = [layer1_built(spec, machine, tiles.layer1, in_order=in_order, keeps=keeps)]
    tile = product_tiles(spec, machine, tokens, apart=True).layer1
    if not reaches_in_turn(spec, tile):
        return [*kernels, layer1_built(second_spec(spec), machine, tile, in_order=True, turned=True), _branches(spec)]
    from acm_compiler.codegen.gpu.turns.gradients import reached_kernel

    _, loads = hidden_loads(spec, machine)
    constants = reached_constants(spec, tile) | ({} if spec.bias_in else {"sums": None})
    blocks: dict[str, Block] = {"dy": (tile.m, tile.k), "w_out": loads.block_of_weights(tile)}
    facts: Any = {"spec": spec, "tile": tile, "options": plain_options(), "types": {"sums": "*fp32", "D_OUT": "i32"}}
    return [*kernels, product_built("reached", reached_kernel, constants, blocks=blocks, **facts)]


def _branches(spec: KernelSpec, *, every: bool | None = None) -> Kernel:
    """every: of all learners, or else of those that run; None: of kept products."""
    absent = ({} if every else {"reach": None}) | ({} if spec.form == "gated" else {"up": None, "of_up": None})
    absent |= {"h": None} if every is None else dict.fromkeys(("first", "up", "dh"))
    return Kernel(
        name=f"branches {'kept' if every is None else 'every' if every else 'run'}",
        function=branches_kernel,
        constants=branches_constants(spec, every=bool(every), interpret=False) | absent,
        options=plain_options(),
        operands={"reach": "*fp32"},
    )


def _weights(spec: KernelSpec, machine: Machine, wide: int, *, split: int, turned: bool, turns: bool) -> Kernel:
    """A product of rows, in so many parts."""
    loads = weights_loads(spec, machine, wide)
    tile = weights_tile(spec, loads, turns=turns)
    function, constants = weights_kernel, weights_constants(spec, tile, loads, split, turned=turned, interpret=False)
    if tile.turns:
        from acm_compiler.codegen.gpu.turns.gradients import weights_kernel as function

        constants = constants_for(function, constants, tile)
    types = {"parts": "*{dtype}" if split == 1 else "*fp32", "WIDE": "i32"}
    if loads.a_desc:
        sides = zip(("a", "b") if tile.turns else ("left", "right"), (tile.m, tile.n), strict=True)
        types |= {side: descriptor_type(spec.dtype, tile.k, width, turns=tile.turns) for side, width in sides}
    return Kernel(
        name="weights turned" if turned else "weights",
        function=function,
        constants=constants,
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
