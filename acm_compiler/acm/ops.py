"""`acm::learners` and `acm::gate`: an ACM's operators, single nodes in compiled and exported graphs.

y = learners(x, k) + residual, where `residual` [T, O] is optional (compilers put the bypass there).
The eager kernel is the reference; backends register faster ones for the same name. Gradients: `gradients.operators`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from acm_compiler.acm.arguments import GateArguments, LearnersArguments, Weights, schema
from acm_compiler.acm.check_arguments import may_equal, require_gate, require_learners
from acm_compiler.acm.context import transforms
from acm_compiler.acm.gradients import sorted_tokens
from acm_compiler.acm.intact import refuse_onnx
from acm_compiler.acm.precision import autocast_type, without_autocast
from acm_compiler.acm.quantized import integers
from acm_compiler.acm.reference import (
    branchless_output,
    choice_costs,
    choose_k,
    relaxed_output,
    run_learners,
    utilities,
)
from acm_compiler.errors import UsageError
from acm_compiler.site import ACTIVATIONS

LIBRARY = torch.library.Library("acm", "DEF")
# where the kernels of a device are; imported at the first call on such a device, never before
_KERNELS = {"cpu": "acm_compiler.codegen.cpu", "cuda": "acm_compiler.codegen.gpu"}
_ASKED: set[str] = set()
VECTOR_KERNELS: set[str] = set()
"""Types of device whose kernels run one token faster than dense products of its first k learners do."""
SITES: dict[str, Callable[[Any, Tensor], Tensor | None]] = {}
"""Whole ACMs in eager calls, by type of device; None where such a call must go the usual way."""


class Differentiated(NamedTuple):
    """Eager calls with gradients: `learners` of a k, and `relaxed` choices, as the functions of these names here."""

    learners: Callable[[Tensor, Tensor, Weights], Tensor]
    relaxed: Callable[[Tensor, Tensor, Weights, int], Tensor]


DIFFERENTIATED: dict[str, Differentiated] = {}
"""Kernels that know gradients, by type of device; the host reads no k."""
# tokens of a call with gradients, in bytes per feature: for fewer, one product for all k is faster than one for each
# (measured on a CPU: twice as fast for 512 tokens of fp32 or 1,024 of bf16 and N = 8, as fast for 1,024 of fp32)
_FEW_BYTES = 4096
FORM = "str form, str act"
CHOICES = "float cost, int k_min, str rule"


def learners(x_TD: Tensor, k_T: Tensor, weights: Weights) -> Tensor:
    """y_{k(t)}(x_t), [T, O]: one operator in graphs and wherever no gradient is asked for, else the plain reference.

    Under autocast the inputs are cast as a linear's would be.
    """
    dtype = autocast_type(x_TD.device)
    if dtype is not None:
        with without_autocast(x_TD.device):
            return learners(x_TD.to(dtype), k_T, cast_weights(weights, dtype))
    tensors, form, act = weights.tensors, weights.form, weights.act
    pushed_forward = forward_ad._current_level >= 0  # the operator has no rule for tangents
    compiling = torch.compiler.is_compiling()
    mapped, transformed = (False, False) if compiling else transforms()
    if mapped and (transformed or pushed_forward):
        return branchless_output(x_TD, k_T, integers.dequantized(weights) if weights.is_quantized else weights)
    if mapped or compiling:
        return torch.ops.acm.learners(x_TD, k_T, *tensors, form=form, act=act)
    differentiated = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x_TD, *tensors))
    if differentiated and not (transformed or pushed_forward) and sorted_tokens.pays(x_TD, weights):
        require_learners(LearnersArguments(x_TD, k_T, *tensors), form=form)
        rule = _kernels_rule(x_TD)
        return (sorted_tokens.sorted_output if rule is None else rule.learners)(x_TD, k_T, weights)
    if differentiated and weights.is_quantized:  # its rule knows what gradients of rounded values are
        return torch.ops.acm.learners(x_TD, k_T, *tensors, form=form, act=act)
    if observed() or differentiated or pushed_forward:
        require_learners(LearnersArguments(x_TD, k_T, *tensors), form=form)
        few = x_TD.shape[0] * x_TD.element_size() <= _FEW_BYTES and (weights.is_nested or weights.w_out is None)
        # nobody counts the operations: those of learners that a token does not run may be done, and count zero
        return (branchless_output if few and not observed() else run_learners)(x_TD, k_T, weights)
    # nothing to differentiate: past the autograd rule, which costs more than a small site's kernel
    with torch._C._AutoDispatchBelowAutograd():
        return LEARNERS.default(x_TD, k_T, *tensors, form=form, act=act)


def relaxed(x_TD: Tensor, nu_TC: Tensor, weights: Weights, k_min: int) -> Tensor:
    """`relaxed_output` for a nu that is one-hot in value, [T, O], with less work where it can be left out."""
    compiling = torch.compiler.is_compiling()
    plain = forward_ad._current_level >= 0 or (not compiling and any(transforms()))
    if plain or not sorted_tokens.pays(x_TD, weights):
        return relaxed_output(x_TD, nu_TC, weights, k_min)
    dtype = autocast_type(x_TD.device)
    if dtype is not None:
        with without_autocast(x_TD.device):
            return relaxed(x_TD.to(dtype), nu_TC, cast_weights(weights, dtype), k_min)
    if compiling:
        options = {"k_min": k_min, "form": weights.form, "act": weights.act}
        return torch.ops.acm.relaxed(x_TD, nu_TC, *weights.tensors, **options)[0]
    rule = _kernels_rule(x_TD)
    return (sorted_tokens.sorted_relaxed if rule is None else rule.relaxed)(x_TD, nu_TC, weights, k_min)


def _kernels_rule(x_TD: Tensor) -> Differentiated | None:
    """Kernels on that device that know gradients; None where there are none, or someone wants to see operations."""
    device = x_TD.device.type
    if observed():
        return None
    if device != "cpu":
        load_kernels(device)
    return DIFFERENTIATED.get(device)


def is_vector_call(x_TD: Tensor, weights: Weights) -> bool:
    """True for a call of one token, without gradients, whose learners such kernels run; its k must be known."""
    if torch.is_grad_enabled() or not _is_one(x_TD.shape[0]) or not has_vector_kernels(x_TD.device.type):
        return False
    known = weights.act in ACTIVATIONS and x_TD.dtype in (torch.bfloat16, torch.float16, torch.float32)
    return known and weights.w_out is not None and weights.w_out.dim() == 3 and weights.w_top is None


def _is_one(tokens: Any) -> bool:
    """True of one token; False of a number that only the device knows, as of those that a mask leaves."""
    if not torch.compiler.is_compiling():
        return tokens == 1
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # there already when this is traced

    return guard_or_false(tokens == 1)


def has_vector_kernels(device: str) -> bool:
    """True if `VECTOR_KERNELS` has that type of device, once its kernels are loaded.

    While a graph is traced that happens here: a graph of dense products alone has no operator that would load them.
    """
    load_kernels(device)
    return device in VECTOR_KERNELS


# as torch.compiler.assume_constant_result marks it, which imports the compiler
has_vector_kernels.__dict__.update(_dynamo_marked_constant=True)


def gate_is_operator(x_TD: Tensor) -> bool:
    """True if `run_gate` is there for this call; elsewhere a gate stays plain torch, which compilers fuse."""
    return x_TD.device.type in _KERNELS and (torch.compiler.is_compiling() or not observed())


def run_gate(*tensors: Tensor, cost: float, k_min: int, rule: str) -> Tensor:
    """k of every token, int32 [T], by one operator; cost: of one learner, in units of the mean site's."""
    if torch.compiler.is_compiling():
        return torch.ops.acm.gate(*tensors, cost=cost, k_min=k_min, rule=rule)
    with torch._C._AutoDispatchBelowAutograd():
        return GATE.default(*tensors, cost=cost, k_min=k_min, rule=rule)


