"""The machine of a run: its device, its place among the processes, its precision."""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from acm_compiler.acm.precision import Precision
from acm_compiler.errors import UsageError
from acm_compiler.runtime import ranks

log = logging.getLogger(__name__)

_AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_RELEASE_S = 0.5  # seconds in which threads of gloo release their last tensors
_YES = ("1", "true")  # as accelerate writes its switches
_OTHER_WAYS = ("DEEPSPEED", "MEGATRON_LM")
# what accelerate's configuration may ask of FSDP beside sharding, and the value that asks for nothing
_FSDP_OPTIONS = {"FSDP_OFFLOAD_PARAMS": "false", "FSDP_ACTIVATION_CHECKPOINTING": "false", "FSDP_VERSION": "2"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One process of a run, number `rank` of `world`.

    `dtype` is what autocast computes in, None for fp32; weights stay as they are. `sharded`: each process holds a part
    of the model while a phase trains it.
    """

    rank: int
    world: int
    device: torch.device
    dtype: torch.dtype | None
    sharded: bool = False

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

    def totals(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """Each of these vectors summed over all processes, by one call of them; on the CPU."""
        return list(self.total(torch.cat(list(vectors))).cpu().split([len(vector) for vector in vectors]))

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
        """`module` so that its gradients are averaged over processes; itself when alone, or sharded."""
        if self.world == 1 or self.sharded:
            return module
        # layers may be left out of a step (LayerDrop, unused heads), and the set may change
        own = None if self.device.type == "cpu" else [self.device]
        return nn.parallel.DistributedDataParallel(module, device_ids=own, find_unused_parameters=True)


def open_machine(precision: Precision = "fp32", device: str = "auto", *, sharded: bool | None = None) -> Machine:
    """This process's part of the run, as torchrun, `accelerate launch` or a plain start made it.

    `device` "auto" is the first GPU or the CPU; of several processes each takes the GPU of its local rank.
    `sharded`, or accelerate's FSDP: several processes hold a part of the model each while it is trained; None where
    that is not possible.
    UsageError where this process cannot train so.
    """
    sharded = _accelerate_shards(possible=sharded is not None) or bool(sharded)
    on_cpu = device == "auto" and _is_on("ACCELERATE_USE_CPU")
    named = find_device("cpu" if on_cpu else device)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        if named.type != "cpu":
            named = torch.device(named.type, int(os.environ["LOCAL_RANK"]) % torch.accelerator.device_count())
            torch.accelerator.set_device_index(named.index)
        if not dist.is_initialized():
            dist.init_process_group(dist.get_default_backend_for_device(named))
            atexit.register(_leave)
    if ranks.world() == 1 and "MASTER_ADDR" in os.environ and "ACCELERATE_MIXED_PRECISION" in os.environ:
        log.warning(
            "accelerate was asked for several processes and started one; "
            "on CPUs it needs --multi_gpu as well: accelerate launch --multi_gpu --num_processes N …"
        )
    sharded = sharded and ranks.world() > 1
    if sharded and precision == "fp16":
        raise UsageError(
            "sharded training takes no fp16, whose scaled gradients overflow on some processes only",
            where="run.precision",
            expected="bf16 | fp32",
        )
    return Machine(rank=ranks.rank(), world=ranks.world(), device=named, dtype=_AUTOCAST[precision], sharded=sharded)


def _leave() -> None:
    """Leave the process group before Python ends: a thread of gloo that releases a tensor meanwhile aborts the process.

    Threads of the group end with it. Those of a sharded phase's mesh do not, as DTensor's caches keep its group: they
    get time.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        time.sleep(_RELEASE_S)


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


def _accelerate_shards(*, possible: bool) -> bool:
    """True where `accelerate launch` was told to shard the model. UsageError for what cannot be sharded so."""
    for kind in _OTHER_WAYS:
        if _is_on(f"ACCELERATE_USE_{kind}"):
            raise UsageError(
                f"training under accelerate's {kind} is not supported",
                expected="one process, data parallel processes, or FSDP",
                fix="accelerate launch --multi_gpu --num_processes N …, with run.sharded=true for what one device "
                "does not hold",
            )
    if not _is_on("ACCELERATE_USE_FSDP"):
        return False
    if not possible:
        raise UsageError(
            "only the phases of a recipe are trained under FSDP",
            expected="one process, or data parallel processes",
            fix="accelerate launch --multi_gpu --num_processes N …",
        )
    for option, plain in _FSDP_OPTIONS.items():
        found = os.environ.get(option, plain).lower()
        if found != plain:
            raise UsageError(
                f"accelerate's configuration asks for {option.lower()}, which this training does not do",
                found=found,
                expected=plain,
                fix=f"write {option.lower()}: {plain}, or leave FSDP out there and give --set run.sharded=true",
            )
    return True


def _is_on(switch: str) -> bool:
    return os.environ.get(switch, "").lower() in _YES
