"""`acm::steps`: operators that read each other's results as one call, which compilers put where a graph allows it.

What a call costs outside its products is most of the time of a small model or a single image. A program says what is
run; its text, an argument of the operator, has a part for each step, with values by number: first the tensors of the
call, then the results of the steps. Absent tensors are "-".

    tensors COUNT;
    gated TENSORS-OF-GatedArguments COST K_MIN RULE FORM ACT EPS CENTRED;     acm::gated_learners; EPS "-": no norm
    norm X WEIGHT BIAS EPS CENTRED;                                           of rows [T, D]
    attention Q K V HEADS LENGTH CAUSAL SCALE;                                of rows [T, HEADS * D], LENGTH a sequence
    results NUMBERS

It is one line, as Inductor writes it unescaped into the C++ that `cpp_wrapper` makes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from acm_compiler.acm.arguments import GatedArguments
from acm_compiler.acm.gated_learners import GATED, fake_gated
from acm_compiler.acm.ops import LIBRARY, define, load_kernels
from acm_compiler.acm.reference import Norm, normalised

LIBRARY.define("steps(Tensor[] tensors, str program) -> Tensor[]")
STEPS = torch.ops.acm.steps
_GATED_OPTIONS: dict[str, Callable[[str], Any]] = {
    **{"cost": float, "k_min": int, "rule": str, "form": str, "act": str},
    **{"norm_eps": lambda word: None if word == "-" else float(word), "norm_centred": lambda word: word == "1"},
}


@dataclass(frozen=True, slots=True)
class Step:
    """An operator, its operands by number (None: absent), and its options in the order of the program's text."""

    kind: str
    operands: tuple[int | None, ...]
    options: tuple[Any, ...]

    def text(self) -> str:
        """The step as a part of a program's text."""
        return " ".join(map(_word, (self.kind, *self.operands, *self.options)))

    def run(self, values: Sequence[Tensor], gated: Callable[..., Tensor]) -> Tensor:
        """The result of the step, where `gated` runs an ACM."""
        tensors = [None if number is None else values[number] for number in self.operands]
        if self.kind == "gated":
            return gated(*tensors, **dict(zip(_GATED_OPTIONS, self.options, strict=True)))
        x, *others = tensors
        assert x is not None
        if self.kind == "norm":
            eps, centred = self.options
            return normalised(x, Norm(weight=others[0], bias=others[1], eps=eps, centred=centred))
        heads, length, causal, scale = self.options
        q, k, v = (
            t.reshape(-1, length, heads, t.shape[1] // heads).transpose(1, 2) for t in (x, *others) if t is not None
        )
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale).transpose(1, 2).reshape(x.shape)


@dataclass(frozen=True, slots=True)
class Program:
    """Steps over so many tensors, and the numbers of the values that the operator returns."""

    tensors: int
    steps: tuple[Step, ...]
    results: tuple[int, ...]

    def text(self) -> str:
        """The argument of the operator."""
        ends = f"tensors {self.tensors}", " ".join(map(str, ("results", *self.results)))
        return "; ".join([ends[0], *(step.text() for step in self.steps), ends[1]])

    def run(self, tensors: Sequence[Tensor], gated: Callable[..., Tensor]) -> list[Tensor]:
        """The results, where `gated` runs an ACM."""
        values = list(tensors)
        for step in self.steps:
            values.append(step.run(values, gated))
        return [values[number] for number in self.results]


def gated_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `acm::gated_learners`, with defaults, in the order of a program's text."""
    given = {"norm_eps": None, "norm_centred": True, **options}
    return {name: given[name] for name in _GATED_OPTIONS}


@cache
def read_program(text: str) -> Program:
    """The program of that text."""
    first, *steps, last = text.split(";")
    return Program(int(first.split()[1]), tuple(map(_read_step, steps)), tuple(map(int, last.split()[1:])))


def _read_step(text: str) -> Step:
    kind, *words = text.split()
    count = len(GatedArguments._fields) if kind == "gated" else 3
    readers: Any = {
        "gated": tuple(_GATED_OPTIONS.values()),
        "norm": (float, lambda word: word == "1"),
        "attention": (int, int, lambda word: word == "1", float),
    }[kind]
    options = tuple(read(word) for read, word in zip(readers, words[count:], strict=True))
    return Step(kind, tuple(None if word == "-" else int(word) for word in words[:count]), options)


def _word(value: Any) -> str:
    if value is None:
        return "-"
    return str(int(value)) if isinstance(value, bool) else str(value)


def _steps(tensors: list[Tensor], program: str) -> list[Tensor]:
    """One step after the other by its own operator, where no kernel has taken over."""
    if load_kernels(tensors[0].device.type):
        return STEPS(tensors, program)
    results = read_program(program).run(tensors, GATED)
    given = {t.data_ptr() for t in tensors}
    return [y.clone() if y.data_ptr() in given and y.numel() else y for y in results]


def _fake_steps(tensors: list[Tensor], program: str) -> list[Tensor]:
    return read_program(program).run(tensors, fake_gated)


def _attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool) -> Tensor:
    """Run torch's own in bfloat16."""
    q_half, k_half, v_half = (t.to(torch.bfloat16) for t in (q, k, v))
    y = F.scaled_dot_product_attention(q_half, k_half, v_half, is_causal=causal, scale=scale).to(q.dtype)
    return y.transpose(1, 2).contiguous().transpose(1, 2)


def _fake_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool) -> Tensor:
    batch, heads, tokens, _ = q.shape
    return q.new_empty(batch, tokens, heads, v.shape[3]).transpose(1, 2)


_SCHEMA = "(Tensor q, Tensor k, Tensor v, *, float scale, bool causal) -> Tensor"
ATTENTION = define("attention", _SCHEMA, _attention, _fake_attention)
"""softmax(scale q k^T) v of float32 q, k, v [B, H, S, D], with products of bfloat16; it lies as [B, S, H, D]."""
torch.library.impl("acm::steps", "CompositeExplicitAutograd", _steps, lib=LIBRARY)
torch.library.register_fake("acm::steps", _fake_steps, lib=LIBRARY)
