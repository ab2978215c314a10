"""Kernels that a call starts, of learners and of gates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from acm_compiler.codegen.gpu.ahead.build import Kernel
from acm_compiler.codegen.gpu.blocks import kernel_options
from acm_compiler.codegen.gpu.dispatch import (
    count_kernel,
    permute_constants,
    permute_kernel,
    permute_options,
    place_constants,
    place_kernel,
    place_options,
    slots_of,
    sort_copies,
)
from acm_compiler.codegen.gpu.few_tokens import few2_kernel, few_sum_kernel
from acm_compiler.codegen.gpu.gate_kernel import gate_kernel, gate_part_kernel, gate_sum_kernel
from acm_compiler.codegen.gpu.gate_plan import (
    gate_constants,
    part_constants,
    sum_constants,
    sum_options,
)
from acm_compiler.codegen.gpu.gate_spec import GateSpec, cut_of
from acm_compiler.codegen.gpu.layers import layer1_kernel, layer2_kernel
from acm_compiler.codegen.gpu.one_token import layer_kernels, one2_kernel, one_part_kernel
from acm_compiler.codegen.gpu.products import layers_in_turns
from acm_compiler.codegen.gpu.spec import DTYPES, KernelSpec
from acm_compiler.codegen.gpu.stages import (
    Machine,
    Product,
    build_options,
    constants_for,
    few1_constants,
    few2_constants,
    few_options,
    few_sum_constants,
    few_sum_options,
    layer1_bands,
    layer1_constants,
    layer2_constants,
    loads_of,
    machine_of_arch,
    permutes_rows,
    products_of,
)
from acm_compiler.codegen.gpu.tiles import Tile, Tiles, bucket_of, choose_tiles

Block = tuple[int, int] | Literal[False]


def kernels_of(spec: KernelSpec, arch: int, tokens: int, *, turns: bool = True) -> list[Kernel]:
    """The kernels that a call of that many tokens starts on that architecture, in order.

    turns: those in Gluon among them, which graphs of Inductor's do without.
    """
    machine = machine_of_arch(arch)
    machine = replace(machine, turns=machine.turns and turns)
    tiles = choose_tiles(spec, arch, tokens, turns=machine.turns)
    in_order = tiles.sorts and (tiles.layer1.turns or permutes_rows(spec, machine))
    if not tiles.sorts:
        return _few_kernels(spec, tiles)
    copies = in_order and sort_copies(1 << bucket_of(tokens)) and turns
    kernels = _dispatch_kernels(spec, tokens, copies=copies)
    if in_order and not copies:
        kernels.append(_rows_kernel(spec))
    if layer1_bands(spec):
        kernels.append(layer1_built(spec, machine, tiles.layer1, in_order=in_order))
    return kernels + [layer2_built(spec, machine, tiles.layer2, product) for product in products_of(spec)]


def layer1_built(
    spec: KernelSpec,
    machine: Machine,
    tile: Tile,
    *,
    in_order: bool = False,
    turned: bool = False,
    keeps: bool = False,
) -> Kernel:
    """Layer 1; in_order: x is given in sorted order; turned: weights have a column for each output.

    keeps: what is before activations, too.
    """
    loads = loads_of(spec, machine, None, in_order=in_order, turned=turned)
    made: Any = layer1_kernel, layer1_constants(spec, tile, loads, interpret=False)
    if tile.turns:
        kernel = layers_in_turns().layer1_kernel
        made = kernel, constants_for(kernel, made[1], tile)
    weights = loads.w_desc and loads.block_of_weights(tile)
    blocks: dict[str, Block] = {"x": loads.a_desc and (tile.m, tile.k), "w_in": weights, "w_up": weights}
    options = build_options(spec, tile, loads, machine)
    absent = {"before": None, "before_up": None} if not keeps else {} if spec.form == "gated" else {"before_up": None}
    name, made = "layer1 kept" if keeps else "layer1", (made[0], made[1] | absent)
    return product_built(name, *made, spec=spec, tile=tile, options=options, blocks=blocks)


def layer2_built(spec: KernelSpec, machine: Machine, tile: Tile, product: Product, *, turned: bool = False) -> Kernel:
    """A product of layer 2; turned: weights have a column for each output."""
    loads = loads_of(spec, machine, product, turned=turned)
    absent = {} if product.bias else {"b_out": None}
    made: Any = layer2_kernel, layer2_constants(spec, tile, loads, product, interpret=False)
    if tile.turns:
        kernel = layers_in_turns().layer2_kernel
        made = kernel, constants_for(kernel, made[1], tile)
    made = made[0], made[1] | absent
    blocks = {"a": loads.a_desc and (tile.m, tile.k), "w": loads.w_desc and loads.block_of_weights(tile)}
    options, name = build_options(spec, tile, loads, machine), f"layer2 {product.weight}"
    return product_built(name, *made, spec=spec, tile=tile, options=options, blocks=blocks)


def _few_kernels(spec: KernelSpec, tiles: Tiles) -> list[Kernel]:
    one, two, splits = tiles.layer1, tiles.layer2, tiles.splits
    kernel1, kernel2 = layer_kernels(tiles)
    name = "one" if one.m == 1 else "few"
    made = kernel1, constants_for(kernel1, few1_constants(spec, one, interpret=False), one)
    kernels = [product_built(f"{name}1", *made, spec=spec, tile=one, options=few_options(one), blocks={})]
    made = kernel2, constants_for(kernel2, few2_constants(spec, two, splits, interpret=False), two)
    types = {} if splits == 1 else {"y": "*fp32"}
    kernels.append(
        product_built(f"{name}2", *made, spec=spec, tile=two, options=few_options(two), blocks={}, types=types)
    )
    if splits > 1:
        constants, absent = few_sum_constants(spec, splits), {} if spec.residual else {"residual": None}
        facts: Any = {"constants": constants | absent, "options": few_sum_options(), "operands": {"parts": "*fp32"}}
        kernels.append(Kernel(name="few sum", function=few_sum_kernel, **facts))
    return kernels


def product_built(
    name: str,
    function: Any,
    constants: dict[str, Any],
    *,
    spec: KernelSpec,
    tile: Tile,
    options: dict[str, Any],
    blocks: dict[str, Block],
    types: dict[str, str] | None = None,
) -> Kernel:
    """A kernel whose operands are a call's; those that the spec does not have are constants.

    blocks: rows and columns of operands read by descriptors, or False. types: of operands not of the spec's.
    """
    gated = spec.form == "gated"
    top = {"x": spec.second == "top", "w_top": spec.second == "top"} if function in (few2_kernel, one2_kernel) else {}
    here = top | {"b_in": spec.bias_in, "w_up": gated, "b_up": gated and spec.bias_in}
    here["residual"] = constants.get("RESIDUAL", True)
    absent = {operand: None for operand in function.arg_names if not here.get(operand, True)}
    described = {operand: block for operand, block in blocks.items() if block}
    operands = {name: descriptor_type(spec.dtype, *block, turns=tile.turns) for name, block in described.items()}
    facts: Any = {"options": options, "operands": operands | (types or {}), "tile": tile}
    return Kernel(name=name, function=function, constants=constants | absent, **facts)


def descriptor_type(dtype: str, rows: int, columns: int, *, turns: bool) -> str:
    """Triton's name of a descriptor of blocks; in Gluon it says how a block lies in shared memory."""
    if not turns:
        return f"tensordesc<{dtype}[{rows},{columns}]>"
    from acm_compiler.codegen.gpu.turns.pipeline import layout_of

    of_torch = next(own for own, name in DTYPES.items() if name == dtype)
    return f"tensordesc<{dtype}[{rows}, {columns}],{layout_of(of_torch, rows, columns)!r}>"


