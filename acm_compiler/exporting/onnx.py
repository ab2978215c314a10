"""Format onnx: standard operators alone, with the budget as an input or with one k.

The operators of ACMs become plain torch that computes what tokens run. Sorted by k, the most first, tokens that run k
learners are neighbours, and those that run learner n are the first rows. How many they are is a size that depends on
values. Shapes: see `acm.reference`; c[k] is the number of tokens that run k learners or more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from acm_compiler.acm.arguments import LearnersArguments, Weights
from acm_compiler.acm.ops import GATE, LEARNERS, as_gate
from acm_compiler.acm.reference import hidden, prefix_output
from acm_compiler.errors import UsageError
from acm_compiler.exporting.traced import Traced, refusing
from acm_compiler.passes.rewrite.conversion import Rewritten

FILE = "model.onnx"
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
"""The exporter, and ONNX Runtime, which its files are tried with."""
# weights of more bytes go to a file of their own: one message of protobuf holds less than 2 GiB
_ONE_FILE = 2**31 - 2**26
# operators that take a part of a weight
_PARTS, _ANY_SIZE = ("Gather", "Reshape", "Slice", "Transpose"), 2**62
_CAST = torch.ops.aten.view.dtype


def usage(traced: Traced) -> str:
    """Python code that loads and calls the file with numpy arrays."""
    names = [tensor.name for tensor in traced.inputs]
    each = traced.low is not None and traced.call[1]["budget"].dim()
    values = {"budget": f"np.full({names[0]}.shape[0], 0.4, 'float32')" if each else "np.array(0.4, 'float32')"}
    fed = ", ".join(f"'{name}': {values.get(name, name) if traced.low is not None else name}" for name in names)
    first = "import numpy as np, onnxruntime" if traced.low is not None else "import onnxruntime"
    return f"{first}; model = onnxruntime.InferenceSession('{FILE}'); model.run(None, {{{fed}}})"


def check_weights(found: Rewritten) -> None:
    """UsageError for a model with quantised learners."""
    if (kind := found.owner.quantized) is not None:
        fix = "export the float model, then onnxruntime.quantization.quantize_dynamic on the file (docs/export.md)"
        raise UsageError(f"ONNX has no operator for this package's {kind} weights", fix=fix)


def write(traced: Traced, aside: Path) -> None:
    """Write the files into the folder `aside`. UsageError, with torch's reason, for what is not in ONNX."""
    half = [tensor.name for tensor in traced.inputs if tensor.dtype == "bfloat16"]
    half += [name for name, tensor in traced.program.state_dict.items() if tensor.dtype == torch.bfloat16]
    if half:
        fix = "export model.float()"
        raise UsageError("ONNX Runtime has no kernels of bfloat16 on CPUs", found=half[0], fix=fix)
    # the logarithm of what no learners cost is folded: minus infinity
    with refusing("torch.onnx makes no graph of this model"), np.errstate(divide="ignore"):
        program = torch.onnx.export(
            plain_program(traced.program),
            input_names=[tensor.name for tensor in traced.inputs],
            output_names=traced.outputs,
            dynamo=True,
            optimize=False,
            verbose=False,
        )
        assert program is not None
        _fold(program.model)
        _name_axes(program.model.graph, traced)
        program.save(aside / FILE, external_data=traced.size_bytes > _ONE_FILE)


