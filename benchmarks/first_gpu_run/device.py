"""A GPU, or a CPU in its place in a dry run: waiting, timing, memory, and facts about the machine."""

from __future__ import annotations

import hashlib
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch
import triton
from torch.profiler import ProfilerActivity, profile
from triton.errors import TritonError

import acm_compiler
from acm_compiler.codegen.gpu import current_machine
from acm_compiler.codegen.gpu.stages import Machine

Calls = dict[str, Callable[[], Any]]
_CLOCKS = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw", "clocks_event_reasons.active")
_CACHE_BYTES = 256 << 20
T = TypeVar("T")


@dataclass(frozen=True)
class Device:
    """The place of a run's tensors, "cuda", or "cpu" for a dry run, and a process's share of its part's work."""

    kind: str
    share: tuple[int, int] = (0, 1)

    @property
    def is_cuda(self) -> bool:
        """True on a GPU."""
        return self.kind == "cuda"

    @property
    def rounds(self) -> int:
        """Timed calls of a contender."""
        return 30 if self.is_cuda else 2

    @property
    def warm(self) -> int:
        """Its calls before those."""
        return 3 if self.is_cuda else 0

    def some(self, values: Iterable[T]) -> list[T]:
        """All of them, or the first two in a dry run."""
        return list(values)[: None if self.is_cuda else 2]

    def mine(self, values: Iterable[T]) -> list[T]:
        """Those that this process is to do."""
        own, processes = self.share
        return list(values)[own::processes]

    @property
    def machine(self) -> Machine:
        """Facts that kernels depend on; in a dry run, of a small sm_90."""
        return current_machine() if self.is_cuda else Machine(arch=90, processors=3)

    def wait(self) -> None:
        """Wait until everything started has ended."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def timed(self, call: Callable[[], object]) -> Callable[[], float]:
        """Start a call; what is returned gives its microseconds, after a `wait`."""
        if not self.is_cuda:
            start = time.perf_counter()
            call()
            spent = 1e6 * (time.perf_counter() - start)
            return lambda: spent
        events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        events[0].record()
        call()
        events[1].record()
        return lambda: 1000 * events[0].elapsed_time(events[1])

    def captured(self, call: Callable[[], object]) -> Callable[[], object]:
        """The call as a CUDA graph, after three calls that compile what it needs."""
        for _ in range(max(1, self.warm)):
            call()
        self.wait()
        if not self.is_cuda:
            return call
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay

    def profiled(self, call: Callable[[], object]) -> list[dict[str, Any]]:
        """Microseconds of each kernel that a call starts, the mean of `rounds` calls; in a dry run of each operator."""
        for _ in range(max(1, self.warm)):
            call()
        activity = ProfilerActivity.CUDA if self.is_cuda else ProfilerActivity.CPU
        with profile(activities=[activity]) as seen:
            for _ in range(self.rounds):
                call()
            self.wait()
        spent = "self_device_time_total" if self.is_cuda else "self_cpu_time_total"
        events = [event for event in seen.key_averages() if getattr(event, spent) > 0]
        return [
            {"kernel": event.key[:60], "calls": event.count / self.rounds, "us": getattr(event, spent) / self.rounds}
            for event in sorted(events, key=lambda event: -getattr(event, spent))
        ]

    def peak_bytes(self) -> int:
        """The most memory of the device since the last call of this, 0 on a CPU."""
        if not self.is_cuda:
            return 0
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak

    def facts(self) -> dict[str, str]:
        """Date, card, driver, versions, and a hash of the code that is measured."""
        card = torch.cuda.get_device_name() if self.is_cuda else f"none (dry run on {platform.machine()})"
        return {
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
            "card": card,
            "driver": _nvidia_smi(["driver_version"])[0],
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": platform.python_version(),
            "code": code_hash(),
        }


def clocks() -> dict[str, str]:
    """Clocks, temperature, power and what holds clocks back, as nvidia-smi says; empty where it is not there."""
    found = dict(zip(_CLOCKS, _nvidia_smi(_CLOCKS), strict=True))
    return {name: value for name, value in found.items() if value}


def _nvidia_smi(names: Sequence[str]) -> list[str]:
    """Values by name, empty texts where it is not there or does not know them."""
    program = shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path="/usr/local/nvidia/bin")
    if program is None:
        return [""] * len(names)
    command = [program, f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return [""] * len(names)
    values = done.stdout.splitlines()[0].split(", ") if done.returncode == 0 and done.stdout else []
    return values if len(values) == len(names) else [""] * len(names)


def code_hash() -> str:
    """Twelve digits that change with the package's operators and kernels."""
    digest = hashlib.sha256()
    package = Path(acm_compiler.__file__).parent
    for path in sorted(path for room in ("acm", "codegen") for path in (package / room).rglob("*") if path.is_file()):
        if path.suffix in (".py", ".h", ".cpp"):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def race(calls: Calls, rounds: int, device: Device) -> list[dict[str, Any]]:
    """Microseconds of everybody, in turn, and their ratios to the first within each round.

    Each contender is one CUDA graph; memory of 256 MB is written before each, which empties the cache.
    """
    replays, refused = _captured(calls, device)
    junk = torch.empty(_CACHE_BYTES if device.is_cuda else 1, dtype=torch.int8, device=device.kind)
    times: dict[str, list[float]] = {name: [] for name in replays}
    for turn in range(rounds + device.warm):
        read = {}
        for name, replay in replays.items():
            junk.fill_(turn % 2)
            read[name] = device.timed(replay)
        device.wait()
        if turn >= device.warm:
            for name, spent in read.items():
                times[name].append(spent())
    base = next(iter(times.values()), [])
    rows: list[dict[str, Any]] = [{"contender": name, **_summary(own, base)} for name, own in times.items()]
    return rows + [{"contender": name, "refused": why} for name, why in refused.items()]


def _captured(calls: Calls, device: Device) -> tuple[Calls, dict[str, str]]:
    """Everybody's CUDA graph, and why some have none."""
    replays, refused = {}, {}
    for name, call in calls.items():
        try:
            replays[name] = device.captured(call)
        except (RuntimeError, NotImplementedError, TritonError) as error:
            refused[name] = next(iter(str(error).splitlines()), type(error).__name__)
    return replays, refused


def _summary(own: list[float], base: list[float]) -> dict[str, float]:
    q1, median, q3 = statistics.quantiles(own, n=4)
    ratio = statistics.median(a / b for a, b in zip(own, base, strict=True))
    return {"us": median, "q1": q1, "q3": q3, "ratio": ratio}
