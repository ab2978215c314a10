"""One name per operation, whatever way it was called, which names behave alike, and what a call writes to.

`torch.add`, `Tensor.__iadd__`, `x + 1` and `aten.add.Tensor` are all `add`. Reflected operators keep names
of their own (`rsub`, `rdiv`, `rpow`) because their operands are the other way round.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from acm_compiler.passes.capture.graph import tensors
from acm_compiler.site import ACTIVATIONS as NAMED


def op_set(text: str) -> frozenset[str]:
    """The operation names in `text`."""
    return frozenset(text.split())


_SAME_AS = {
    "_grouped_mm": "grouped_mm",
    "_softmax": "softmax",
    "_safe_softmax": "softmax",
    "_to_copy": "to",
    "_unsafe_view": "view",
    "_unsafe_index": "index",
    "absolute": "abs",
    "clip": "clamp",
    "concat": "cat",
    "concatenate": "cat",
    "divide": "div",
    "true_divide": "div",
    "expit": "sigmoid",
    "iadd": "add",
    "imul": "mul",
    "ipow": "pow",
    "isub": "sub",
    "itruediv": "div",
    "linalg_vector_norm": "norm",
    "log_sigmoid": "logsigmoid",
    "moveaxis": "movedim",
    "multiply": "mul",
    "native_batch_norm": "batch_norm",
    "native_dropout": "dropout",
    "native_group_norm": "group_norm",
    "native_layer_norm": "layer_norm",
    "fused_rms_norm": "rms_norm",
    "_fused_rms_norm": "rms_norm",
    "negative": "neg",
    "numpy_T": "T",
    "radd": "add",
    "rmul": "mul",
    "rtruediv": "rdiv",
    "subtract": "sub",
    "swapaxes": "transpose",
    "swapdims": "transpose",
    "swish": "silu",
    "truediv": "div",
    "unsafe_chunk": "chunk",
    "unsafe_split": "split",
    "special_erf": "erf",
    "special_expit": "sigmoid",
}

_TORCHS_OWN = op_set("aten prims")

# the value is the same, element for element
COPIES = op_set(
    "to type float half bfloat16 double type_as contiguous clone alias detach identity lift_fresh "
    "lift_fresh_copy data requires_grad dropout dropout1d dropout2d dropout3d feature_dropout "
    "alpha_dropout feature_alpha_dropout _assert_tensor_metadata cpu cuda"
)
DROPOUTS = op_set("dropout dropout1d dropout2d dropout3d feature_dropout alpha_dropout")
# the same elements in the same row-major order
RESHAPES = op_set("view reshape flatten unflatten squeeze unsqueeze view_as reshape_as ravel")
# some of the elements, none changed, order and number may differ
MOVES = op_set(
    "permute transpose t T mT H movedim slice select index narrow pad constant_pad_nd split "
    "split_with_sizes chunk tensor_split getitem index_select unbind roll flip repeat repeat_interleave "
    "expand expand_as broadcast_to unfold as_strided tile gather take_along_dim adjoint mH swap"
)
# those that tell parts of the last axis apart
PACKING = op_set("split split_with_sizes chunk tensor_split getitem unbind slice narrow select glu")
SCALES = op_set("mul div neg masked_fill")
NORMS = op_set("layer_norm rms_norm group_norm batch_norm instance_norm local_response_norm normalize")
ACTIVATIONS = op_set(
    "relu relu6 gelu silu sigmoid tanh hardswish hardsigmoid hardtanh leaky_relu elu selu celu mish "
    "softplus pow square exp exp2 expm1 erf logsigmoid prelu rrelu threshold clamp clamp_min clamp_max "
    "abs sqrt rsqrt log log1p softsign softshrink hardshrink tanhshrink glu sin cos maximum minimum "
    "reciprocal rpow rdiv"
) | {name for name, meaning in NAMED.items() if meaning is None}
SUMS = op_set("add sub rsub")
PRODUCTS = op_set("matmul mm bmm baddbmm einsum addmm addbmm tensordot inner")
ATTENTION = frozenset(["scaled_dot_product_attention"])
CONVOLUTIONS = op_set("conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d")
# calls with linears inside that nothing can reach
OPAQUE = frozenset(["multi_head_attention_forward"])
# linears whose weights are integers
QUANTISED = op_set(
    "quantized::linear quantized::linear_relu quantized::linear_leaky_relu quantized::linear_tanh "
    "quantized::linear_dynamic quantized::linear_dynamic_fp16 quantized::linear_relu_dynamic "
    "_int_mm _scaled_mm _weight_int8pack_mm _weight_int4pack_mm _weight_int4pack_mm_for_cpu"
)
REDUCTIONS = op_set("mean var std sum norm var_mean amax logsumexp")

# read only the shape, type or device of a tensor: nothing flows from it
_METADATA_ONLY = op_set(
    "zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_empty new_zeros "
    "new_ones new_full new_tensor bernoulli sym_size arange full zeros ones empty scalar_tensor"
)
_METADATA_SECOND = op_set("type_as view_as expand_as reshape_as to")


@functools.cache
def name_of(target: Any) -> str:
    """The one name of what a function or operator computes; with its library where that is not torch's own."""
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        packet = target.overloadpacket if isinstance(target, torch._ops.OpOverload) else target
        library, _, name = packet._qualified_op_name.partition("::")
        if library not in _TORCHS_OWN:
            return packet._qualified_op_name
    else:
        name = getattr(target, "__name__", str(target))
    if name.startswith("__"):
        name = name.strip("_")
    elif name.endswith("_") and not name.startswith("_"):
        name = name[:-1]
    return _SAME_AS.get(name, name)


