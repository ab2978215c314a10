"""The training loop of all phases: steps, learning rate, loss scaling, clipping, and errors with their place."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from acm_compiler.data import Batch, BatchStream
from acm_compiler.errors import RunInterrupted, TrainingFailed
from acm_compiler.passes.rewrite.conversion import sites
from acm_compiler.progress import Progress
from acm_compiler.recipe.fields import Every
from acm_compiler.recipe.phases import TrainedPhase, half_cosine
from acm_compiler.training.live_state import restore_generators, seed_generators
from acm_compiler.training.machine import Machine
from acm_compiler.training.phase import Figures, Group, Job, Phase, only_training, parameters_of
from acm_compiler.training.sharding import read_optimizer, whole
from acm_compiler.training.state import Position, Snapshot, StateStore
from acm_compiler.training.watch import Interrupts, Journal, Watch


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Parts shared by all phases of a run."""

    model: nn.Module
    job: Job
    machine: Machine
    journal: Journal
    store: StateStore
    interrupts: Interrupts

    def save(self, position: Position, optimization: dict[str, Any] | None = None) -> None:
        """Put the state on disk; see StateStore."""
        self.store.save(self.model, position, metrics_bytes=self.journal.size_bytes, optimization=optimization)

    def interrupted(self, where: str) -> RunInterrupted:
        """The error for a run that stops here with its state saved."""
        return self.interrupts.stopped(where, self.job.resume_command)


class PhaseLoop:
    """Trains one phase, phase number `index` of its schedule."""

    def __init__(self, run: Run, phase: Phase, config: TrainedPhase, *, batches: BatchStream, index: int) -> None:
        self.run, self.phase, self.config, self.batches, self.index = run, phase, config, batches, index
        self.steps = steps_of(config, len(batches))
        self.optimization = Optimization(config, phase.groups, run.machine, steps=self.steps)
        self.watch = Watch()
        self.saved_at = time.monotonic()

    def train(self, snapshot: Snapshot | None) -> None:
        """From the start of the phase, or from `snapshot`, to its end. TrainingFailed, RunInterrupted, StorageError."""
        with only_training(self.run.model, parameters_of(self.phase.groups)), self.phase.opened():
            start = self._begin(snapshot)
            feed = endless(self.batches, start * self.config.accumulate)
            with closing(feed), self._progress(start) as progress:
                batches = progress.fed(feed)
                for step in range(start, self.steps):
                    figures = self._step(step, batches)
                    progress.advance(f"loss {figures.terms['loss']:.4g}", examples=self.config.batch)
                    self._after(step + 1)

    def _begin(self, snapshot: Snapshot | None) -> int:
        """Seed the generators, or continue from the snapshot; the number of steps done."""
        seed_generators(self.run.job.run.seed, self.index, 0)
        if snapshot is None or snapshot.optimization is None or snapshot.generators is None:
            return 0
        self.optimization.load_state_dict(snapshot.optimization)
        restore_generators(snapshot.generators, self.run.machine.device)
        return snapshot.position.step

    def _step(self, step: int, feed: Iterator[Batch]) -> Figures:
        """One optimizer step over the `accumulate` parts of a batch, and its line of metrics."""
        began, accumulate = time.monotonic(), self.config.accumulate
        for i in range(accumulate):
            batch = {name: value.to(self.run.machine.device, non_blocking=True) for name, value in next(feed).items()}
            self.phase.run(batch, backward=self.optimization.backward, last=i == accumulate - 1)
        figures = self.phase.finish()
        norm = self.optimization.clip()
        if figures.not_finite or not (math.isfinite(norm) or self.optimization.may_overflow):
            raise failure(self.run.model, figures.not_finite, where=f"{self.phase.name}, step {step + 1}")
        rate = self.optimization.step(step)
        self.watch.see(figures)
        seconds = {"seconds": round(time.monotonic() - began, 4)}
        self._write(step + 1, figures.terms | self._budget(figures) | {"lr": rate, "grad_norm": norm} | seconds)
        return figures

    def _budget(self, figures: Figures) -> dict[str, float]:
        if figures.reached is None:
            return {}
        asked = self.run.job.budget if figures.asked is None else figures.asked
        return {"budget_reached": figures.reached, "budget_asked": asked}

    def _write(self, done: int, values: dict[str, Any]) -> None:
        epoch = (done - 1) * self.config.accumulate // len(self.batches)
        self.run.journal.write({"phase": self.phase.name, "step": done, "epoch": epoch} | values)

    def _after(self, done: int) -> None:
        """Between two steps: measure and save when it is time, stop when asked to."""
        evaluate, settings = self.run.job.evaluate, self.run.job.run
        if evaluate is not None and self.phase.answers and self._passes(settings.eval_every, done):
            self._write(done, {"eval": dict(evaluate(self.run.model))})
        timed = done == self.steps or self._passes(settings.save_every, done)
        stop, save = self.run.machine.any(self.run.interrupts.received is not None, self.run.machine.is_main and timed)
        if stop or save:
            self.run.save(Position(phase=self.index, step=done), self.optimization.state_dict())
            self.saved_at = time.monotonic()
        if stop:
            raise self.run.interrupted(f"step {done} of {self.steps} of phase {self.phase.name}")

    def _passes(self, every: Every, done: int) -> bool:
        return passes(every, done, epoch=len(self.batches) / self.config.accumulate, since=self.saved_at)

    def _progress(self, start: int) -> Progress:
        shown, say = self.run.machine.is_main, self.run.job.say
        return Progress(self.phase.name, self.steps, done=start, say=say, shown=shown)


