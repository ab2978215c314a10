"""The torch.export program of a module, one graph for all lengths of its free axes, and what it takes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import partial
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn
from torch._library.custom_ops import OPDEFS
from torch.utils import _pytree as pytree

from acm_compiler.acm import ACM
from acm_compiler.calibration.answer import without_masked
from acm_compiler.errors import AcmError, UsageError, VerificationFailed
from acm_compiler.exporting.calls import Call
from acm_compiler.passes.rewrite.conversion import Rewritten
from acm_compiler.sources.user_code import Attempt, first_line, with_frames

# of outputs, relative to the largest value
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
# the same for quantised learners: rounded otherwise, a value between two integers becomes the other one
_QUANTIZED = 2e-2
# at which a program is compared with the model
_BUDGETS = 5
# products of the experts of a mixture, by groups of rows, as transformers traces them
_EXPERTS = "transformers.grouped_mm_fallback.default"
Answer = Callable[[float], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInput:
    """One tensor that a program takes: axes of any length have a name in `shape` where others have a number."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A program, the call that it was made with, and the model's output for that call at a budget.

    `names` are those of the call's inputs, in order. `low` is the least budget, None where there is no choice.
    `quantized`: whether the model has quantised learners.
    """

    program: torch.export.ExportedProgram
    call: Call
    names: tuple[str, ...]
    answer: Answer
    low: float | None
    quantized: bool

    @property
    def device(self) -> torch.device:
        """The device of the ACMs, and of a budget that is an input."""
        budget = self.call[1].get("budget")
        return budget.device if isinstance(budget, Tensor) else torch.device("cpu")

    @property
    def clamps(self) -> bool:
        """True where a budget out of range is no error, as of `controls.asserted`."""
        return self.device.type != "cpu"

    @property
    def words(self) -> list[str]:
        """The call's arguments as one writes them."""
        args, kwargs = self.call
        values = dict(zip(self.names, (*args, *kwargs.values()), strict=True))
        shown = {name: name if _tensors(value) else repr(value) for name, value in values.items()}
        if "budget" in kwargs:
            there = "" if self.device.type == "cpu" else f', device="{self.device.type}"'
            each = kwargs["budget"].dim()
            shown["budget"] = f"torch.full((batch,), 0.4{there})" if each else f"torch.tensor(0.4{there})"
        return [shown[name] for name in self.names[: len(args)]] + [f"{name}={shown[name]}" for name in kwargs]

    @property
    def inputs(self) -> list[TensorInput]:
        """The tensors that the program takes; names of free axes: batch, length, or made of the input's.

        Axes called length are as long as each other.
        """
        args, kwargs = self.call
        values = dict(zip(self.names, (*args, *kwargs.values()), strict=True))
        leaves: list[tuple[Any, Any]] = pytree.tree_flatten_with_path(values)[0]
        nodes = {node.name: node for node in self.program.graph.nodes if node.op == "placeholder"}
        found, lengths = [], list[str]()
        for (path, leaf), node in zip(leaves, self.program.graph_signature.user_inputs, strict=True):
            if isinstance(leaf, Tensor):
                name = path[0].key + pytree.keystr(path[1:])
                sizes = enumerate(map(_known, nodes[node].meta["val"].shape))
                shape = tuple(_size(size, name, axis, lengths) for axis, size in sizes)
                found.append(TensorInput(name=name, dtype=str(leaf.dtype).removeprefix("torch."), shape=shape))
        return found

    @property
    def outputs(self) -> list[str]:
        """Names of the tensors that the program gives, in order: keys and places, "output" for one tensor alone."""
        taken = {tensor.name for tensor in self.inputs}
        leaves = pytree.tree_flatten_with_path(self.answer(1.0))[0]
        paths = [path for path, leaf in leaves if isinstance(leaf, Tensor)]
        names = ["_".join(pytree.keystr((key,)).strip("[].'") for key in path) for path in paths]
        plain = [bool(name) and not name[0].isdigit() and name not in taken for name in names]
        return [name if is_plain else f"output_{name}".rstrip("_") for name, is_plain in zip(names, plain, strict=True)]

    @property
    def size_bytes(self) -> int:
        """The size of its weights."""
        tensors = {id(t): t for t in (*self.program.state_dict.values(), *self.program.constants.values())}
        return sum(t.numel() * t.element_size() for t in tensors.values() if isinstance(t, Tensor))

    def check(self, run: Callable[..., Any], *, where: str) -> float:
        """The largest relative error of `run` against the model, at five budgets from the least to 1.

        VerificationFailed where it is above the tolerance of the outputs' type.
        """
        args, kwargs = self.call
        if self.low is None:
            found, expected = drawn(partial(run, *args, **kwargs)), drawn(partial(self.answer, 1.0))
            return check_answers(found, expected, where=where, quantized=self.quantized)
        errors = []
        for step in range(_BUDGETS):
            budget = self.low + (1 - self.low) * step / (_BUDGETS - 1)
            given = kwargs | {"budget": torch.full_like(kwargs["budget"], budget)}
            place = f"{where}, budget {budget:.3f}"
            found, expected = drawn(partial(run, *args, **given)), drawn(partial(self.answer, budget))
            errors.append(check_answers(found, expected, where=place, quantized=self.quantized))
        return max(errors)


