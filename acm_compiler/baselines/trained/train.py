"""Training of a method's model on the dense model's outputs, alike for all: data, steps, optimizer, state on disk.

What is learned is the distance of outputs that our own finetune phase has with `objective: distillation`, which needs
no labels. Adam, a cosine from `lr`, gradients clipped at 1. The model is in eval mode. A training goes on at the very
step where it was cut:

    compare/METHOD/state/TRAINING.pt    what is trained, buffers, optimizer, generators, and what they belong to

Files are written whole or not at all. Those of a method's finished trainings stay until the method is measured.
"""

from __future__ import annotations

import math
import pickle
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from acm_compiler.baselines.method import Subject
from acm_compiler.baselines.site_method import SiteMethod
from acm_compiler.data import Batch
from acm_compiler.data.batch import size_of
from acm_compiler.errors import StorageError, TrainingFailed
from acm_compiler.files import storing, whole_file
from acm_compiler.progress import Progress, Say
from acm_compiler.recipe.phases import FinetunePhase
from acm_compiler.tasks.distance import distance
from acm_compiler.training.answers import model_digest
from acm_compiler.training.live_state import generator_states, restore_generators, seed_generators
from acm_compiler.training.loop import Optimization, endless, passes
from acm_compiler.training.machine import open_machine
from acm_compiler.training.phase import Group, Job, only_training, unique
from acm_compiler.training.teacher import open_teacher
from acm_compiler.training.watch import Interrupts

BATCH = 64


def train(
    name: str,
    model: nn.Module,
    loss: Callable[[Batch, Tensor], Tensor],
    subject: Subject,
    *,
    lr: float,
    say: Say,
    parameters: Iterable[nn.Parameter] | None = None,
) -> None:
    """Train `parameters` (None: all) of a model, in place, by a loss of (batch, the dense model's answers).

    Goes on at the step after which it was stopped, to the same weights. TrainingFailed where a gradient is not finite,
    RunInterrupted after Ctrl-C, StorageError.
    """
    assert subject.job is not None
    job = subject.job(name)
    machine = open_machine(job.run.precision, job.run.device)
    config = FinetunePhase(phase="finetune", objective="distillation", steps=subject.steps, batch=BATCH, lr=lr)
    teacher = open_teacher(job, machine, config)
    assert teacher is not None
    trained = unique(model.parameters() if parameters is None else parameters)
    optimization = Optimization(config, [Group(parameters=trained)], machine, steps=subject.steps)
    keeping = _Keeping(name, [*trained, *model.buffers()], optimization, subject, job)
    seed_generators(job.run.seed, 0)
    with only_training(model, trained):
        start = keeping.state.load()
        stream = job.data(batch=BATCH, seed=job.run.seed, rank=0, world=1)
        with (
            keeping.interrupts.watched(),
            closing(endless(stream, start)) as feed,
            Progress(name, subject.steps, done=start, say=say) as progress,
        ):
            for step, batch in zip(range(start, subject.steps), progress.fed(feed), strict=False):
                batch, wanted = teacher.teach({key: value.to(machine.device) for key, value in batch.items()})
                assert wanted is not None
                with machine.autocast():
                    value = loss(batch, wanted)
                optimization.backward(value)
                if not (math.isfinite(optimization.clip()) or optimization.may_overflow):
                    fix = "train in precision fp32 or bf16, and look for values in the data that are not finite"
                    raise TrainingFailed("the gradient is not finite", where=f"{name}, step {step + 1}", fix=fix)
                optimization.step(step)
                progress.advance(f"loss {value.item():.4g}", examples=size_of(batch))
                keeping.after(step + 1, epoch=len(stream))


