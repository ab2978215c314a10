"""The torch.export program of a module, one graph for all lengths of its free axes, and what it takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from acm_compiler.errors import AcmError, UsageError, VerificationFailed
from acm_compiler.exporting.calls import Call
from acm_compiler.passes.rewrite.conversion import Rewritten
from acm_compiler.sources.user_code import Attempt, first_line, with_frames

# of outputs, relative to the largest value; a token whose gate is undecided may go the other way
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInput:
    """One tensor that a program takes: axes of any length have a name in `shape` where others have a number."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


def trace(module: nn.Module, call: Call, free: Any) -> torch.export.ExportedProgram:
    """The program of `module` for the `call`; UsageError, with torch's reason, for what it cannot be made of."""
    from torch._inductor import config

    args, kwargs = call
    attempt = Attempt()
    with attempt, config.patch(freezing=False):  # a graph to be frozen would keep what it reads of the ACMs
        return torch.export.export(module, args, kwargs, dynamic_shapes=free, strict=False)
    assert attempt.error is not None
    raise refused("torch.export makes no program of this model", attempt.error)


def refused(what: str, error: BaseException) -> AcmError:
    """The refusal for what another library raised; our own errors stay as they are."""
    if isinstance(error, AcmError):
        return error
    lines = [line.strip(" -") for line in str(error).splitlines() if line.lstrip().startswith("- ")]
    reason = f"{type(error).__name__}: {lines[0]}" if lines else first_line(error)
    made = UsageError(with_frames(f"{what}: {reason}", error), fix="leave the axis out of `dynamic`" if lines else None)
    made.__cause__ = error
    return made


@contextmanager
def without_dense_regions(found: Rewritten) -> Iterator[None]:
    """Inside, ACMs with learners do not hold the dense regions that no forward runs: programs hold all they see."""
    held = {acm: acm.dense for acm in found.acms.values() if acm.state != "dense"}
    try:
        for acm in held:
            acm.dense = None
        yield
    finally:
        for acm, dense in held.items():
            acm.dense = dense


def tensor_inputs(program: torch.export.ExportedProgram, names: Sequence[str], call: Call) -> list[TensorInput]:
    """The tensors that the program takes, in order; names of its free axes: batch, length, or that of the input."""
    args, kwargs = call
    values = dict(zip(names, (*args, *kwargs.values()), strict=True))
    leaves, _ = pytree.tree_flatten_with_path(values)
    placeholders = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    known: dict[str, str] = {}
    found = []
    for (path, leaf), placeholder in zip(leaves, program.graph_signature.user_inputs, strict=True):
        if isinstance(leaf, Tensor):
            name = path[0].key + pytree.keystr(path[1:])
            shape = placeholders[placeholder].shape
            sizes = tuple(_size(size, name, axis, known) for axis, size in enumerate(shape))
            found.append(TensorInput(name=name, dtype=str(leaf.dtype).removeprefix("torch."), shape=sizes))
    return found


def _size(size: Any, name: str, axis: int, known: dict[str, str]) -> int | str:
    if isinstance(size, int):
        return size
    usual = {0: "batch", 1: "length"}.get(axis, f"{name}_{axis}")
    return known.setdefault(str(size), usual if usual not in known.values() else f"{name}_{axis}")


def worst_error(found: Any, expected: Any) -> float:
    """The largest difference of the tensors of two outputs, relative to the largest value expected of each."""
    pairs = zip(_tensors(found), _tensors(expected), strict=True)
    errors = [_error(a.double(), b.double()) for a, b in pairs if b.numel()]
    return max(errors, default=0.0)


def check_answers(found: Any, expected: Any, *, where: str) -> float:
    """The `worst_error`; VerificationFailed where it is above the tolerance of the outputs' type."""
    error = worst_error(found, expected)
    limit = max((TOLERANCE.get(tensor.dtype, 0.0) for tensor in _tensors(expected)), default=0.0)
    if not error <= limit:
        raise VerificationFailed(
            "what was exported gives other outputs than the model",
            where=where,
            found=f"relative error {error:.1e}",
            expected=f"at most {limit:.0e}",
        )
    return error


def _tensors(output: Any) -> list[Tensor]:
    plain = dict(output) if isinstance(output, Mapping) else output
    return [leaf for leaf in pytree.tree_leaves(plain) if isinstance(leaf, Tensor)]


def _error(found: Tensor, expected: Tensor) -> float:
    largest = float(expected.abs().max())
    return float((found.to(expected.device) - expected).abs().max()) / (largest or 1.0)