def trace(module: nn.Module, call: Call, free: dict[str, Any]) -> torch.export.ExportedProgram:
    """The program of `module` for the `call`; UsageError, with torch's reason, for what it cannot be made of.

    free: the axes of any length, as torch.export is told of them.
    """
    from torch._inductor import config

    args, kwargs = call
    refusal = refusing("torch.export makes no program of this model")
    # a graph to be frozen would keep what it reads of the ACMs; one that torch gives up it prints first, whole
    with refusal, config.patch(freezing=False), redirect_stderr(StringIO()) as said:
        program = torch.export.export(module, args, kwargs, dynamic_shapes=free, strict=False)
    sys.stderr.write(said.getvalue())
    return program


def with_products_of_torch(program: torch.export.ExportedProgram) -> None:
    """Give a program torch's own product of experts, which the model runs, for the one that transformers traces."""
    for node in program.graph.nodes:
        if str(node.target) == _EXPERTS:
            node.target = torch.ops.aten._grouped_mm.default
    program.graph_module.recompile()


def refuse_python(program: torch.export.ExportedProgram, format: str) -> None:
    """UsageError for a program with an operator that another library has in Python alone."""
    for node in program.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name in OPDEFS:
            fix = "format pt2"
            if str(node.target) == _EXPERTS:
                fix += "; or original.set_experts_implementation('batched_mm') before acm.rewrite: more memory"
            raise UsageError(
                f"the format {format} holds no operator that is written in Python", found=str(node.target), fix=fix
            )


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """A block in which a model, or a library, may raise anything, which becomes a UsageError; ours stay as they are."""
    attempt = Attempt()
    with attempt:
        yield
    error = attempt.error
    if error is None:
        return
    if isinstance(error, AcmError):
        raise error
    told: BaseException = error
    while type(told).__module__.startswith("torch.onnx") and told.__cause__ is not None:
        told = told.__cause__  # its own lines are advice for whoever writes converters
    reasons = [line.strip(" -") for line in str(told).splitlines() if line.lstrip().startswith("- ")]
    reason = f"{type(told).__name__}: {reasons[0]}" if reasons else first_line(told)
    raise UsageError(with_frames(f"{what}: {reason}", error)) from error


@contextmanager
def given_to(acms: Mapping[ACM, Mapping[str, Any]]) -> Iterator[None]:
    """Inside, ACMs have other values of their attributes; their own come back."""
    held = [(acm, name, getattr(acm, name)) for acm, values in acms.items() for name in values]
    try:
        for acm, values in acms.items():
            for name, value in values.items():
                setattr(acm, name, value)
        yield
    finally:
        for acm, name, value in held:
            setattr(acm, name, value)


def without_dense_regions(found: Rewritten) -> AbstractContextManager[None]:
    """Inside, ACMs with learners do not hold the dense regions that no forward runs: programs hold all they see."""
    return given_to({acm: {"dense": None} for acm in found.acms.values() if acm.state != "dense"})


def counters_kept(found: Rewritten, *, traced: bool) -> AbstractContextManager[None]:
    """Inside, a model with a meter has counters of its own, or none where graphs are not to hold any."""
    counted = {acm: acm.counts for acm in found.acms.values() if acm.counts is not None}
    return given_to({acm: {"counts": torch.zeros_like(counts) if traced else None} for acm, counts in counted.items()})


def _known(size: Any) -> Any:
    """A length; as a number where the graph allows no other, of which the example's shape knows nothing."""
    known = size.node.maybe_as_int() if isinstance(size, torch.SymInt) else None
    return size if known is None else known


def _size(size: Any, name: str, axis: int, lengths: list[str]) -> int | str:
    """One length of a shape: a number, or the name of a free one. `lengths` takes the first that is called so."""
    if isinstance(size, int) or axis == 0:
        return size if isinstance(size, int) else "batch"
    if axis == 1 and not lengths:
        lengths.append(str(size))
    return "length" if axis == 1 and str(size) in lengths else f"{name}_{axis}"


def drawn(run: Callable[[], Any]) -> Any:
    """The output of `run`; a model that draws random numbers, and its program, draw the same ones."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return run()


def check_answers(found: Any, expected: Any, *, where: str, quantized: bool = False) -> float:
    """The largest difference of two outputs, relative to the largest value; VerificationFailed above the tolerance.

    quantized: whether they are those of quantised learners.
    """
    pairs = zip(_tensors(found), _tensors(expected), strict=True)
    error = max((_error(a.double(), b.double()) for a, b in pairs if b.numel()), default=0.0)
    limit = max((TOLERANCE.get(tensor.dtype, 0.0) for tensor in _tensors(expected)), default=0.0)
    if quantized:
        limit = max(limit, _QUANTIZED)
    if not error <= limit:
        raise VerificationFailed(
            "what was exported gives other outputs than the model",
            where=where,
            found=f"relative error {error:.1e}",
            expected=f"at most {limit:.0e}",
        )
    return error


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


def _error(found: Tensor, expected: Tensor) -> float:
    found, expected = without_masked(found.to(expected.device), expected)
    undefined = found.isnan() & expected.isnan()
    found, expected = found.masked_fill(undefined, 0), expected.masked_fill(undefined, 0)
    largest = float(expected.where(expected.isfinite(), 0).abs().max())
    return float((found - expected).abs().max()) / (largest or 1.0)
