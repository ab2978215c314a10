"""The machine of a run: its device, its place among the processes, its precision."""

from __future__ import annotations

import logging
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch import distributed as dist

from acm_compiler.errors import UsageError
from acm_compiler.runtime import ranks

log = logging.getLogger(__name__)

Precision = Literal["fp32", "bf16", "fp16"]
_AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_YES = ("1", "true")  # as accelerate writes its switches
_SHARDED = ("FSDP", "DEEPSPEED", "MEGATRON_LM")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One process of a run, number `rank` of `world`.

    `dtype` is what autocast computes in, None for fp32; weights stay as they are.
    """

    rank: int
    world: int
    device: torch.device
    dtype: torch.dtype | None

    @property
    def is_main(self) -> bool:
        """True if this process writes files and shows progress."""
        return self.rank == 0

    def autocast(self) -> AbstractContextManager[Any]:
        """Inside, products are computed in the run's precision."""
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype is not None)

    def total(self, tensor: Tensor) -> Tensor:
        """`tensor` summed over all processes, in place."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """Reduce each flag to True if any process has set it."""
        if self.world == 1:
            return flags
        found = self.total(torch.tensor(flags, dtype=torch.int32, device=self.device))
        return tuple(bool(flag) for flag in found.tolist())

    def gather(self, value: Any) -> list[Any]:
        """The plain value of every process, in the order of ranks."""
        return ranks.gathered(value)

    def parallel(self, module: nn.Module) -> nn.Module:
        """`module` so that its gradients are averaged over processes; itself when alone."""
        if self.world == 1:
            return module
        # layers may be left out of a step (LayerDrop, unused heads), and the set may change
        own = None if self.device.type == "cpu" else [self.device]
        return nn.parallel.DistributedDataParallel(module, device_ids=own, find_unused_parameters=True)


def open_machine(precision: Precision = "fp32", device: str = "auto") -> Machine:
    """This process's part of the run, as torchrun, `accelerate launch` or a plain start made it.

    `device` "auto" is the first GPU or the CPU; of several processes each takes the GPU of its local rank.
    UsageError where this process cannot train so.
    """
    _refuse_sharded()
    on_cpu = device == "auto" and os.environ.get("ACCELERATE_USE_CPU", "").lower() in _YES
    named = find_device("cpu" if on_cpu else device)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        if named.type != "cpu":
            named = torch.device(named.type, int(os.environ["LOCAL_RANK"]) % torch.accelerator.device_count())
            torch.accelerator.set_device_index(named.index)
        if not dist.is_initialized():
            dist.init_process_group(dist.get_default_backend_for_device(named))
    if ranks.world() == 1 and "MASTER_ADDR" in os.environ and "ACCELERATE_MIXED_PRECISION" in os.environ:
        log.warning(
            "accelerate was asked for several processes and started one; "
            "on CPUs it needs --multi_gpu as well: accelerate launch --multi_gpu --num_processes N …"
        )
    return Machine(rank=ranks.rank(), world=ranks.world(), device=named, dtype=_AUTOCAST[precision])


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


def _refuse_sharded() -> None:
    """UsageError where `accelerate launch` was told to spread the model itself over the processes."""
    for kind in _SHARDED:
        if os.environ.get(f"ACCELERATE_USE_{kind}", "").lower() in _YES:
            raise UsageError(
                f"training under accelerate's {kind} is not supported yet",
                expected="one process, or data parallel processes",
                fix="accelerate launch --multi_gpu --num_processes N …",
            )