def as_gate(*tensors: Tensor, cost: float, k_min: int, rule: str) -> Tensor:
    """`acm::gate` in plain torch."""
    x, w_inner, b_inner, w_outer, b_outer, knob, k_lo, k_hi = GateArguments(*tensors)
    with without_autocast(x.device):
        score_TC = F.linear(F.gelu(F.linear(x.to(w_inner.dtype), w_inner, b_inner)), w_outer, b_outer)
    score_TC = score_TC.double() if x.dtype == torch.float64 else score_TC.float()
    cost_C = choice_costs(cost, k_min=k_min, n_learners=k_min + score_TC.shape[1] - 1, device=x.device)
    return choose_k(utilities(score_TC, knob, cost_C, rule), k_lo, k_hi, k_min)


def observed() -> bool:
    """True under someone's dispatch mode (a FLOP counter, a logger): it should see plain operations.

    Not under one that says `takes_operators`.
    """
    if not torch._C._len_torch_dispatch_stack():
        return False
    modes = _get_current_dispatch_mode_stack()
    return any(getattr(m, "_mode_key", None) is None and not getattr(m, "takes_operators", False) for m in modes)


def cast_weights(weights: Weights, dtype: torch.dtype) -> Weights:
    """The same weights in another floating type; quantised ones stay, with their scales."""
    kept = () if not weights.is_quantized else integers.WEIGHTS + integers.SCALES
    tensors: Any = (
        tensor if tensor is None or name in kept else tensor.to(dtype)
        for name, tensor in weights.tensors._asdict().items()
    )
    return Weights(*tensors, act=weights.act, form=weights.form)


def load_kernels(device: str) -> bool:
    """Load the kernels for that type of device, once; True if they have taken over just now."""
    if device in _ASKED or device not in _KERNELS:
        return False
    _ASKED.add(device)
    return importlib.import_module(_KERNELS[device]).take_over()


