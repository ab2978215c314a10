"""Several processes that work together, each with its own batches: what they saw is joined."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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


def added(values: Tensor, device: torch.device) -> Tensor:
    """`total`, on the CPU, of what is sent by tensors on `device`: NCCL knows no others."""
    return total(values.to(device)).cpu()


def averaged(values: Tensor, device: torch.device) -> Tensor:
    """The mean of each value over all processes, on the CPU; `device` as of `added`."""
    sums = added(torch.cat([values, values.new_ones(1)]), device)
    return sums[:-1] / sums[-1]


def gathered(value: Any) -> list[Any]:
    """The value of every process, in the order of ranks; its tensors on the CPU."""
    if world() == 1:
        return [value]
    every: list[Any] = [None] * world()
    dist.all_gather_object(every, value)
    return every


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