class _Keeping:
    """Saves a training when it is time and at its end, and stops it when asked to."""

    def __init__(
        self, name: str, tensors: Sequence[Tensor], optimization: Optimization, subject: Subject, job: Job
    ) -> None:
        self.name, self.steps, self.job = name, subject.steps, job
        self.interrupts, self.saved_at = Interrupts(), time.monotonic()
        dense = subject.dense
        self.state = TrainingState(
            path=state_path(job.directory, name),
            facts={
                "steps": subject.steps,
                "lr": optimization.config.lr,
                "shapes": [list(tensor.shape) for tensor in tensors],
                "dense": model_digest([*dense.parameters(), *dense.buffers()]),
            },
            tensors=tensors,
            optimization=optimization,
            device=next(dense.parameters()).device,
        )

    def after(self, done: int, *, epoch: int) -> None:
        """Between two steps. RunInterrupted after a signal, with the state saved."""
        stopped = self.interrupts.received is not None
        if stopped or done == self.steps or passes(self.job.run.save_every, done, epoch=epoch, since=self.saved_at):
            self.state.save(done, is_last=done == self.steps)
            self.saved_at = time.monotonic()
        if stopped:
            raise self.interrupts.stopped(f"step {done} of {self.steps} of {self.name}", self.job.resume_command)


def to_dense(subject: Subject, output: Any, batch: Batch, wanted: Tensor) -> Tensor:
    """The distance of an output from the dense model's answers."""
    task = subject.task
    answer = task.answer(output, task.mask(batch))
    return distance(task, answer, wanted.reshape(answer.shape))


class TrainedSites(SiteMethod):
    """A `SiteMethod` whose regions are trained, with all else that runs."""

    trains = True

    def learn(self, name: str, *, lr: float, say: Say, extra: Callable[[], Tensor] | None = None) -> None:
        """Train the host; `extra` is added to the loss after each forward."""

        def loss(batch: Batch, wanted: Tensor) -> Tensor:
            value = to_dense(self.subject, self.call(batch), batch, wanted)
            return value if extra is None else value + extra()

        acms = self.found.acms.values()
        idle = {id(p) for acm in acms for part in (acm.learners, acm.gate) for p in part.parameters()}
        train(
            name,
            self.host,
            loss,
            self.subject,
            lr=lr,
            say=say,
            parameters=(p for p in self.host.parameters() if id(p) not in idle),
        )
        self.host.requires_grad_(False)


def state_path(directory: Path, name: str) -> Path:
    """The file of the training called `name` of the method whose folder this is."""
    return directory / "state" / f"{re.sub(r'[^A-Za-z0-9_.]+', '-', name).strip('-')}.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """A training kept in one file. tensors: all that it changes; facts: what another training would differ in."""

    path: Path
    facts: Mapping[str, Any]
    tensors: Sequence[Tensor]
    optimization: Optimization
    device: torch.device

    def save(self, step: int, *, is_last: bool) -> None:
        """Keep what `step` optimizer steps have made; of a finished training all but the optimizer. StorageError."""
        document = {
            "facts": dict(self.facts),
            "step": step,
            "tensors": [tensor.detach() for tensor in self.tensors],
            "optimization": None if is_last else self.optimization.state_dict(),
            "generators": generator_states(self.device),
        }
        with storing(self.path, "the state of a training cannot be saved"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(self.path) as beside:
                torch.save(document, beside)

    @torch.no_grad()
    def load(self) -> int:
        """Go back to what was saved, and return how many steps are done: 0 where nothing of this training was.

        StorageError where the file is damaged.
        """
        if not self.path.is_file():
            return 0
        try:
            found = torch.load(self.path, map_location="cpu", weights_only=True)
            if found["facts"] != dict(self.facts):
                return 0
            for tensor, saved in zip(self.tensors, found["tensors"], strict=True):
                tensor.copy_(saved)
            if found["optimization"] is not None:
                self.optimization.load_state_dict(found["optimization"])
            restore_generators(found["generators"], self.device)
            return int(found["step"])
        except (OSError, EOFError, ValueError, KeyError, TypeError, RuntimeError, pickle.UnpicklingError) as error:
            raise StorageError(
                "the state of a training is damaged",
                where=str(self.path),
                found=error,
                fix="remove that file: this training then starts over",
            ) from error
