"""Batches in an order that is a function of (seed, epoch, batch number) and of nothing else.

What an example looks like follows from (seed, epoch, index), how a batch is mixed from (seed, epoch, number): not
from how many processes load it, nor from what was loaded before. So a run that stops after a batch continues with
the next one exactly, and several ranks together see the batches that one process would see.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from acm_compiler.data.batch import Batch, assemble, left_out
from acm_compiler.data.draws import derive, seeded
from acm_compiler.errors import AcmError, DataError, UsageError, counted, excluded_text
from acm_compiler.sources.user_code import is_users, users_code

_ORDER, _EXAMPLE, _MIX = 1, 2, 3  # what a seed is for


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStream:
    """The batches of one data set, epoch by epoch; `batch` counts the examples of all ranks together.

    With `drop_last` (for training) every batch is full, and `batch` must be a multiple of `world`; where the data set
    puts examples together itself, a rank reads all of a batch, so that its part is padded as the whole. Without it the
    last batch may be smaller, and a rank that has no share of it does not get it. An unusable example,
    which is None, is excluded; where batches must be full, the next usable one takes its place. `count`: an epoch is so
    many examples of the order alone, drawn before those of like length are brought together. `apart`: every so many-th
    batch is only brought together with the next such one, so that a few of them are as long and as short as all.
    `workers` processes load data ahead; 0 loads in this one. The global random generators are the same after a batch as
    before.
    """

    dataset: Dataset[Any]
    batch: int
    seed: int = 0
    shuffle: bool = False
    drop_last: bool = False
    count: int | None = None
    apart: int | None = None
    workers: int = 0
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        examples, name = self.examples, type(self.dataset).__name__
        if examples == 0:
            raise DataError("the data set is empty", where=name, expected="at least one example")
        if self.drop_last and examples < self.batch:
            raise DataError(
                "the data set does not fill one batch",
                where=name,
                found=counted(examples, "example"),
                expected=f"at least {self.batch}",
                fix="use a smaller batch, or more data",
            )
        if self.drop_last and self.batch % self.world:
            raise UsageError(
                "a batch cannot be shared equally by the processes",
                found=f"batch {self.batch}, {self.world} processes",
                fix=f"use a batch that is a multiple of {self.world}",
            )

    @property
    def examples(self) -> int:
        """The number of examples in an epoch."""
        have = count_examples(self.dataset)
        return have if self.count is None else min(self.count, have)

    def __len__(self) -> int:
        """Batches per epoch."""
        whole, rest = divmod(self.examples, self.batch)
        return whole if self.drop_last or not rest else whole + 1

    def place(self, step: int) -> tuple[int, int]:
        """(epoch, batch number) of the batch that comes after `step` batches."""
        return divmod(step, len(self))

    def epoch(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from number `start` on, as an uninterrupted run gives them. DataError."""
        if hasattr(self.dataset, "prepare"):
            with users_data(self.dataset):
                self.dataset.prepare()
        shares = self._shares(epoch)[start:]
        loader = DataLoader(
            _Fetch(self.dataset, self.seed, filled=self.drop_last),
            sampler=[share for share in shares if share.indices],  # type: ignore[arg-type]
            batch_size=None,
            num_workers=self.workers,
            worker_init_fn=_ignore_signals,
            # the loader draws a seed of its own when it starts: never from the run's generator
            generator=torch.Generator(),
            pin_memory=torch.cuda.is_available(),
        )
        empty = True
        for fetched in loader:
            if isinstance(fetched, AcmError):
                raise fetched
            if fetched is not None:
                empty = False
                yield fetched
        if empty and shares:
            raise _none_usable(self.dataset)

    def _shares(self, epoch: int) -> list[_Share]:
        order = list(range(have := count_examples(self.dataset)))
        if self.shuffle:
            generator = torch.Generator().manual_seed(derive(self.seed, epoch, _ORDER))
            order = torch.randperm(have, generator=generator).tolist()
        order = order[: self.examples]
        if hasattr(self.dataset, "group"):
            with users_data(self.dataset):
                order = self._grouped(order)
        shares = []
        for number in range(len(self)):
            whole = order[number * self.batch : (number + 1) * self.batch]
            shares.append(_Share(epoch, number, *self._own(whole)))
        return shares

    def _own(self, whole: list[int]) -> tuple[list[int], slice]:
        """The examples of a batch that this rank reads, and which of them are its part."""
        low, high = (len(whole) * rank // self.world for rank in (self.rank, self.rank + 1))
        if self.world > 1 and low < high and self.drop_last and hasattr(self.dataset, "collate"):
            return whole, slice(low, high)
        if self.world > 1 and low < high and hasattr(self.dataset, "mix"):
            # each example is mixed with the one before it in the whole batch, the first one with the last
            return [whole[low - 1], *whole[low:high]], slice(1, None)
        return whole[low:high], slice(None)

    def _grouped(self, order: list[int]) -> list[int]:
        """The order with examples of like length brought together; two at a time of the batches that stay `apart`."""
        group: Callable[[list[int], int], list[int]] = self.dataset.group  # type: ignore[attr-defined]
        if self.apart is None:
            return group(order, self.batch)
        batches = _parts(order, self.batch)
        aside = batches[self.apart - 1 :: self.apart]
        del batches[self.apart - 1 :: self.apart]
        pairs = [group(list(chain(*pair)), self.batch) for pair in _parts(aside, 2)]
        rest = iter(_parts(group(list(chain(*batches)), self.batch), self.batch))
        kept = iter(_parts(list(chain(*pairs)), self.batch))
        places = range(1, len(batches) + len(aside) + 1)
        return list(chain(*(next(rest if place % self.apart else kept) for place in places)))


def _parts(values: list[Any], size: int) -> list[list[Any]]:
    return [values[start : start + size] for start in range(0, len(values), size)]


@dataclass(frozen=True, slots=True)
class _Share:
    """One rank's part of a batch: the examples that are read for it, and which of them it is."""

    epoch: int
    number: int
    indices: list[int]
    own: slice


class _Fetch(Dataset[Any]):
    """Makes a share's batch, None where nothing of it is usable.

    A refusal comes back as a value: raised in a worker it would arrive as a traceback.
    """

    def __init__(self, dataset: Dataset[Any], seed: int, *, filled: bool) -> None:
        self.dataset, self.seed, self.filled = dataset, seed, filled

    def __getitem__(self, share: _Share) -> Batch | AcmError | None:
        try:
            with users_data(self.dataset):
                return self._batch(share)
        except AcmError as error:
            return error

    def _batch(self, share: _Share) -> Batch | None:
        mix = getattr(self.dataset, "mix", None)
        batch = self._examples(share.epoch, share.indices, filled=self.filled or mix is not None)
        if batch is None:
            return None
        if mix is not None:
            with seeded(self.seed, share.epoch, _MIX, share.number):
                batch = mix(batch)
        return batch if share.own == slice(None) else {name: value[share.own] for name, value in batch.items()}

    def _examples(self, epoch: int, indices: list[int], *, filled: bool) -> Batch | None:
        if hasattr(self.dataset, "batch"):
            return assemble(self.dataset, indices)
        found = [(index, self._example(epoch, index)) for index in indices]
        if filled:
            found = [(i, example) if example is not None else self._next(epoch, i) for i, example in found]
        found = [(i, example) for i, example in found if example is not None]
        return assemble(self.dataset, *zip(*found, strict=True)) if found else None

    def _example(self, epoch: int, index: int) -> Any:
        with seeded(self.seed, epoch, _EXAMPLE, index):
            return self.dataset[index]

    def _next(self, epoch: int, index: int) -> tuple[int, Any]:
        """The first usable example after one that is not, and its number. DataError where there is none."""
        count = count_examples(self.dataset)
        for other in (*range(index + 1, count), *range(index)):
            example = self._example(epoch, other)
            if example is not None:
                return other, example
        raise _none_usable(self.dataset)


def users_data(dataset: Dataset[Any]) -> AbstractContextManager[None]:
    """A block that asks the data set; FunctionFailed, with the user's own frames, where one of the user's raises."""
    return users_code(type(dataset).__name__, "the data set raised") if is_users(dataset) else nullcontext()


def count_examples(dataset: Dataset[Any]) -> int:
    """Number of examples in the data set. FunctionFailed where one of the user's raises."""
    with users_data(dataset):
        return len(dataset)  # type: ignore[arg-type]


def _none_usable(dataset: Dataset[Any]) -> DataError:
    return DataError(
        "no example of the data set can be used",
        where=type(dataset).__name__,
        found=excluded_text(left_out(dataset)) or "None for every one",
        expected="examples as mappings, or pairs (image, label)",
    )


def _ignore_signals(worker: int) -> None:
    """Ctrl-C reaches the whole process group; the run must outlive it long enough to save its state."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
