"""Tells which axis of each captured tensor belongs to the batch, by capturing again at other batch sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, fx, nn

from acm_compiler.passes.capture.capture import capture_again
from acm_compiler.passes.capture.graph import Capture, batch_size, map_tensors, tensors
from acm_compiler.passes.capture.op_names import RESHAPES, argument, op_name
from acm_compiler.site import Layout
from acm_compiler.sources.inputs import Inputs

_SIZES = (2, 3)
# of the query; torch's packed attention wants [T, B, E]
_TOKEN_AXIS = {"scaled_dot_product_attention": -2, "multi_head_attention_forward": 0}
# nodes that put together what was done for every example
_JOINS = {"cat", "stack", "output"}
_Shape = tuple[int, ...]


def find_layouts(model: nn.Module, example_inputs: Inputs, capture: Capture) -> dict[str, Layout | None]:
    """The layout of every tensor node of `capture` but constants, None or nothing where the batch axis is unclear.

    The batch is axis 0 of the first input that has axes; the inputs with as many entries there are repeated or
    cut to make batches of 2 and 3, or, first where others have other numbers of entries (patches of images), else last,
    all are repeated whole: tokens may then be packed. Where the batch cannot be told (the model raises at another batch
    size, makes other calls, or attends along that axis) all tokens are those of one example if there is but one, and it
    is empty if there are more. Never a failure; model and inputs are left as they were.
    """
    batch = batch_size(example_inputs) or 0
    differ = any(tensor.dim() and tensor.shape[0] != batch for tensor in tensors(example_inputs))
    layouts: dict[str, Layout | None] = {}
    for packed in (differ, not differ):
        if batch and not layouts:
            layouts = _followed(model, example_inputs, capture, batch, packed=packed)
    if layouts or batch != 1:
        return layouts
    shaped = (node for node in _data_nodes(capture) if node.meta.get("shape") is not None)
    return {node.name: Layout(batch_axis=None) for node in shaped}


def _followed(
    model: nn.Module, example_inputs: Inputs, capture: Capture, batch: int, *, packed: bool
) -> dict[str, Layout | None]:
    """The layouts that captures at other batch sizes tell; none where they do not.

    packed: all inputs are repeated, and tokens whose number grows as the batch does may be packed.
    """
    captures = {batch: capture}
    for size in (times * batch for times in _SIZES) if packed else _SIZES:
        if size not in captures:
            inputs = _repeated(example_inputs, size // batch) if packed else _of_batch(example_inputs, batch, size)
            other = capture_again(model, inputs, like=capture)
            if other is None:
                return {}
            captures[size] = other
    shapes: dict[fx.Node, dict[int, Any]] = {}
    for row in (_nodes_before_layers if packed else _same_nodes)(list(captures.values())):
        shapes[row[0]] = {size: node.meta.get("shape") for size, node in zip(captures, row, strict=True)}
    scaling = {node: _scaling_axes(list(known.values())) for node, known in shapes.items()}
    # images that are packed may attend along all of them, each to its own
    examples = {node: _axes_of_examples(shapes[node], axes) if packed else axes for node, axes in scaling.items()}
    if any(_mixes_examples(node, examples) for node in scaling):
        return {}
    layouts: dict[str, Layout | None] = {}
    for node, known in shapes.items():
        if node.meta.get("shape") is not None:
            layout, may_be_packed = _layout(known, scaling[node]), _reads_packed(node, layouts)
            if may_be_packed or not (layout and _is_adjacent(node, layout, layouts)):
                layout = _packed(known, scaling[node]) if packed or may_be_packed else None
            layouts[node.name] = layout
    return layouts


def _of_batch(inputs: Inputs, batch: int, size: int) -> Any:
    """The inputs with `size` examples in place of `batch`."""

    def resize(tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.shape[0] != batch:
            return tensor
        return tensor[torch.arange(size, device=tensor.device) % batch]

    return map_tensors(inputs, resize)


def _repeated(inputs: Inputs, times: int) -> Any:
    """The inputs with all examples, and whatever belongs to them, `times` times."""
    return map_tensors(inputs, lambda tensor: torch.cat([tensor] * times) if tensor.dim() else tensor)


def _data_nodes(capture: Capture) -> list[fx.Node]:
    """The nodes that depend on the inputs or the model; positions and masks may be made otherwise at batch 1."""
    return [node for node in capture.graph.nodes if not node.meta.get("const", False)]


def _same_nodes(captures: Sequence[Capture]) -> list[tuple[fx.Node, ...]]:
    """Each node of the first capture with that of the others; none where other calls are made.

    Left out is what is done for every example by itself, from `split` of a batch of images to `cat`, say.
    """
    pieces, rows = set[fx.Node](), list[tuple[fx.Node, ...]]()
    for row in zip_longest(*(_outside(pieces, _data_nodes(capture)) for capture in captures)):
        nodes = tuple(node for node in row if node is not None)
        if len(nodes) < len(row) or len(set(map(_target, nodes))) > 1:
            return []
        results = [list(filter(_is_result, node.users)) for node in nodes]
        if len(set(map(len, results))) > 1:
            pieces.update(*results)
        rows.append(nodes)
    return rows


def _outside(pieces: set[fx.Node], nodes: Sequence[fx.Node]) -> Iterator[fx.Node | None]:
    """The nodes that are no `pieces`, which those become that are made of some alone; ends where more goes in."""
    for node in nodes:
        used = {other for other in node.all_input_nodes if not other.meta.get("const", False)}
        if used & pieces and op_name(node) not in _JOINS:
            if used - pieces:
                yield None
            pieces.add(node)
        if node not in pieces:
            yield node


def _nodes_before_layers(captures: Sequence[Capture]) -> list[tuple[fx.Node, ...]]:
    """Calls that read the same parameters in all captures, and from these and the output backwards what they read.

    Left out is what is done for every example or image by itself, be there one loop over these or several. None where
    linears are called more often in one capture, or other calls are made.
    """
    readers, ahead = [_readers(capture) for capture in captures], list[tuple[fx.Node, ...]]()
    for reads in readers[0]:
        calls = [found.get(reads, []) for found in readers]
        if len(set(map(len, calls))) == 1:
            ahead.extend(zip(*calls, strict=True))
        elif op_name(calls[0][0]) == "linear":
            return []
    ahead.append(tuple(next(iter(reversed(capture.graph.nodes))) for capture in captures))
    rows: dict[fx.Node, tuple[fx.Node, ...]] = {}
    while ahead:
        row = ahead.pop()
        if row[0] in rows or any(node.meta.get("const", False) for node in row):
            continue
        if len(set(map(_target, row))) > 1:
            return []
        rows[row[0]] = row
        operands = [node.all_input_nodes for node in row]
        if len(set(map(len, operands))) == 1:
            ahead.extend(zip(*operands, strict=True))
    return [rows[node] for node in _data_nodes(captures[0]) if node in rows]


def _readers(capture: Capture) -> dict[Any, list[fx.Node]]:
    """The calls that read parameters, by these."""
    found: dict[Any, list[fx.Node]] = {}
    for node in _data_nodes(capture):
        if names := tuple(used.target for used in node.all_input_nodes if used.op == "get_attr"):
            found.setdefault((_target(node), names), []).append(node)
    return found


def _is_result(node: fx.Node) -> bool:
    return op_name(node) == "result"


def _target(node: fx.Node) -> tuple[str, Any]:
    # a placeholder's target is its name, a property's is in the arguments
    return node.op, node.args[1] if node.target is getattr else node.target


def _scaling_axes(shapes: Sequence[_Shape | None]) -> tuple[int, ...]:
    """The axes whose size differs between batches; none where a shape is missing or the number of axes differs."""
    known = [shape for shape in shapes if shape is not None]
    if len(known) < len(shapes) or len({len(shape) for shape in known}) != 1:
        return ()
    return tuple(axis for axis, sizes in enumerate(zip(*known, strict=True)) if len(set(sizes)) > 1)


def _axes_of_examples(shapes: Mapping[int, _Shape], axes: tuple[int, ...]) -> tuple[int, ...]:
    """Those of the scaling axes with one entry for each example."""
    return tuple(axis for axis in axes if all(shape[axis] == batch for batch, shape in shapes.items()))


def _mixes_examples(node: fx.Node, scaling: Mapping[fx.Node, tuple[int, ...]]) -> bool:
    """True if an attention runs along a scaling axis: then that is one of tokens, as where T comes before B."""
    name = op_name(node)
    if name == "softmax":
        axis = argument(node, 1, "dim", -1)
    elif name in _TOKEN_AXIS:
        axis = _TOKEN_AXIS[name]
    else:
        return False
    source = node.all_input_nodes[0]
    return isinstance(axis, int) and axis % len(source.meta["shape"] or (0,)) in scaling[source]


def _layout(shapes: Mapping[int, _Shape], axes: tuple[int, ...]) -> Layout | None:
    """The only scaling axis, if it is not the features', where its size is always the same multiple of the batch."""
    if not _is_of_tokens(shapes, axes):
        return None
    multiples = {divmod(shape[axes[0]], batch) for batch, shape in shapes.items()}
    folds, rest = multiples.pop()
    return None if multiples or rest else Layout(batch_axis=axes[0], folds=folds)


