"""Phase finetune (docs/semantics.md): the whole network learns its task while the gates are led to a budget.

The task is the labels' or, with a teacher, the outputs of the model before conversion.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from acm_compiler.acm import ACM
from acm_compiler.data import Batch, BatchStream
from acm_compiler.passes.rewrite.conversion import conversion, rewritten, sites
from acm_compiler.recipe.phases import FinetunePhase
from acm_compiler.runtime import ranks
from acm_compiler.runtime.batch_context import batch as batch_context
from acm_compiler.runtime.control import refuse_unfitted, relax, set_budget
from acm_compiler.runtime.usage import record
from acm_compiler.sources.inputs import Inputs, call_model, in_mode
from acm_compiler.tasks import Task
from acm_compiler.tasks.distance import distance, distance_unit
from acm_compiler.training.live_state import SharedNoise
from acm_compiler.training.loss_terms import take_choices
from acm_compiler.training.machine import Machine
from acm_compiler.training.phase import Backward, Figures, Group, Job, free_gate, unique
from acm_compiler.training.teacher import open_teacher

_TERMS = ("loss", "task", "budget", "entropy", "diversity")


class Finetune:
    """A `Phase`: objective + alpha_b L_b + alpha_e L_e + alpha_d L_d, with sampled gates and the model in train mode.

    It trains every parameter outside the dense regions that required gradients before, and all of the ACMs'. With
    `update: learners` it trains these alone by the objective alone, in eval mode, at the k that the gates choose.
    UsageError where it learns from a teacher that is not here.
    """

    name = "finetune"
    answers = True

    def __init__(self, model: nn.Module, config: FinetunePhase, job: Job, machine: Machine) -> None:
        self.model, self.config, self.job, self.machine = model, config, job, machine
        self.task, self.budget = job.task, job.budget
        self.teacher = open_teacher(job, machine, config)
        self.acms = sites(model)
        self.sampled = config.update == "all"
        self.groups = _groups(model, config)
        self.step = _Step(model, config, job.task, budget=job.budget)
        self.step_module: nn.Module = self.step
        self.seen: list[_Seen] = []
        self.noise = SharedNoise(machine) if machine.world > 1 else None

    def prepare(self, batches: BatchStream, steps: int) -> None:
        """Have the original answer all examples beforehand, where its answers are to be kept."""
        if self.config.cache_answers and self.teacher is not None:
            self.teacher.keep(batches, most=steps * self.config.accumulate, job=self.job)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Inside, the model is in train mode with relaxed gates or, for learners alone, in eval mode."""
        before = next(iter(self.acms.values())).temperature
        refuse_unfitted(rewritten(self.model), "finetune")
        relax(self.model, self.config.temperature if self.sampled else None)
        self._set_gates()
        wrapped = self.step_module
        try:
            with in_mode(self.model, training=self.sampled):
                self.step_module = self.machine.parallel(wrapped)
                self._set_noise(self.noise)
                yield
        finally:
            self._set_noise(None)
            self.step_module = wrapped
            relax(self.model, before)

    def _set_noise(self, noise: SharedNoise | None) -> None:
        for acm in self.acms.values():
            acm.noise = noise

    def _set_gates(self) -> None:
        if self.config.budget_range is not None:
            self._draw_budget()
        elif self.sampled and all(acm.gate.rule == "logits" for acm in self.acms.values()):
            for acm in self.acms.values():
                free_gate(acm)
        else:
            # damage gates have no choice of their own, gates that stay as they are have to be told: by this knob
            set_budget(self.model, self.budget)

    def _draw_budget(self) -> None:
        """Aim at another budget of the range, the same on all processes. NoBudgetTable where none were measured."""
        assert self.config.budget_range is not None
        low, high = self.config.budget_range
        budget = low + (high - low) * float(torch.rand(()))
        set_budget(self.model, max(budget, conversion(self.model).table_min))
        self.step.budget = budget

    def run(self, batch: Batch, *, backward: Backward, last: bool) -> None:
        """Forward and backward of one batch; accumulated batches count alike."""
        if self.config.budget_range is not None and not self.seen:
            self._draw_budget()
        batch, wanted = (batch, None) if self.teacher is None else self.teacher.teach(batch)
        own_draws = nullcontext() if self.noise is None else self.noise.apart()
        inputs, mask_BS = self.task.call_arguments(batch)
        with batch_context(self.model, mask=mask_BS), self._sync(last), own_draws:
            with self.machine.autocast():
                loss, seen = self.step_module(inputs, batch, wanted)
            backward(loss / self.config.accumulate)
        self.seen.append(seen)

    def _sync(self, last: bool) -> AbstractContextManager[None]:
        if isinstance(self.step_module, nn.parallel.DistributedDataParallel) and not last:
            return self.step_module.no_sync()
        return nullcontext()

    def finish(self) -> Figures:
        """The terms' means over batches and processes; DDP has averaged the gradients."""
        seen, self.seen = self.seen, []
        terms_5 = torch.stack([s.terms for s in seen]).mean(0) / self.machine.world
        shares_4 = torch.stack([s.shares for s in seen]).sum(0)
        counts = [self._counts(acm, seen) for acm in self.acms.values()]
        terms_5, shares_4, *counts = self.machine.totals([terms_5, shares_4, *counts])
        share, examples, run, full = shares_4.tolist()
        terms = dict(zip(_TERMS if self.sampled else _TERMS[:2], terms_5.tolist(), strict=False))
        bad = [name for name in list(terms)[1:] if not math.isfinite(terms[name])]
        return Figures(
            terms=terms | {"budget_pooled": run / max(full, 1e-30)},
            reached=share / max(examples, 1.0),
            asked=self.step.budget,
            choices={name: count.tolist() for name, count in zip(self.acms, counts, strict=True)},
            not_finite=f"the {bad[0]} loss" if bad else None,
        )

    def _counts(self, acm: ACM, seen: list[_Seen]) -> Tensor:
        """Number of tokens that took each choice of one site, [C]; zeros where none was counted."""
        total = torch.zeros(acm.count - acm.k_min + 1, device=self.machine.device)
        for batch in seen:
            if acm.name in batch.counts:
                total += batch.counts[acm.name].float()
        return total

    def complete(self) -> None:
        """Nothing to note: the gates decide, as trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """Figures of one batch: the terms [5]; sums of shares, of examples, of MACs run and at k = N [4]; choices."""

    terms: Tensor
    shares: Tensor
    counts: dict[str, Tensor]

    @staticmethod
    @torch.no_grad()
    def of(terms: Sequence[Tensor], shares_B: Tensor, macs: tuple[Tensor, Tensor], counts: dict[str, Tensor]) -> _Seen:
        """From the terms' values, each example's share, and the MACs run and at k = N of each."""
        run, full = (part.sum() for part in macs)
        examples = torch.tensor(float(len(shares_B)), device=shares_B.device)
        return _Seen(
            terms=torch.stack([term.float() for term in terms]),
            shares=torch.stack([shares_B.sum(), examples, run, full]).float().to(terms[0].device),
            counts=counts,
        )


class _Step(nn.Module):
    """From a batch to the loss, as one module: what DDP wraps has to see every use of a parameter."""

    def __init__(self, model: nn.Module, config: FinetunePhase, task: Task, *, budget: float) -> None:
        super().__init__()
        self.model, self.config, self.task, self.budget = model, config, task, budget
        # DDP is told that steps may leave parameters out (layers that are skipped), and warns where none is
        self.left_out = nn.Parameter(next(model.parameters()).new_zeros(()))

    def forward(self, inputs: Inputs, batch: Batch, wanted: Tensor | None) -> tuple[Tensor, _Seen]:
        if self.config.update == "learners":
            return self._at_chosen_k(inputs, batch, wanted)
        task = self._objective(call_model(self.model, inputs), batch, wanted)
        choices = take_choices(self.model)
        parts = choices.losses(self.budget)
        c = self.config
        total = task + c.budget * parts["budget"] + c.entropy * parts["entropy"] + c.diversity * parts["diversity"]
        terms = (total, task, *(parts[name] for name in _TERMS[2:]))
        return total, _Seen.of(terms, choices.shares, choices.macs, choices.counts)

    def _at_chosen_k(self, inputs: Inputs, batch: Batch, wanted: Tensor | None) -> tuple[Tensor, _Seen]:
        with record(self.model, macs=False) as usage:
            loss = self._objective(call_model(self.model, inputs), batch, wanted)
        none = torch.zeros_like(loss)
        return loss, _Seen.of((loss, loss, none, none, none), usage.real_shares, usage.learner_macs, {})

    def _objective(self, output: Any, batch: Batch, wanted: Tensor | None) -> Tensor:
        if wanted is None:
            return _of_all(self.task.loss(output, batch), self.task.counted(batch))
        answer = self.task.answer(output, self.task.mask(batch))
        wanted = wanted.reshape(answer.shape)
        return _of_all(distance(self.task, answer, wanted), distance_unit(self.task, wanted))


def _of_all(loss: Tensor, counted: Tensor) -> Tensor:
    """`loss`, a mean over so many, so that its mean over processes is that over what all of them count."""
    if ranks.world() == 1:
        return loss
    own = counted.to(loss.device, torch.float32)
    return loss * (own * ranks.world() / ranks.total(own).clamp_min(torch.finfo(own.dtype).tiny))


def _groups(model: nn.Module, config: FinetunePhase) -> list[Group]:
    acms = sites(model).values()
    if config.update == "learners":
        return [Group(parameters=unique(p for acm in acms for p in acm.learners.parameters()))]
    trained = _trained(model)
    if config.gate_lr is None:
        return [Group(parameters=trained)]
    gates = unique(p for acm in acms for p in acm.gate.parameters())
    ids = {id(p) for p in gates}
    return [Group(parameters=[p for p in trained if id(p) not in ids]), Group(parameters=gates, lr=config.gate_lr)]


def _trained(model: nn.Module) -> list[nn.Parameter]:
    acms = list(sites(model).values())
    dense = {id(p) for acm in acms if acm.dense is not None for p in acm.dense.parameters()}
    own = {id(p) for acm in acms for part in (acm.gate, acm.learners) for p in part.parameters()}
    return unique(p for p in model.parameters() if id(p) in own or (p.requires_grad and id(p) not in dense))
