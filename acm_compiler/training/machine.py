"""Where a run computes: its device, its place among the processes, its precision."""

from __future__ import annotations

import logging
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch import distributed as dist

from acm_compiler.errors import UsageError

if TYPE_CHECKING:
    from accelerate import Accelerator

log = logging.getLogger(__name__)

Precision = Literal["fp32", "bf16", "fp16"]
_AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One process of a run. `dtype` is what autocast computes in, None for fp32; weights stay as they are."""

    accelerator: Accelerator
    device: torch.device
    dtype: torch.dtype | None

    @property
    def rank(self) -> int:
        """This process's number, from 0."""
        return self.accelerator.process_index

    @property
    def world(self) -> int:
        """How many processes run together."""
        return self.accelerator.num_processes

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self.rank == 0

    def autocast(self) -> AbstractContextManager[Any]:
        """Inside, products are computed in the run's precision."""
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype is not None)

    def full_precision(self) -> AbstractContextManager[Any]:
        """Inside, autocast is off."""
        return torch.autocast(self.device.type, enabled=False)

    def total(self, tensor: Tensor) -> Tensor:
        """`tensor` summed over all processes, in place."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """Which of these flags is set on any process."""
        if self.world == 1:
            return flags
        found = self.total(torch.tensor(flags, dtype=torch.int32, device=self.device))
        return tuple(bool(flag) for flag in found.tolist())

    def gather(self, value: Any) -> list[Any]:
        """The plain value of every process, in the order of ranks."""
        if self.world == 1:
            return [value]
        every: list[Any] = [None] * self.world
        dist.all_gather_object(every, value)
        return every

    def parallel(self, module: nn.Module) -> nn.Module:
        """`module` so that its gradients are averaged over processes; itself when alone."""
        return self.accelerator.prepare_model(module) if self.world > 1 else module


def open_machine(precision: Precision = "fp32", device: str = "auto") -> Machine:
    """This process's part of the run, as `accelerate launch` (or a plain start) made it.

    `device` "auto" is the first GPU or the CPU. UsageError where this process cannot train so.
    """
    from accelerate import Accelerator, DistributedDataParallelKwargs

    named = find_device(device)
    # layers may be left out of a step (LayerDrop, unused heads), and the set may change
    tolerant = DistributedDataParallelKwargs(find_unused_parameters=True)
    # without an accelerator, accelerate takes several processes for several runs unless it is told so
    on_cpu = named.type == "cpu"
    try:
        # autocast is ours: accelerate's would patch the model's forward
        accelerator = Accelerator(mixed_precision="no", cpu=on_cpu, kwargs_handlers=[tolerant])
    except ValueError as error:
        raise UsageError(
            "accelerate was already started in this process with other settings",
            found=error,
            fix="run the recipe in a process of its own",
        ) from error
    _check_supported(accelerator)
    _check_launched(accelerator)
    chosen = accelerator.device if device in ("auto", "cpu") or accelerator.num_processes > 1 else named
    return Machine(accelerator=accelerator, device=chosen, dtype=_AUTOCAST[precision])


def find_device(name: str, *, where: str = "run.device") -> torch.device:
    """The device of that name, for "auto" the first GPU or the CPU. UsageError where it is not here."""
    here = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        return here or torch.device("cpu")
    count = torch.accelerator.device_count() if here else 0
    known = ["cpu", *([here.type] if here else []), *(f"{here.type}:{i}" for i in range(count) if here)]
    if name not in known:
        raise UsageError("no such device here", where=where, found=repr(name), expected=" | ".join(known))
    return torch.device(name)


def _check_supported(accelerator: Accelerator) -> None:
    kind = str(accelerator.distributed_type.value)
    if kind != "NO" and not kind.startswith("MULTI_"):
        raise UsageError(
            f"training under accelerate's {kind} is not supported yet",
            expected="one process, or data parallel processes",
            fix="accelerate launch --multi_gpu --num_processes N …",
        )


def _check_launched(accelerator: Accelerator) -> None:
    """Warn where `accelerate launch` was asked for several processes and started one, as it does on CPUs."""
    if accelerator.num_processes == 1 and "MASTER_ADDR" in os.environ and "ACCELERATE_MIXED_PRECISION" in os.environ:
        log.warning(
            "accelerate was asked for several processes and started one; "
            "on CPUs it needs --multi_gpu as well: accelerate launch --multi_gpu --num_processes N …"
        )
