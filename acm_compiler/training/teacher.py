"""The original model as a teacher: run beside the learners at every step, or once, with its answers kept on disk."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from acm_compiler.data import Batch, BatchStream
from acm_compiler.errors import UsageError, counted
from acm_compiler.files import check_room
from acm_compiler.progress import Progress
from acm_compiler.recipe.phases import FinetunePhase
from acm_compiler.sources.inputs import ForwardEnded, call_model, in_mode
from acm_compiler.tasks import Task
from acm_compiler.training.answers import AnswerStore, digests_of, model_digest
from acm_compiler.training.machine import Machine
from acm_compiler.training.phase import Job


def open_teacher(job: Job, machine: Machine, config: FinetunePhase) -> Teacher | None:
    """The teacher that a task or an objective needs, None where neither does. UsageError where it is not here."""
    wanted = config.objective == "distillation"
    if not wanted and not job.task.needs_dense:
        return None
    if job.teacher is None:
        raise UsageError(
            "learning from the original model needs that model",
            where="finetune",
            fix="give the job its `teacher`, or train with objective: task on a task that has labels",
        )
    return Teacher(model=job.teacher.to(machine.device), task=job.task, machine=machine, wanted=wanted)


@dataclass(slots=True, kw_only=True)
class Teacher:
    """The original model, which is never trained. `wanted`: its outputs are the objective."""

    model: nn.Module
    task: Task
    machine: Machine
    wanted: bool
    kept: KeptAnswers | None = field(default=None, init=False)

    @torch.no_grad()
    def teach(self, batch: Batch) -> tuple[Batch, Tensor | None]:
        """The batch with what the task remembers of the original's output, and `task.answer` of it if wanted."""
        if self.kept is not None and (wanted := self.kept.of(batch)) is not None:
            return batch, wanted
        output = self.run(batch)
        answer = self.task.answer(output, self.task.mask(batch)) if self.wanted else None
        return self.task.remember(output, batch), answer

    @torch.no_grad()
    def run(self, batch: Batch) -> Any:
        """The original's output."""
        with in_mode(self.model, training=False), self.machine.autocast():
            return call_model(self.model, self.task.inputs(batch))

    def keep(self, batches: BatchStream, *, most: int, job: Job) -> None:
        """Run the original over the batches of one epoch, `most` at most, and teach by what it answered from then on.

        What an interrupted run has written is used. UsageError for answers to other questions, and for data that are
        others in every epoch; StorageError where there is no room.
        """
        _refuse_changing(batches, self.task)
        stream = replace(batches, drop_last=False)
        # the loop's first batches, and the examples that only later epochs do not drop
        kept = KeptAnswers(self, next(_on(stream.epoch(), self.machine)), job.directory / "state" / "answers")
        kept.fill(stream, most=min(most, len(stream)), job=job)
        self.kept = kept


