"""Calls of the native CPU operators with operands that fit and that do not.

Run as `python -m tests.helpers.asan_cases LIBRARY`, it draws such calls at random from a library that was built with
AddressSanitizer, which ends the process at the first read or write beyond a tensor.
"""

from __future__ import annotations

import ctypes
import sys

import torch

from acm_compiler.acm import ops
from acm_compiler.acm.arguments import GateArguments, GatedArguments, LearnersArguments
from acm_compiler.acm.gated_learners import GATED
from acm_compiler.acm.sparse import SPARSE, SparseArguments
from acm_compiler.acm.steps import ATTENTION, STEPS, Program, Step, gated_options
from acm_compiler.errors import UsageError
from tests.acm.test_reference import FORMS, OUT, D, N, weights_of

T = 7


def learners_call(kind: str, dtype: torch.dtype = torch.float32, tokens: int = T):
    """Positional and keyword arguments of `acm::learners` for one kind of ACM."""
    w = weights_of(kind)
    tensors = (None if t is None else t.detach().to(dtype) for t in w.tensors)
    x, residual = torch.randn(tokens, D, dtype=dtype), torch.randn(tokens, OUT, dtype=dtype)
    k = torch.randint(0, N + 1, (tokens,), dtype=torch.int32)
    return LearnersArguments(x, k, *tensors, residual), {"form": w.form, "act": w.act}


def gate_call(dtype: torch.dtype = torch.float32, tokens: int = T):
    """Positional and keyword arguments of `acm::gate`."""
    shapes = ((tokens, D), (6, D), (6,), (N + 1, 6), (N + 1,))
    bounds = (torch.tensor(k, dtype=torch.int32) for k in (0, N))
    tensors = (torch.randn(shape).to(dtype) for shape in shapes)
    return GateArguments(*tensors, torch.tensor(0.1), *bounds), {"cost": 0.7, "k_min": 0, "rule": "logits"}


def gated_call(kind: str, dtype: torch.dtype = torch.float32, tokens: int = T):
    """Positional and keyword arguments of `acm::gated_learners` with a norm."""
    (x, _, *weights), kwargs = learners_call(kind, dtype, tokens)
    (_, *gate), choices = gate_call(dtype)
    affine = torch.rand(D, dtype=dtype), torch.randn(D, dtype=dtype)
    return GatedArguments(x, *gate, *weights, *affine), kwargs | choices | {"norm_eps": 1e-5}


def sparse_call(kind: str, dtype: torch.dtype = torch.float32, tokens: int = T):
    """Positional and keyword arguments of `acm::sparse_learners` for one kind of MLP; `per_k` is refused."""
    (x, k, *weights), kwargs = learners_call(kind, dtype, tokens)
    n, width, d_in = weights[0].shape
    return SparseArguments(x, k, torch.rand(d_in), torch.rand(n, width) / 2, *weights[:7]), kwargs


def steps_call(kind: str, dtype: torch.dtype = torch.float32, tokens: int = T):
    """Positional and keyword arguments of `run_steps`: an ACM, a norm of its result, and an attention of that."""
    args, kwargs = gated_call(kind, dtype, tokens)
    tensors = [t for t in args if t is not None]
    numbers = iter(range(len(tensors)))
    operands = tuple(None if t is None else next(numbers) for t in args)
    y = len(tensors)
    steps = (
        Step("gated", operands, tuple(gated_options(kwargs).values())),
        Step("norm", (y, None, None), (1e-5, True)),
        Step("attention", (y + 1, y, y + 1), (1, T, tokens % 2 == 0, 0.3)),
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


def main(library: str) -> None:
    """Draw calls whose operands are cut, grown or of another type, and call; a refusal is as good as an answer."""
    from hypothesis import given, settings
    from hypothesis import strategies as st

    makers = (
        *((ops.LEARNERS, learners_call), (ops.GATE, gate_call), (GATED, gated_call), (SPARSE, sparse_call)),
        *((run_steps, steps_call), (run_attention, attention_call)),
    )
    torch.ops.load_library(library)
    ctypes.CDLL(library).acm_take_over()
    answered = []

    @st.composite
    def calls(draw):
        op, make = draw(st.sampled_from(makers))
        dtype = draw(st.sampled_from((torch.float32, torch.bfloat16)))
        forms = [form for form in FORMS if make is not sparse_call or form not in ("rows", "cols")]
        kind = () if make in (gate_call, attention_call) else (draw(st.sampled_from(forms)),)
        args, kwargs = make(*kind, dtype, draw(st.integers(0, 40)))
        tensors = list(args)
        for _ in range(draw(st.integers(0, 2))):
            place = draw(st.integers(0, len(tensors) - 1))
            if tensors[place] is not None:
                tensors[place] = changed(draw, tensors[place])
        return op, tensors, kwargs

    def changed(draw, tensor):
        if not tensor.dim():
            return tensor.expand(draw(st.integers(0, 2))).clone()
        axis = draw(st.integers(0, tensor.dim() - 1))
        index = torch.arange(draw(st.integers(0, 2 * tensor.shape[axis]))) % tensor.shape[axis]
        other = draw(st.sampled_from((tensor.dtype, torch.float32, torch.bfloat16)))
        # clone: a tensor of its own, at whose ends the sanitizer watches
        return tensor.index_select(axis, index).to(other if tensor.is_floating_point() else tensor.dtype).clone()

    @settings(max_examples=1500, deadline=None, derandomize=True, database=None)
    @given(calls())
    def fuzz(call):
        op, tensors, kwargs = call
        try:
            answered.append(op(*tensors, **kwargs).shape)
        except UsageError:
            answered.append(None)

    with torch.no_grad():
        fuzz()
    refused = sum(shape is None for shape in answered)
    sys.stdout.write(f"{len(answered) - refused} {refused}\n")


if __name__ == "__main__":
    main(sys.argv[1])
