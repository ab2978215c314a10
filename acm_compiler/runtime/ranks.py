"""Several processes that work together, each with its own batches: what they saw is joined."""

from __future__ import annotations

from collections.abc import Iterable
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


def from_first(modules: Iterable[nn.Module]) -> None:
    """Give `modules` the parameters that they have on the first process."""
    if world() > 1:
        for module in modules:
            for parameter in module.parameters():
                dist.broadcast(parameter.data, 0)