def _dispatch_kernels(spec: KernelSpec, tokens: int, *, copies: bool) -> list[Kernel]:
    count = {"N": spec.learners, "SLOTS": slots_of(spec.learners), "BLOCK": 64}
    place = place_constants(spec.learners, 1 << bucket_of(tokens), d_in=spec.d_in if copies else None)
    place |= {} if copies else {"rows_out": None, "x": None}
    return [
        Kernel(name="count", function=count_kernel, constants=count, options=kernel_options(warps=2) | {"debug": True}),
        Kernel(name="place", function=place_kernel, constants=place, options=place_options(copies=copies)),
    ]


def _rows_kernel(spec: KernelSpec) -> Kernel:
    constants, options = permute_constants(spec.d_in), permute_options(spec.d_in)
    return Kernel(name="permute", function=permute_kernel, constants=constants, options=options)


def gate_kernels_of(spec: GateSpec, arch: int, tokens: int) -> list[Kernel]:
    """The kernels that a gate of that many tokens starts on that architecture: one, or more where it is split."""
    cut = cut_of(spec, tokens, machine_of_arch(arch))
    options = kernel_options(warps=cut.tile.warps, stages=cut.tile.stages)
    if not spec.is_split:
        whole = gate_constants(spec, cut, interpret=False)
        return [_gate_kernel("gate", gate_kernel, whole, options, spec)]
    kernel = one_part_kernel if cut.tile.m == 1 else gate_part_kernel
    parts = constants_for(kernel, part_constants(spec, cut, interpret=False), cut.tile)
    sums = sum_constants(spec, cut, tokens, interpret=False)
    return [
        _gate_kernel("gate parts", kernel, parts, options, spec),
        _gate_kernel("gate sum", gate_sum_kernel, sums, sum_options(sums), spec),
    ]


def _gate_kernel(
    name: str, function: Any, constants: dict[str, Any], options: dict[str, int], spec: GateSpec
) -> Kernel:
    types = dict.fromkeys(("w_inner", "b_inner", "w_outer", "b_outer"), f"*{spec.gate_dtype}")
    types |= dict.fromkeys(("k_lo", "k_hi", "k_out"), "*i32")
    types |= dict.fromkeys(("parts", "knob"), "*fp32") | {"cost": "fp32"}
    if constants.get("BULK"):
        blocks = {"x": constants["BM"], "w_inner": constants["GP"]}
        types |= {name: f"tensordesc<{{dtype}}[{rows},{constants['BK']}]>" for name, rows in blocks.items()}
    return Kernel(
        name=name,
        function=function,
        constants=constants,
        options=options,
        operands=types,
        odd=("D_IN", "stride_x") if spec.is_odd else (),
    )
