"""Calls of the native CPU operators with operands that fit and that do not.

Run as `python -m tests.helpers.sanitizer_cases LIBRARY COUNT`, it makes so many of them, drawn at random, of a library
that was built with AddressSanitizer and UndefinedBehaviorSanitizer, which end the process at the first read or write
beyond a tensor, and at what C++ leaves undefined.
"""

from __future__ import annotations

import ctypes
import sys
from collections import defaultdict
from dataclasses import replace

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from acm_compiler.acm import ops
from acm_compiler.acm.arguments import GateArguments, GatedArguments, LearnersArguments, Weights
from acm_compiler.acm.gated_learners import GATED
from acm_compiler.acm.quantized import integers
from acm_compiler.acm.sparse import SPARSE, SparseArguments
from acm_compiler.acm.steps import ATTENTION, STEPS, Program, Step, gated_options
from acm_compiler.errors import UsageError
from tests.acm.test_reference import D, N, weights_of
from tests.helpers import kernel_cases
from tests.helpers.kernel_cases import Case

T = 7
MLPS = tuple((form, second) for form in ("mlp", "gated", "linear") for second in ("shared", "per_k", "top"))
FORMS = (*MLPS, ("rows", "shared"), ("cols", "shared"))
QUANTIZED = (None, None, "int8", "int4")


def learners_call(kind: str | Weights, dtype: torch.dtype = torch.float32, tokens: int = T, *, features: int = D):
    """Positional and keyword arguments of `acm::learners` for one kind of ACM, or for these weights."""
    w = ops.cast_weights(weights_of(kind) if isinstance(kind, str) else kind, dtype)
    x, residual = torch.randn(tokens, features, dtype=dtype), torch.randn(tokens, w.b_out.shape[1], dtype=dtype)
    k = torch.randint(0, w.learners + 1, (tokens,), dtype=torch.int32)
    return LearnersArguments(x, k, *w.tensors, residual), {"form": w.form, "act": w.act}


def gate_call(dtype: torch.dtype = torch.float32, tokens: int = T, *, features: int = D, learners: int = N):
    """Positional and keyword arguments of `acm::gate`."""
    shapes = ((tokens, features), (6, features), (6,), (learners + 1, 6), (learners + 1,))
    bounds = (torch.tensor(k, dtype=torch.int32) for k in (0, learners))
    tensors = (torch.randn(shape).to(dtype) for shape in shapes)
    return GateArguments(*tensors, torch.tensor(0.1), *bounds), {"cost": 0.7, "k_min": 0, "rule": "logits"}


def gated_call(kind: str | Weights, dtype: torch.dtype = torch.float32, tokens: int = T, *, features: int = D):
    """Positional and keyword arguments of `acm::gated_learners` with a norm."""
    (x, _, *weights), kwargs = learners_call(kind, dtype, tokens, features=features)
    (_, *gate), choices = gate_call(dtype, features=features, learners=weights[0].shape[0])
    affine = torch.rand(features, dtype=dtype), torch.randn(features, dtype=dtype)
    return GatedArguments(x, *gate, *weights, *affine), kwargs | choices | {"norm_eps": 1e-5}


def sparse_call(kind: str | Weights, dtype: torch.dtype = torch.float32, tokens: int = T, *, features: int = D):
    """Positional and keyword arguments of `acm::sparse_learners` for one kind of MLP; `per_k` is refused."""
    (x, k, *weights), kwargs = learners_call(kind, dtype, tokens, features=features)
    n, width = weights[0].shape[:2]
    return SparseArguments(x, k, torch.rand(features), torch.rand(n, width) / 2, *weights[:7]), kwargs


def steps_call(kind: str | Weights, dtype: torch.dtype = torch.float32, tokens: int = T, *, features: int = D):
    """Positional and keyword arguments of `run_steps`: an ACM, a norm of its result, and an attention of that."""
    args, kwargs = gated_call(kind, dtype, tokens, features=features)
    tensors = [t for t in args if t is not None]
    numbers = iter(range(len(tensors)))
    operands = tuple(None if t is None else next(numbers) for t in args)
    y = len(tensors)
    steps = (
        Step("gated", operands, tuple(gated_options(kwargs).values())),
        Step("norm", (y, None, None), (1e-5, True)),
        Step("attention", (y + 1, y, y + 1), (1, tokens, tokens % 2 == 0, 0.3)),
    )
    return tensors, {"program": Program(y, steps, (y + 2,)).text()}