def plain_program(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """A program with plain torch for the operators of ACMs, which computes what tokens run.

    `program` itself loses the step from a knob to its bits and back, for which ONNX has no operator.
    """
    for node in program.graph.nodes:
        if node.target is _CAST and (bits := node.args[0]).target is _CAST:
            node.replace_all_uses_with(bits.args[0])
    program.graph.eliminate_dead_code()
    return program.run_decompositions(OPERATORS)


def runner(folder: Path) -> Callable[..., list[Tensor]]:
    """The written file as a function of the call's arguments, in ONNX Runtime with as many threads as torch has."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(folder / FILE, options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]

    def run(*args: Any, **kwargs: Any) -> list[Tensor]:
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        given = {name: tensor.cpu().numpy() for name, tensor in zip(names, tensors, strict=True)}
        return [torch.from_numpy(np.asarray(value)) for value in session.run(None, given)]

    return run


def _fold(model: Any) -> None:
    """Compute what is constant. ONNX Runtime does all else; rules of onnxscript that merge operators broke graphs.

    Parts of weights become weights of their own, so that tools see them for what they are. The exporter's notes, such
    as the lines of Python behind each operator, are left out.
    """
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass
    from onnxscript import optimizer

    optimizer.fold_constants(model)
    optimizer.fold_constants(model, output_size_limit=_ANY_SIZE, should_fold=_is_part)
    optimizer.remove_unused_nodes(model)
    ClearMetadataAndDocStringPass()(model)


def _is_part(node: Any) -> bool:
    """True for an operator that gives one of several parts of a weight, if the parts are no larger than the whole."""
    if node.op_type not in _PARTS or node.inputs[0].const_value is None or node.outputs[0].shape is None:
        return False
    sizes = list(node.outputs[0].shape)
    if not all(isinstance(size, int) for size in sizes):
        return False
    return math.prod(sizes) * len(node.inputs[0].uses()) <= node.inputs[0].const_value.size


def _name_axes(graph: Any, traced: Traced) -> None:
    """Give the free axes of inputs and outputs the names that export.json has for them."""
    names: dict[str, int | str] = {}
    for value, tensor in zip(graph.inputs, traced.inputs, strict=True):
        names |= {
            str(axis): name for axis, name in zip(value.shape, tensor.shape, strict=True) if isinstance(name, str)
        }
    for value in (*graph.inputs, *graph.outputs):
        for place, axis in enumerate(value.shape or ()):
            value.shape[place] = names.get(str(axis), axis)


def as_learners(x: Tensor, *tensors: Any, form: str, act: str) -> Tensor:
    """Run `acm::learners`."""
    call = LearnersArguments(x, *tensors)
    y = prefixes_output(call.x, call.k, Weights.of(call, form=form, act=act))
    return y if call.residual is None else y + call.residual


OPERATORS: dict[Any, Callable[..., Any]] = {
    LEARNERS.default: as_learners,
    GATE.default: as_gate,
    torch.ops.aten._is_all_true.default: torch.all,
}
"""Substitutes for the operators of ACMs, and for one that checks of models call, by operator."""


def prefixes_output(x_TD: Tensor, k_T: Tensor, weights: Weights) -> Tensor:
    """y_{k(t)}(x_t) [T, O], as `reference.run_learners`, in one graph for all k."""
    order_T, c = k_T.argsort(descending=True), _counts(k_T, weights.learners)
    run = _by_learner if weights.is_nested else _by_k
    return run(x_TD.index_select(0, order_T), c, weights).index_select(0, order_T.argsort())


def _counts(k_T: Tensor, learners: int) -> list[Any]:
    """c[k] for k from 0 to N + 1: the number of tokens that run k learners or more."""
    runs_TN = k_T[:, None] > torch.arange(learners, device=k_T.device)
    c: list[Any] = [k_T.shape[0]]
    for count in runs_TN.sum(0).unbind():
        c.append(count.item())
        torch._check(c[-1] >= 0)
        torch._check(c[-1] <= c[-2])
    return [*c, 0]


def _by_k(xs_TD: Tensor, c: list[Any], weights: Weights) -> Tensor:
    """Sorted outputs, of all tokens that run k learners at once."""
    return torch.cat([prefix_output(xs_TD[c[k + 1] : c[k]], weights, k) for k in range(weights.learners, -1, -1)])


def _by_learner(xs_TD: Tensor, c: list[Any], weights: Weights) -> Tensor:
    """Sorted outputs, of all tokens that run a learner at once: each weight is read once, and kept once."""
    assert weights.w_out is not None
    total = xs_TD.new_empty(0, weights.b_out.shape[1])
    for k in range(weights.learners, 0, -1):
        one = {name: getattr(weights, name) for name in ("w_in", "b_in", "w_up", "b_up")}
        one = {name: None if tensor is None else tensor[k - 1 : k] for name, tensor in one.items()}
        total = _begin(total, c, weights, k)
        total = torch.addmm(total, hidden(xs_TD[: c[k]], replace(weights, **one), 1), weights.w_out[:, k - 1].T)
    return _begin(total, c, weights, 0)


def _begin(total: Tensor, c: list[Any], weights: Weights, k: int) -> Tensor:
    """The sums of tokens that run more than k learners, and the biases of those that run k."""
    return torch.cat([total, weights.b_out[k].expand(c[k] - c[k + 1], -1)])
