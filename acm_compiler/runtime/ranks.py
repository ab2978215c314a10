"""Several processes that work together: what each did is joined."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist


def world() -> int:
    """Number of processes that work together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This process's number, from 0."""
    return dist.get_rank() if world() > 1 else 0


def total(tensor: Tensor) -> Tensor:
    """The sum of `tensor` over all processes."""
    if tensor.device.type == "cpu" and world() > 1 and "cpu:" not in dist.get_backend_config():
        # float64 sums of accelerators without float64, in a group that carries no tensors of the CPU
        return torch.stack(gathered(tensor)).sum(0)
    tensor = tensor.clone()
    if world() > 1:
        dist.all_reduce(tensor)
    return tensor


def gathered(value: Any) -> list[Any]:
    """The value of every process, in the order of ranks; its tensors on the CPU."""
    if world() == 1:
        return [value]
    every: list[Any] = [None] * world()
    dist.all_gather_object(every, value)
    return every


def shared(work: Callable[[Any], Any], items: Sequence[Any], *, apart: bool = True) -> Iterator[Any]:
    """`work` of every item in their order, in all processes; of as many neighbours as there are, each does one.

    All have the same items and stop asking at the same one. Results are as of `gathered`. Where work is not `apart`,
    but takes all processes as a model in parts does, each does all of it.
    """
    if not apart:
        yield from map(work, items)
        return
    for start in range(0, len(items), world()):
        own = items[start + rank() : start + world()][:1]
        yield from gathered(work(own[0]) if own else None)[: len(items) - start]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a site on all processes: its tokens, and the place of this one's `own` among them.

    number: which of this process's calls it is, None where it ran none.
    """

    tokens: int
    start: int = 0
    own: int = 0
    number: int | None = None


def stream(tokens: Sequence[Sequence[int]], *, cut: bool) -> list[Call]:
    """The calls of a site as one process would make them, from the tokens of every process's.

    Of a batch that is `cut` all have a part of every call, else each has its own calls, one after the other.
    """
    own = rank()
    if not cut:
        each = [(of == own, number, count) for of, counts in enumerate(tokens) for number, count in enumerate(counts)]
        return [Call(tokens=n, own=n, number=number) if mine else Call(tokens=n) for mine, number, n in each]
    return [
        Call(tokens=sum(row), start=sum(row[:own]), own=row[own], number=at if at < len(tokens[own]) else None)
        for at, row in enumerate(zip_longest(*tokens, fillvalue=0))
    ]


@contextmanager
def by_first(*, in_parts: bool) -> Iterator[bool]:
    """Work that one process does for all: True in the first, and in all where nothing is `in_parts`.

    The others wait for it; where it fails, it fails in all.
    """
    problem: Exception | None = None
    try:
        yield not in_parts or rank() == 0
    except Exception as error:
        if not in_parts:
            raise
        problem = error
    if in_parts and (problem := gathered(problem)[0]) is not None:
        raise problem


def from_first(modules: Iterable[nn.Module]) -> None:
    """Give `modules` the parameters that they have on the first process."""
    if world() > 1:
        for module in modules:
            for parameter in module.parameters():
                dist.broadcast(parameter.data, 0)