def run_steps(*tensors: torch.Tensor, program: str) -> torch.Tensor:
    """The one result of `acm::steps`; UsageError for what it refuses."""
    try:
        return STEPS(list(tensors), program)[0]
    except RuntimeError as error:
        raise UsageError(str(error)) from error


def attention_call(dtype: torch.dtype = torch.float32, tokens: int = T):
    """Positional and keyword arguments of `run_attention`: heads that need no padding, and some that do."""
    depth = 32 if tokens % 3 else 20
    return list(torch.randn(3, 2, tokens, 3, depth).to(dtype).unbind()), {"scale": 0.2, "causal": tokens % 2 == 0}


def run_attention(*tensors: torch.Tensor, scale: float, causal: bool) -> torch.Tensor:
    """`acm::attention` of rows [B, T, heads, depth]; UsageError for what it, or torch in its place, refuses."""
    try:
        return ATTENTION(*(tensor.transpose(1, 2) for tensor in tensors), scale=scale, causal=causal)
    except RuntimeError as error:
        raise UsageError(str(error)) from error


def drawn_weights(draw, form: str, second: str) -> tuple[Weights, int]:
    """Learners of sizes that fill registers and tiles in part, floats or integers, and the features of their input."""
    to = draw(st.sampled_from(QUANTIZED))
    even = 2 if to == "int4" else 1  # two values share a byte
    n, heads, width, d_in, d_out = (draw(st.integers(1, most)) for most in (5, 3, 20, 70, 70))
    case = Case(form=form, second=second, learners=n, width=even * width, d_in=even * d_in, d_out=d_out)
    if form in ("rows", "cols"):
        case = replace(case, heads=heads, width=heads * case.width)
        case = replace(case, **{"d_out" if form == "rows" else "d_in": n * case.width})
    case = replace(case, act="identity", bias=False) if form == "linear" else replace(case, bias=draw(st.booleans()))
    weights = kernel_cases.to(kernel_cases.weights_of(case), torch.float32)
    return integers.quantized(weights, to) if to else weights, case.d_in


def main(library: str, count: int) -> None:
    """Draw calls whose operands are cut, grown or of another type, and call; a refusal is as good as an answer."""
    makers = (
        *((ops.LEARNERS, learners_call), (ops.GATE, gate_call), (GATED, gated_call), (SPARSE, sparse_call)),
        *((run_steps, steps_call), (run_attention, attention_call)),
    )
    torch.ops.load_library(library)
    ctypes.CDLL(library).acm_take_over()
    answered: dict[str, list[bool]] = defaultdict(list)

    @st.composite
    def calls(draw):
        op, make = draw(st.sampled_from(makers))
        dtype, tokens = draw(st.sampled_from((torch.float32, torch.bfloat16))), draw(st.integers(0, 40))
        if make in (gate_call, attention_call):
            args, kwargs = make(dtype, tokens)
        else:
            weights, features = drawn_weights(draw, *draw(st.sampled_from(MLPS if make is sparse_call else FORMS)))
            args, kwargs = make(weights, dtype, tokens, features=features)
        tensors = list(args)
        for _ in range(draw(st.integers(0, 2))):
            place = draw(st.integers(0, len(tensors) - 1))
            if tensors[place] is not None:
                tensors[place] = changed(draw, tensors[place])
        return op, make.__name__, tensors, kwargs

    def changed(draw, tensor):
        if not tensor.dim():
            return tensor.expand(draw(st.integers(0, 2))).clone()
        axis = draw(st.integers(0, tensor.dim() - 1))
        index = torch.arange(draw(st.integers(0, 2 * tensor.shape[axis]))) % tensor.shape[axis]
        other = draw(st.sampled_from((tensor.dtype, torch.float32, torch.bfloat16)))
        # clone: a tensor of its own, at whose ends the sanitizer watches
        return tensor.index_select(axis, index).to(other if tensor.is_floating_point() else tensor.dtype).clone()

    @settings(
        max_examples=count, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(calls())
    def fuzz(call):
        op, name, tensors, kwargs = call
        try:
            op(*tensors, **kwargs)
            answered[name].append(True)
        except UsageError:
            answered[name].append(False)

    with torch.no_grad():
        fuzz()
    for name, answers in answered.items():
        sys.stdout.write(f"{name} {sum(answers)} {len(answers) - sum(answers)}\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