def passes(every: Every, done: int, *, epoch: float, since: float) -> bool:
    """True if step number `done` completes one more of these periods.

    epoch: steps in one. since: when the period at hand began, by `time.monotonic`, for periods in seconds.
    """
    if every.unit == "second":
        return time.monotonic() - since >= every.amount
    period = every.amount * (epoch if every.unit == "epoch" else 1)
    return math.floor(done / period) > math.floor((done - 1) / period)


def steps_of(config: TrainedPhase, batches: int) -> int:
    """Optimizer steps of a phase, for so many batches (parts of a step's batch) per epoch."""
    if config.steps is not None:
        return config.steps
    assert config.epochs is not None
    return max(1, config.epochs * batches // config.accumulate)


def endless(batches: BatchStream, first: int) -> Generator[Batch, None, None]:
    """All batches from number `first` of the phase on, epoch after epoch."""
    epoch, start = batches.place(first)
    while True:
        yield from batches.epoch(epoch, start)
        epoch, start = epoch + 1, 0


_OPTIMIZERS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


def learning_rate(config: TrainedPhase, lr: float, step: int, steps: int) -> float:
    """The learning rate of `step` of `steps`: along half a cosine from `lr` to `lr_min`, or constant."""
    if config.schedule == "constant":
        return lr
    return config.lr_min + (lr - config.lr_min) * half_cosine(step, steps)


class Optimization:
    """Optimizer, rates and clipping: they turn a phase's losses into steps of its parameters."""

    def __init__(self, config: TrainedPhase, groups: Sequence[Group], machine: Machine, *, steps: int) -> None:
        self.config, self.groups, self.steps = config, groups, steps
        self.rates = [config.lr if group.lr is None else group.lr for group in groups]
        settings = [{"params": list(group.parameters)} for group in groups]
        # three times as fast on CPUs, where torch does not choose it by itself
        fused = True if machine.device.type == "cpu" and not machine.sharded else None
        self.optimizer = _OPTIMIZERS[config.optimizer](
            settings, lr=config.lr, weight_decay=config.weight_decay, fused=fused
        )
        self.scaler = torch.amp.GradScaler(machine.device.type, enabled=machine.dtype == torch.float16)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss`."""
        self.scaler.scale(loss).backward()

    def clip(self) -> float:
        """Bring the gradients back to their true scale, clip them, and return their norm before that."""
        self.scaler.unscale_(self.optimizer)
        limit = math.inf if self.config.clip_norm is None else self.config.clip_norm
        return float(whole(nn.utils.clip_grad_norm_(parameters_of(self.groups), limit)))

    def step(self, step: int) -> float:
        """Apply the gradients and forget them; the first group's learning rate. fp16 leaves out overflowed steps."""
        rates = [learning_rate(self.config, lr, step, self.steps) for lr in self.rates]
        for settings, rate in zip(self.optimizer.param_groups, rates, strict=True):
            settings["lr"] = rate
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return rates[0]

    @property
    def may_overflow(self) -> bool:
        """True if gradients that are not finite are part of the method (fp16's loss scaling)."""
        return self.scaler.is_enabled()

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain numbers that continue this optimization exactly."""
        return {"optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any] | Path) -> None:
        """Continue what `state_dict` saved, or what is in the folder of all processes' parts."""
        if isinstance(state, Path):
            found = read_optimizer(state, parameters_of(self.groups))
            self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": found})
            return
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])


def failure(model: nn.Module, what: str | None, *, where: str) -> TrainingFailed:
    """The error for a step whose loss (`what`) or gradients are not finite, naming the first place that shows it."""
    place = _first(model, gradients=False) or _first(model, gradients=True)
    found = what or "the gradient"
    return TrainingFailed(
        f"{found} is not finite" + (f"; first seen at {place}" if place else ""),
        where=where,
        fix="lower lr, keep clip_norm at 1.0, train in precision fp32 or bf16, and look for values in the data that "
        "are not finite; the last saved state is from before this step",
    )


def _first(model: nn.Module, *, gradients: bool) -> str | None:
    """The first parameter whose value (or gradient) is not finite, by its site if it belongs to one."""
    owner = {id(p): f"site {name}" for name, acm in sites(model).items() for p in acm.parameters()}
    for name, parameter in model.named_parameters():
        tensor = parameter.grad if gradients else parameter.detach()
        if tensor is not None and not torch.isfinite(whole(tensor)).all():
            return owner.get(id(parameter), f"parameter {name}")
    return None