class KeptAnswers:
    """Answers of a teacher on disk.

    Where the logits are a linear layer's output and its input is smaller, as in language models, that input is kept: of
    a head from 576 numbers to 49,152, a token takes 85 times less, and its logits are those of the original all the
    same. Elsewhere the answers themselves are. Padding is left out.
    """

    def __init__(self, teacher: Teacher, first: Batch, directory: Path) -> None:
        self.teacher, self.directory = teacher, directory
        self.head = _find_head(teacher, first)
        sample, mask = self._ask(first), teacher.task.mask(first)
        self.flat = sample.dim() == 2
        self.padded = mask is not None and sample.dim() == 3 and mask.shape == sample.shape[:2]
        self.example_bytes = sum(row.nbytes for row in self._rows(sample, mask)) / len(sample)
        self.store = AnswerStore(directory, rank=teacher.machine.rank)

    def fill(self, stream: BatchStream, *, most: int, job: Job) -> None:
        """Answer the batches that are not answered yet."""
        done, machine = self.store.open(self._facts(stream)), self.teacher.machine
        machine.gather(None)  # the folder is there for all processes
        if done < most:
            self._check_room(stream, (most - done) * stream.batch)
        with Progress("answers", most, unit="batch", done=done, say=job.say, shown=machine.is_main) as work:
            left = islice(stream.epoch(0, done), max(0, most - done))
            for number, batch in enumerate(_on(left, machine), start=done + 1):
                rows = self._rows(self._ask(batch), self.teacher.task.mask(batch))
                self.store.add(batch["index"].tolist(), self._digests(batch), rows, after=number)
                work.advance(examples=len(rows))
            self.store.flush(most)
        machine.gather(None)  # all processes have written theirs
        self.store.read()

    def of(self, batch: Batch) -> Tensor | None:
        """`task.answer` of the original for this batch, None where an example is missing. UsageError for other data."""
        pairs = zip(batch["index"].tolist(), self._digests(batch), strict=True)
        rows = [self.store.rows(index, digest) for index, digest in pairs]
        found = [row_RD.to(self.teacher.machine.device) for row_RD in rows if row_RD is not None]
        if len(found) < len(rows):
            return None
        mask = self.teacher.task.mask(batch)
        if not self.padded or mask is None:
            answer = torch.stack(found).squeeze(1) if self.flat else torch.stack(found)
        else:
            answer = found[0].new_zeros(*mask.shape, found[0].shape[-1])
            answer[mask] = torch.cat(found)
        if self.head is None:
            return answer
        with self.teacher.machine.autocast():
            return self.teacher.task.answer(self.head(answer), mask)

    def _ask(self, batch: Batch) -> Tensor:
        """The answer [B, …, D], or the head's input in the type that the head computes in."""
        teacher = self.teacher
        if self.head is None:
            return teacher.task.answer(teacher.run(batch), teacher.task.mask(batch))
        asked: list[Tensor] = []

        def note(_: nn.Module, args: tuple[Any, ...]) -> None:
            asked.append(args[0])
            raise ForwardEnded  # nobody reads the head's product of all tokens and words

        with self.head.register_forward_pre_hook(note), suppress(ForwardEnded):
            teacher.run(batch)
        return asked[0].to(teacher.machine.dtype or asked[0].dtype)

    def _rows(self, answer: Tensor, mask: Tensor | None) -> list[Tensor]:
        """The rows [R, D] of each example, without padding."""
        if self.padded and mask is not None:
            return [answer_SD[real_S] for answer_SD, real_S in zip(answer, mask, strict=True)]
        return list(answer.reshape(len(answer), -1, answer.shape[-1]))

    def _digests(self, batch: Batch) -> list[int]:
        return digests_of(self.teacher.task.inputs(batch), batch.get("attention_mask"))

    def _facts(self, stream: BatchStream) -> dict[str, Any]:
        """Everything that answers depend on, down to the last bit of rounding."""
        teacher = self.teacher
        tensors = chain(teacher.model.parameters(), teacher.model.buffers())
        return {
            "model": model_digest(tensors),
            "task": type(teacher.task).__name__,
            "precision": str(teacher.machine.dtype),
            "order": [stream.examples, stream.batch, stream.seed, stream.world],
            "form": "head" if self.head is not None else "answers",
        }

    def _check_room(self, stream: BatchStream, examples: int) -> None:
        need = int(self.example_bytes * min(examples, stream.examples))
        self.directory.mkdir(parents=True, exist_ok=True)
        what = f"the answers of the original to {counted(examples, 'example')} do not fit on the disk"
        check_room(self.directory, need, what, instead="leave cache_answers out, or train on fewer examples")


def _on(batches: Iterator[Batch], machine: Machine) -> Iterator[Batch]:
    for batch in batches:
        yield {name: value.to(machine.device) for name, value in batch.items()}


def _find_head(teacher: Teacher, batch: Batch) -> nn.Linear | None:
    """The linear layer whose output the logits are; None where its input is no smaller, or it runs more than once."""
    seen: list[tuple[nn.Linear, weakref.ref[Tensor]]] = []
    linears = [module for module in teacher.model.modules() if isinstance(module, nn.Linear)]
    with _hooked(linears, seen):
        logits = teacher.task.logits(teacher.run(batch))
    found = next((module for module, output in seen if logits is not None and output() is logits), None)
    if found is None or found.in_features >= found.out_features or sum(module is found for module, _ in seen) > 1:
        return None
    return found


@contextmanager
def _hooked(linears: list[nn.Linear], seen: list[tuple[nn.Linear, weakref.ref[Tensor]]]) -> Iterator[None]:
    """Inside, outputs of linear layers are noted, and let go of all the same."""

    def note(module: nn.Module, _: Any, output: Tensor) -> None:
        assert isinstance(module, nn.Linear)
        seen.append((module, weakref.ref(output)))

    hooks = [linear.register_forward_hook(note) for linear in linears]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _refuse_changing(batches: BatchStream, task: Task) -> None:
    """UsageError where an example is another in every epoch, or is mixed with others."""
    one = replace(batches, batch=1, shuffle=False, drop_last=False, rank=0, world=1)
    found = [next(one.epoch(number)) for number in (0, 1)]
    first, second = (digests_of(task.inputs(batch), batch.get("attention_mask")) for batch in found)
    if first != second or getattr(batches.dataset, "mix", None) is not None:
        raise UsageError(
            "answers that are kept belong to examples that stay what they are",
            found="data that are others in every epoch: augmented, or mixed with each other",
            fix="leave cache_answers out, or data.train without augment, mixup and cutmix",
        )
