"""Calls of `acm::learners` that every implementation must answer alike; on any device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from acm_compiler.acm.arguments import Weights
from acm_compiler.acm.reference import run_learners
from acm_compiler.codegen.compare import TOLERANCE, relative_error


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call: what the ACM is, how many tokens it gets and how their k are drawn."""

    form: str = "mlp"
    second: str = "shared"
    act: str = "gelu"
    tokens: int = 130
    k: str = "mixed"
    learners: int = 3
    width: int = 40
    heads: int = 1
    d_in: int = 72
    d_out: int = 80
    dtype: torch.dtype = torch.float32
    bias: bool = True
    residual: bool = True
    exact: bool = False  # multiples of 1/4, whose sums need no rounding

    def __str__(self) -> str:
        plain = Case()
        changed = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return " ".join(str(v) for n, v in changed.items() if v != getattr(plain, n)) or "plain"


FORMS = (
    Case(),
    Case(form="gated", act="silu"),
    Case(form="gated", act="gelu", bias=False),
    Case(form="linear", act="identity", bias=False),
    Case(second="top"),
    Case(form="gated", act="silu", second="top"),
    Case(form="linear", act="identity", bias=False, second="top"),
    Case(second="per_k"),
    Case(form="rows", heads=2, width=16, d_out=48),
    Case(form="rows", heads=3, width=15, d_out=45),
    Case(form="cols", heads=2, width=16, d_in=48),
    Case(form="cols", heads=3, width=15, d_in=45),
)
WIDE = (
    Case(width=256, d_in=200, d_out=136),
    Case(width=264, d_in=136, d_out=200, act="silu", bias=False, k="one"),
    Case(form="gated", act="silu", width=256, d_in=200, d_out=136),
    Case(form="gated", act="gelu", width=264, bias=False, residual=False),
    Case(form="linear", act="identity", bias=False, width=128, d_in=256, d_out=256),
    Case(width=256, k="none"),
    Case(width=256, k="all", act="relu", residual=False),
)
"""Learners of whose tiles groups of warps take turns, where there are enough of them."""
ODD = tuple(Case(tokens=t) for t in (1, 2, 63, 64, 65, 257)) + tuple(
    Case(k=k, form=form, second=second, act=act)
    for k in ("none", "all", "one", "same")
    for form, second, act in (("mlp", "shared", "gelu"), ("linear", "top", "identity"), ("mlp", "per_k", "relu"))
)
FEW = (
    Case(tokens=7, second="top"),
    Case(tokens=7, second="per_k"),
    Case(tokens=7, form="rows", heads=2, d_out=120),
    *(
        Case(tokens=t, k=k, form=form, act=act, bias=bias)
        for t, k in ((1, "all"), (5, "mixed"), (17, "none"), (64, "one"))
        for form, act, bias in (("mlp", "gelu", True), ("gated", "silu", False), ("linear", "identity", False))
    ),
    *(
        Case(tokens=t, k=k, form=form, second=second, act="gelu" if form == "mlp" else "identity", d_in=75)
        for t, k in ((1, "all"), (33, "mixed"), (64, "one"), (9, "none"))
        for form, second in (("mlp", "per_k"), ("mlp", "top"), ("linear", "per_k"), ("linear", "top"))
    ),
)
ONE = (
    Case(k="all", learners=1, width=512, d_in=512),
    Case(k="same", width=75, d_in=1030, d_out=130),
    Case(k="same", form="gated", act="silu", width=137, d_in=600, bias=False),
    Case(k="all", form="gated", residual=False),
    Case(k="same", form="linear", act="identity", width=17, bias=False),
    Case(k="none", d_in=75),
)
"""A single token: steps that are whole and cut, blocks of rows that are, too."""
SHAPES = tuple(
    Case(learners=n, width=h, d_in=64, d_out=64, residual=False)
    for n, h in ((1, 64), (2, 96), (4, 64), (8, 24), (16, 12))
)