def op_name(node: fx.Node) -> str:
    """The one name of what `node` computes; `placeholder`, `get_attr` and `output` for other nodes.

    Picking one of several results is `result`; subscripting a tensor is `getitem`; a property such as `x.mT`
    goes by its own name.
    """
    if node.op != "call_function":
        return node.op
    if node.target is operator.getitem:  # tensors are subscripted by Tensor.__getitem__ or aten ops
        return "result"
    if node.target is getattr:
        return _SAME_AS.get(str(node.args[1]), str(node.args[1]))
    return name_of(node.target)


def data_operands(node: fx.Node) -> list[fx.Node]:
    """The nodes whose values flow into `node`, in the order of its arguments, repeats included."""
    name = op_name(node)
    if name in _METADATA_ONLY:
        return []
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    if name == "output":
        return found
    return found[:1] if name in _METADATA_SECOND else found


def argument(node: Any, position: int, keyword: str, default: Any = None) -> Any:
    """The argument of `node`, or of anything else with `args` and `kwargs`, at `position` or under `keyword`."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(keyword, default)


_AUGMENTED = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
_DUNDERS = {f"__i{name}__" for name in (*_AUGMENTED, "lshift", "rshift")} | {"__setitem__"}


def written_tensors(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors among the arguments that `func` writes to, judged by torch's naming and schemas."""
    return tensors(_written(func, args, kwargs))


def written_nodes(node: fx.Node) -> list[fx.Node]:
    """The nodes that a captured call writes to, by the same rules."""
    found: list[fx.Node] = []
    if node.op == "call_function":
        fx.map_arg(_written(node.target, node.args, node.kwargs), found.append)
    return found


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that `func` writes to."""
    found = [args[at] if at < len(args) else kwargs.get(name) for at, name in _written_arguments(func)]
    found.append(kwargs.get("out"))
    if _works_in_place(func, args, kwargs):
        found.append(args[0] if args else kwargs.get("input"))
    return found


def _works_in_place(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if `inplace` is asked for, by name or, as torch's modules do, by place; not of a dropout in eval mode."""
    asked = dict(zip(_parameters(func), args, strict=False)) | dict(kwargs)
    if "dropout" in getattr(func, "__name__", "") and asked.get("training") is False:
        return False
    return asked.get("inplace") is True


@functools.cache
def _parameters(func: Callable[..., Any]) -> tuple[str, ...]:
    """The names of the parameters of a function of Python; none of a builtin, which has no `inplace`."""
    try:
        return tuple(inspect.signature(func).parameters)
    except (TypeError, ValueError):
        return ()


@functools.cache
def _written_arguments(func: Callable[..., Any]) -> tuple[tuple[int, str], ...]:
    """(position, name) of each argument that `func` always writes to."""
    if isinstance(func, torch._ops.OpOverloadPacket):
        func = getattr(func, func.overloads()[0])
    if isinstance(func, torch._ops.OpOverload):
        arguments = enumerate(func._schema.arguments)
        return tuple((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)
    name = getattr(func, "__name__", "")
    if getattr(func, "__module__", "") == "_operator":
        name = f"__{name}__"  # operator.iadd
    in_place = name.endswith("_") and not name.endswith("__")
    if in_place or name in _DUNDERS or _sets_data(func):
        return ((0, "self"),)
    return ()


def _sets_data(func: Callable[..., Any]) -> bool:
    """True if `func` is the setter behind `tensor.data = value`."""
    prop = getattr(func, "__self__", None)
    return getattr(func, "__name__", "") == "__set__" and getattr(prop, "__name__", "") == "data"