def has_kernels(device: str) -> bool:
    """True if kernels are in charge on that type of device."""
    return device in _KERNELS and torch._C._dispatch_has_kernel_for_dispatch_key("acm::learners", device.upper())


def run_call(call: LearnersArguments, *, form: str, act: str) -> Tensor:
    """The reference of a call of `acm::learners`, checked."""
    require_learners(call, form=form)
    y = run_learners(call.x, call.k, Weights.of(call, form=form, act=act))
    return y if call.residual is None else y + call.residual


def _reference(x: Tensor, *tensors: Any, form: str, act: str) -> Tensor:
    y = run_call(LearnersArguments(x, *tensors), form=form, act=act)
    # an operator must not return an alias of what it was given
    return y.clone() if y.data_ptr() == x.data_ptr() and y.numel() else y


def load_for_graph(x: Tensor) -> None:
    """Load the kernels that a graph of such tensors holds once operators are decomposed."""
    if x.device.type == "cuda" and torch.cuda.is_available():
        load_kernels(x.device.type)


def fake_learners(*tensors: Any, form: str, act: str) -> Tensor:
    refuse_onnx()
    call = LearnersArguments(*tensors)
    load_for_graph(call.x)
    require_learners(call, form=form, same=may_equal)
    return call.x.new_empty(call.x.shape[0], call.b_out.shape[1])


def _gate_reference(*tensors: Tensor, cost: float, k_min: int, rule: str) -> Tensor:
    require_gate(GateArguments(*tensors), k_min=k_min, rule=rule)
    return as_gate(*tensors, cost=cost, k_min=k_min, rule=rule)


def fake_gate(*tensors: Tensor, cost: float, k_min: int, rule: str) -> Tensor:
    call = GateArguments(*tensors)
    load_for_graph(call.x)
    require_gate(call, k_min=k_min, rule=rule, same=may_equal)
    return call.x.new_empty(call.x.shape[0], dtype=torch.int32)


def define(name: str, signature: str, reference: Callable[..., Tensor], fake: Callable[..., Tensor]) -> Any:
    """`acm::NAME`: kernels, which the first call on a type of device loads, and where there are none the reference.

    reference: in plain torch, an operator of its own, `acm::NAME_reference`, which kernels call for what they do not
    cover.
    """
    for defined in (name, f"{name}_reference"):
        LIBRARY.define(f"{defined}{signature}")
    operator, plain = getattr(torch.ops.acm, name), getattr(torch.ops.acm, f"{name}_reference")

    def run(x: Tensor, *tensors: Tensor | None, **options: Any) -> Tensor:
        return (operator if load_kernels(x.device.type) else plain)(x, *tensors, **options)

    torch.library.impl(f"acm::{name}", "CompositeExplicitAutograd", run, lib=LIBRARY)
    torch.library.impl(f"acm::{name}_reference", "CompositeExplicitAutograd", reference, lib=LIBRARY)
    torch.library.register_fake(f"acm::{name}", fake, lib=LIBRARY)
    return operator


def map_tokens(op: Any, kind: Any, shared: str) -> None:
    """Register vmap: one call for all copies, as tokens are independent and the mapped axis is one more of theirs.

    shared: what all copies have in common, for the message when it is mapped, too.
    """
    of_tokens = [name for name in ("x", "k", "residual") if name in kind._fields]

    def rule(info, in_dims, *tensors, **options):
        call, dims = kind(*tensors), kind(*in_dims)
        if any(dim is not None for dim in dims._replace(**dict.fromkeys(of_tokens))):
            raise UsageError(f"vmap over the {shared} of an ACM", fix="map over the inputs only")
        mapped = {name: _all_copies(info, getattr(call, name), getattr(dims, name)) for name in of_tokens}
        y = op(*call._replace(**mapped), **options)
        return y.unflatten(0, (info.batch_size, -1)), 0

    torch.library.register_vmap(op._qualified_op_name, rule, lib=LIBRARY)


def _all_copies(info, value: Tensor | None, dim: int | None) -> Tensor | None:
    """[T, D] of all copies as one, [copies * T, D]."""
    if value is None:
        return None
    spread = value.expand(info.batch_size, *value.shape) if dim is None else value.movedim(dim, 0)
    return spread.flatten(0, 1)


GATE = define("gate", f"({schema(GateArguments)}, *, {CHOICES}) -> Tensor", _gate_reference, fake_gate)
LEARNERS = define("learners", f"({schema(LearnersArguments)}, *, {FORM}) -> Tensor", _reference, fake_learners)
GATE_REFERENCE, REFERENCE = torch.ops.acm.gate_reference, torch.ops.acm.learners_reference
map_tokens(GATE, GateArguments, "gate")
map_tokens(LEARNERS, LearnersArguments, "weights")