def _packed(shapes: Mapping[int, _Shape], axes: tuple[int, ...]) -> Layout | None:
    """The only scaling axis, if it is not the features', where its size grows as the batch does."""
    if not _is_of_tokens(shapes, axes):
        return None
    ratios = {Fraction(shape[axes[0]], batch) for batch, shape in shapes.items()}
    return Layout(batch_axis=axes[0], folds=0) if len(ratios) == 1 else None


def _reads_packed(node: fx.Node, known: Mapping[str, Layout | None]) -> bool:
    """True for rows that values choose, such as the images that are no padding, and for what is made of such alone."""
    if op_name(node) == "getitem" and isinstance(node.args[1], fx.Node) and not node.args[1].meta.get("const", False):
        return bool(node.args[1].meta.get("shape"))
    operands = [layout for used in _tensor_operands(node) if (layout := known.get(used.name)) is not None]
    return bool(operands) and all(layout.is_packed for layout in operands)


def _is_of_tokens(shapes: Mapping[int, _Shape], axes: tuple[int, ...]) -> bool:
    """True for one scaling axis, which is not that of the features."""
    rank = len(next(iter(shapes.values())))
    return len(axes) == 1 and (rank == 1 or axes[0] != rank - 1)


def _is_adjacent(node: fx.Node, layout: Layout, known: Mapping[str, Layout | None]) -> bool:
    """True if the folds of one example are neighbours: `[B, S] -> [B * S]` and not `[S, B] -> [S * B]`.

    Sizes cannot tell the two apart. Reshapes can; other calls keep the order of an operand with as many folds.
    """
    operands = [used for used in _tensor_operands(node) if known.get(used.name) is not None]
    if op_name(node) in RESHAPES and operands:
        source = operands[0]
        before = known[source.name]
        return before is not None and _stride(source, before) == _stride(node, layout)
    if layout.folds == 1:
        return True
    if op_name(node) == "repeat_interleave":
        # by one number: a tensor of them may have another one for each example
        alike = isinstance(argument(node, 1, "repeats"), int)
        return alike and bool(operands) and known[operands[0].name] == Layout(batch_axis=layout.batch_axis)
    folds = {known[used.name].folds for used in operands}  # type: ignore[union-attr]
    return layout.folds in folds and 0 not in folds


def _stride(node: fx.Node, layout: Layout) -> int:
    """Number of elements, in row-major order, from one example to the next."""
    assert layout.batch_axis is not None
    return layout.folds * math.prod(node.meta["shape"][layout.batch_axis + 1 :])


def _tensor_operands(node: fx.Node) -> list[fx.Node]:
    """The operands of a call; of one of several results, those of the call that gave them."""
    if _is_result(node):
        return _tensor_operands(node.all_input_nodes[0])
    return node.all_input_nodes
