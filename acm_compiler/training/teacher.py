"""The model before conversion, where a phase learns from its answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from acm_compiler.data.batch import Batch
from acm_compiler.errors import UsageError
from acm_compiler.inputs import call_model
from acm_compiler.tasks import Task
from acm_compiler.training.machine import Machine
from acm_compiler.training.modes import in_mode


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """Answers batches as the original model does; it is never trained. `wanted`: its answers are the objective."""

    model: nn.Module
    task: Task
    machine: Machine
    wanted: bool

    @staticmethod
    def of(
        model: nn.Module | None, task: Task, machine: Machine, objective: Literal["task", "distillation"]
    ) -> Teacher | None:
        """The teacher that a task or an objective needs, None where neither does. UsageError where it is not here."""
        wanted = objective == "distillation"
        if not wanted and not hasattr(task, "remember"):
            return None
        if model is None:
            raise UsageError(
                "learning from the original model needs that model",
                where="finetune",
                fix="give the job its `teacher`, or train with objective: task on a task that has labels",
            )
        return Teacher(model=model.to(machine.device), task=task, machine=machine, wanted=wanted)

    @torch.no_grad()
    def teach(self, batch: Batch) -> tuple[Batch, Tensor | None]:
        """The batch with what the task remembers of the original's output, and its answer where that is wanted."""
        with in_mode(self.model, training=False), self.machine.autocast():
            output = call_model(self.model, self.task.inputs(batch))
        remember = getattr(self.task, "remember", None)
        taught = batch if remember is None else remember(output, batch)
        return taught, self.task.answer(output, self.task.mask(batch)) if self.wanted else None
