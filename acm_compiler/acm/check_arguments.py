"""Arguments of the ACM operators that do not fit each other, refused before a kernel reads past the end of one."""

from __future__ import annotations

from collections.abc import Callable
from operator import eq
from typing import Any, NoReturn, get_args

import torch
from torch import Tensor

from acm_compiler.acm.arguments import (
    GateArguments,
    GatedArguments,
    GateWeights,
    LearnersArguments,
    LearnerWeights,
    part,
)
from acm_compiler.acm.precision import autocast_type
from acm_compiler.acm.quantized.int4 import GROUP
from acm_compiler.acm.quantized.integers import SCALES, WEIGHTS
from acm_compiler.acm.reference import GateRule
from acm_compiler.errors import UsageError

_FORMS = ("mlp", "gated", "linear", "rows", "cols")
_RULES = get_args(GateRule)
_INTEGERS = (torch.int32, torch.int64)
OWN_OFFLOAD = "load it without another library's offload: acm.rewrite and acm.calibrate have offload=, too"

Shape = tuple[Any, ...]
Same = Callable[[Any, Any], bool]


def refuse_width(x: Tensor, d_in: int, *, site: str) -> NoReturn:
    """UsageError naming the site for an input that is not [..., D]."""
    raise UsageError(
        "the input must have as many features as this site was planned with",
        where=site,
        # Dynamo cannot write down a size that it traces as free
        found=None if torch.compiler.is_compiling() else f"shape {_written(x.shape)}",
        expected=f"[..., {d_in}]",
    )


def refuse_type(x: Tensor, dtype: torch.dtype, *, site: str) -> None:
    """UsageError naming the site for an input of another type than its weights that autocast does not convert."""
    if autocast_type(x.device) is None:
        raise UsageError(
            "the input must have the type of this site's weights",
            where=site,
            found=_short(x.dtype),
            expected=_short(dtype),
            fix="convert the input or the model, or run under torch.autocast",
        )