def weights_of(case: Case) -> Weights:
    """Weights in float64, of the size that keeps outputs near one."""

    def draw(*shape: int, fan: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64) * fan**-0.5

    n, h, d, o = case.learners, case.width, case.d_in, case.d_out
    b_out = draw(n + 1, o, fan=1)
    absent: dict[str, None] = dict.fromkeys(("b_in", "w_up", "b_up", "w_out", "w_top"))
    if case.form in ("rows", "cols"):
        part = (case.heads, h // case.heads)
        w_in = draw(n, *part, d, fan=d) if case.form == "rows" else draw(n, o, *part, fan=d)
        return Weights(w_in=w_in, b_out=b_out, act="identity", form=case.form, **absent)
    top = draw(o, d, fan=d) if case.form == "linear" else draw(o, n * h, fan=n * h)
    gated = case.form == "gated"
    return Weights(
        w_in=draw(n, h, d, fan=d),
        b_in=draw(n, h, fan=1) if case.bias else None,
        w_up=draw(n, h, d, fan=d) if gated else None,
        b_up=draw(n, h, fan=1) if gated and case.bias else None,
        w_out=draw(*([n] if case.second == "per_k" else []), o, n, h, fan=n * h),
        b_out=b_out,
        w_top=top if case.second == "top" else None,
        act=case.act,
        form=case.form,
    )


def k_of(case: Case) -> Tensor:
    """k of every token, int32 [T]."""
    n, t = case.learners, case.tokens
    k = {
        "mixed": torch.randint(0, n + 1, (t,)),
        "none": torch.zeros(t),
        "all": torch.full((t,), n),
        "same": torch.full((t,), (n + 1) // 2),
        "one": torch.zeros(t).index_fill(0, torch.tensor([t // 2]), n),
    }
    return k[case.k].to(torch.int32)


def mapped(weights: Weights, change: Callable[[Tensor], Tensor]) -> Weights:
    """The weights with every tensor changed."""
    fields = {f.name: getattr(weights, f.name) for f in dataclasses.fields(weights)}
    return replace(weights, **{name: change(value) for name, value in fields.items() if torch.is_tensor(value)})


def to(weights: Weights, *args) -> Weights:
    """The weights in another type or place."""
    return mapped(weights, lambda value: value.to(*args))


def quarters(value: Tensor) -> Tensor:
    """Numbers rounded to multiples of 1/4."""
    return (4 * value).round() / 4


def poison_memory(monkeypatch) -> None:
    """New memory holds NaN, or an index that no buffer has, wherever it is not initialised."""
    empty, empty_like, new_empty = torch.empty, torch.empty_like, Tensor.new_empty

    def poison(tensor: Tensor) -> Tensor:
        return tensor.fill_(float("nan") if tensor.is_floating_point() else 1 << 30)

    monkeypatch.setattr(torch, "empty", lambda *args, **options: poison(empty(*args, **options)))
    monkeypatch.setattr(torch, "empty_like", lambda *args, **options: poison(empty_like(*args, **options)))
    monkeypatch.setattr(Tensor, "new_empty", lambda *args, **options: poison(new_empty(*args, **options)))


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """A case's tensors, rounded to its dtype, and the answer in float64."""

    x: Tensor
    k: Tensor
    weights: Weights
    residual: Tensor | None
    expected: Tensor


def inputs_of(case: Case, device: str = "cpu") -> Inputs:
    """Tensors on a device; the answer from the reference, on the CPU, of exactly these rounded numbers."""
    weights, k = to(weights_of(case), case.dtype), k_of(case)
    x = torch.randn(case.tokens, case.d_in).to(case.dtype)
    residual = torch.randn(case.tokens, case.d_out).to(case.dtype) if case.residual else None
    if case.exact:
        weights, x = mapped(weights, lambda value: quarters(8 * value)), quarters(x)
        residual = None if residual is None else quarters(residual)
    expected = run_learners(x.double(), k, to(weights, torch.float64))
    if residual is not None:
        expected = expected + residual.double()
    return Inputs(
        x=x.to(device),
        k=k.to(device),
        weights=to(weights, device),
        residual=None if residual is None else residual.to(device),
        expected=expected,
    )


def require_answer(y: Tensor, inputs: Inputs) -> None:
    """The answer is the reference's within the tolerance of its dtype, and has no value that was never written."""
    assert y.shape == inputs.expected.shape
    assert relative_error(y.cpu(), inputs.expected) <= TOLERANCE[y.dtype]


def require_same_bits_by_threads(
    native: Callable[..., Tensor], drawn: Callable[[Case], tuple], tokens: Sequence[int] = (20, 70, 600)
) -> None:
    """Fail where one thread and three differ, on few tokens, on one block of columns shared, and on several blocks."""
    threads = torch.get_num_threads()
    for number in tokens:
        call = drawn(Case(form="gated", act="silu", tokens=number, width=70))
        answers = []
        for count in (1, 3):
            torch.set_num_threads(count)
            answers.append(native(*call))
        torch.set_num_threads(threads)
        assert torch.equal(*answers)