def require_learners(call: LearnersArguments | GatedArguments, *, form: str, same: Same = eq) -> None:
    """UsageError naming the first operand of `acm::learners` whose shape, type or device is not that of the others.

    same: compares two shapes; `may_equal` while tracing.
    """
    operator = "acm::learners"
    x, w = call.x, part(LearnerWeights, call)
    k = call.k if isinstance(call, LearnersArguments) else None  # else the operator's own gate chooses it
    if form not in _FORMS:
        raise UsageError(f"unknown form of {operator}", found=repr(form), expected=" | ".join(_FORMS))
    rank = 4 if form in ("rows", "cols") else 3
    if w.w_in.dim() != rank or not w.w_in.numel():
        _refuse(operator, "w_in", w.w_in, f"{rank} dimensions, none of them 0")
    is_int4 = w.s_in is not None and w.w_in.dtype == torch.uint8
    whole = (*w.w_in.shape[:-1], 2 * w.w_in.shape[-1]) if is_int4 else w.w_in.shape
    d_in, shapes = _learner_shapes(whole, w.b_out, form, per_k=w.w_out is not None and w.w_out.dim() == 4)
    tokens = x.shape[0] if x.dim() else 1
    if not same(x.shape, (tokens, d_in)):
        _refuse(operator, "x", x, f"[tokens, {d_in}]")
    if k is not None and not (same(k.shape, (tokens,)) and k.dtype in _INTEGERS):
        _refuse(operator, "k", k, f"[{tokens}], int32 or int64")
    dtypes = {}
    if is_int4:
        dtypes = dict.fromkeys(WEIGHTS, torch.uint8) | dict.fromkeys(SCALES, torch.float16)
        shapes |= _group_shapes(w, shapes, form)
        shapes |= {name: (*shapes[name][:-1], shapes[name][-1] // 2) for name in WEIGHTS if name in shapes}
    elif w.s_in is not None:
        dtypes = dict.fromkeys(WEIGHTS, torch.int8) | dict.fromkeys(SCALES, torch.float32)
        shapes |= _scale_shapes(w, shapes, form)
    for name, tensor in zip(w._fields, w, strict=True):
        _require(operator, name, tensor, shapes.get(name), like=x, same=same, dtype=dtypes.get(name, x.dtype))
    _require(operator, "residual", call.residual, (tokens, shapes["b_out"][1]), like=x, same=same)
    for name in ("w_out", "w_up", *(name for name in SCALES if name in shapes)):
        if getattr(w, name) is None and name in shapes:
            raise UsageError(f"operand {name} of {operator} is missing", expected=_written(shapes[name]))
    if k is not None and k.device != x.device:
        _refuse(operator, "k", k, f"device {x.device}")


def require_thresholds(x: Tensor, w_in: Tensor, w_out: Tensor, inputs: Tensor, hidden: Tensor, *, form: str) -> None:
    """The same for `acm::sparse_learners`: MLPs with one second layer, and thresholds in float32 on x's device."""
    operator = "acm::sparse_learners"
    if form not in ("mlp", "gated") or w_out.dim() != 3:
        found = f"form {form!r}, w_out of {w_out.dim()} dimensions"
        raise UsageError(
            f"{operator} is for MLPs with one second layer for all k",
            found=found,
            expected="form mlp or gated, w_out [D, N, H]",
        )
    wanted = {"thresholds_in": (inputs, w_in.shape[2:]), "thresholds_hidden": (hidden, w_in.shape[:2])}
    for name, (tensor, shape) in wanted.items():
        if tensor.shape != shape or tensor.dtype != torch.float32 or tensor.device != x.device:
            _refuse(operator, name, tensor, f"{_written(shape)}, float32 on {x.device}")


def _learner_shapes(w_in: Shape, b_out: Tensor, form: str, *, per_k: bool) -> tuple[Any, dict[str, Shape]]:
    """D, and the shapes of all weights that an ACM of that form may have, whose w_in has that shape."""
    n = w_in[0]
    if form == "rows":
        d_in, d_out = w_in[3], n * w_in[1] * w_in[2]
        return d_in, {"w_in": w_in, "b_out": (n + 1, d_out)}
    if form == "cols":
        d_in, d_out = n * w_in[2] * w_in[3], w_in[1]
        return d_in, {"w_in": w_in, "b_out": (n + 1, d_out)}
    (_, width, d_in), d_out = w_in, b_out.shape[-1] if b_out.dim() else 1
    second = (d_out, n, width)
    shapes: dict[str, Shape] = {
        "w_in": w_in,
        "b_in": (n, width),
        "w_out": (n, *second) if per_k else second,
        "b_out": (n + 1, d_out),
        "w_top": (d_out, d_in if form == "linear" else n * width),
    }
    if form == "gated":
        shapes |= {"w_up": w_in, "b_up": (n, width)}
    return d_in, shapes


def _scale_shapes(w: LearnerWeights, shapes: dict[str, Shape], form: str) -> dict[str, Shape]:
    """The shapes of the scales that int8 weights of these shapes need: one per output channel."""
    if form == "cols":
        return {"s_in": (w.w_in.shape[1],)}
    scales: dict[str, Shape] = {"s_in": w.w_in.shape[:-1]}
    if w.w_up is not None:
        scales["s_up"] = shapes["b_up"]
    if w.w_out is not None:
        scales["s_out"] = shapes["w_out"][:-2]
    if w.w_top is not None:
        scales["s_top"] = shapes["w_top"][:1]
    return scales


def _group_shapes(w: LearnerWeights, shapes: dict[str, Shape], form: str) -> dict[str, Shape]:
    """The shapes of the scales that 4-bit weights, unpacked of these shapes, need: two a group."""
    found: dict[str, Shape] = {}
    for name, scale in zip(WEIGHTS, SCALES, strict=True):
        if getattr(w, name) is None or name not in shapes:
            continue
        *outer, deep = shapes[name]
        deep *= outer.pop() if form == "cols" else 1
        parts = w.w_in.shape[0] if name == "w_top" and form != "linear" else 1
        found[scale] = (*outer, parts * -(-deep // (parts * GROUP)), 2)
    return found


def require_gate(call: GateArguments | GatedArguments, *, k_min: int, rule: str, same: Same = eq) -> None:
    """The same for `acm::gate`, whose weights may have another type than its tokens."""
    operator = "acm::gate"
    if rule not in _RULES or k_min < 0:
        found, expected = f"rule {rule!r}, k_min {k_min}", f"rule {' | '.join(_RULES)}, k_min from 0 on"
        raise UsageError(f"unknown choice of {operator}", found=found, expected=expected)
    x, w_inner, w_outer = call.x, call.w_inner, call.w_outer
    for name, tensor in (("w_inner", w_inner), ("w_outer", w_outer)):
        if tensor.dim() != 2 or not tensor.numel():
            _refuse(operator, name, tensor, "2 dimensions, none of them 0")
    (width, d_in), columns = w_inner.shape, w_outer.shape[0]
    if not same(x.shape, (x.shape[0] if x.dim() else 1, d_in)):
        _refuse(operator, "x", x, f"[tokens, {d_in}]")
    shapes = ((width, d_in), (width,), (columns, width), (columns,))
    for name, shape in zip(GateWeights._fields, shapes, strict=True):
        _require(operator, name, getattr(call, name), shape, like=w_inner, same=same)
    if w_inner.device != x.device:
        _refuse(operator, "w_inner", w_inner, f"device {x.device}", fix=OWN_OFFLOAD if w_inner.is_meta else None)
    for name, tensor in (("knob", call.knob), ("k_lo", call.k_lo), ("k_hi", call.k_hi)):
        if tensor.device != x.device or tensor.dim():
            _refuse(operator, name, tensor, f"[], device {x.device}")


def require_gated(
    call: GatedArguments, *, form: str, k_min: int, rule: str, norm_eps: float | None, same: Same = eq
) -> None:
    """The same for `acm::gated_learners`."""
    require_gate(call, k_min=k_min, rule=rule, same=same)
    require_learners(call, form=form, same=same)
    require_together(call, k_min=k_min, norm=norm_eps is not None, same=same)


def require_together(call: GatedArguments, *, k_min: int, norm: bool, same: Same = eq) -> None:
    """Check what `acm::gated_learners` needs beyond the needs of its gate and of its learners."""
    x = call.x
    largest, learners = k_min + sum(call.w_outer.shape[:1]) - 1, sum(call.w_in.shape[:1])
    if largest > learners:
        raise UsageError(
            "the gate of acm::gated_learners chooses more learners than there are",
            found=f"k up to {largest}",
            expected=f"at most {learners}",
        )
    for name, tensor in (("norm_weight", call.norm_weight), ("norm_bias", call.norm_bias)):
        # of any type that torch's own norm takes
        if tensor is not None and not (norm and same(tensor.shape, x.shape[1:]) and tensor.device == x.device):
            _refuse("acm::gated_learners", name, tensor, f"{_written(x.shape[1:])} on {x.device}")


def may_equal(found: Shape, expected: Shape) -> bool:
    """True if two shapes agree as far as is known while tracing; a condition on an input becomes its guard."""
    from torch.fx.experimental.symbolic_shapes import guard_or_true  # there already when something is traced

    return len(found) == len(expected) and all(guard_or_true(a == b) for a, b in zip(found, expected, strict=True))


def _require(
    operator: str,
    name: str,
    tensor: Tensor | None,
    shape: Shape | None,
    *,
    like: Tensor,
    same: Same,
    dtype: torch.dtype | None = None,
) -> None:
    """UsageError unless an operand that is there has this shape and the type (or `dtype`) and device of another one."""
    if tensor is None:
        return
    if shape is None:
        raise UsageError(f"operand {name} of {operator} has no use in this form", found=_written(tensor.shape))
    if not same(tensor.shape, shape):
        _refuse(operator, name, tensor, _written(shape))
    dtype = dtype or like.dtype
    if tensor.dtype != dtype or tensor.device != like.device:
        _refuse(operator, name, tensor, f"{_short(dtype)} on {like.device}")


def _refuse(operator: str, name: str, tensor: Tensor, expected: str, *, fix: str | None = None) -> NoReturn:
    raise UsageError(
        f"operand {name} of {operator} does not fit the others",
        found=f"{_written(tensor.shape)}, {_short(tensor.dtype)} on {tensor.device}",
        expected=expected,
        fix=fix,
    )


def _written(shape: Shape) -> str:
    return f"[{', '.join(str(size) for size in shape)}]"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
