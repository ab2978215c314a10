"""The budget table measured anew on recent requests, while the server goes on; docs/serve.md, Traffic that drifts."""

from __future__ import annotations

import copy
import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from acm_compiler.calibration.recalibrate import recalibrate
from acm_compiler.errors import AcmError, counted
from acm_compiler.passes.rewrite.conversion import BudgetTable, rewritten
from acm_compiler.serving.batcher import Example, Refused
from acm_compiler.serving.served import Served
from acm_compiler.sources.inputs import fit_to

_LOG = logging.getLogger(__name__)
MOST, MOST_BYTES = 256, 64_000_000
FEWEST, ENOUGH = 32, 128  # examples, for one who asks and for a table that is made by itself
_TAKEN = 0.25  # the chance of an example to be kept
_BATCH, _TOKENS = 16, 1_000_000  # examples of a batch; more tokens than the sample can hold: all of it is measured on
_PAUSE, _LONGEST_PAUSE = 0.001, 0.05  # seconds that a forward is put off while requests wait, each time and at most


class Traffic:
    """A sample of recent examples: each that comes takes, by chance, the place of any that is kept.

    At most 256, of 64 MB together; the age of one that is kept is 1,024 examples in the mean.
    """

    def __init__(self) -> None:
        self._kept: list[Example] = []
        self._draw, self._lock = random.Random(0), threading.Lock()

    def add(self, examples: Sequence[Example]) -> None:
        """Add examples that were served."""
        with self._lock:
            for example in examples:
                size = sum(tensor.nbytes for tensor in example.values())
                if len(self._kept) < min(MOST, max(1, MOST_BYTES // size)):
                    self._kept.append(example)
                elif self._draw.random() < _TAKEN:
                    self._kept[self._draw.randrange(len(self._kept))] = example

    def examples(self) -> list[Example]:
        """Those that are kept now."""
        with self._lock:
            return list(self._kept)

    def clear(self) -> None:
        """Keep none of those so far."""
        with self._lock:
            self._kept.clear()


class Recalibration:
    """Measures a served model's budget table on its traffic, in a thread of its own, on a copy that shares weights.

    The worker of the server puts the new table in place between two batches. `is_busy`: whether requests wait; the
    measuring stands back then, for a while. `by_itself`: where the served shares leave what the table promised, on
    what comes from then on, as what came before was of another kind.
    """

    def __init__(self, served: Served, *, is_busy: Callable[[], bool], by_itself: bool) -> None:
        assert served.found is not None and served.use is not None
        self._served, self._is_busy = served, is_busy
        self._traffic = Traffic()
        served.seen = self._see
        self._running, self._wanted = threading.Lock(), False
        self._thread: threading.Thread | None = None
        self._stopping = False
        self.done = 0
        if by_itself:
            served.use.on_drift = self._sample_anew

    @property
    def is_running(self) -> bool:
        """True while a table is being measured."""
        return self._running.locked()

    def start(self) -> int:
        """Begin to measure; gives the number of examples. Refused while another runs, or before enough requests."""
        examples = self._traffic.examples()
        if len(examples) < FEWEST:
            raise Refused(f"{counted(len(examples), 'input')} served, and a budget table needs at least {FEWEST}")
        if not self._running.acquire(blocking=False):
            raise Refused("the budget table is being measured already: wait for it")
        self._thread = threading.Thread(target=self._measure, args=(examples,), name="acm-recalibration", daemon=True)
        self._thread.start()
        return len(examples)

    def stop(self) -> None:
        """Give up what is being measured, before its next forward, and wait until it has ended.

        A thread that is within an operator when the interpreter ends takes the process down with it.
        """
        self._stopping = True
        if self._thread is not None:
            self._thread.join()

    def _sample_anew(self) -> None:
        self._traffic.clear()
        self._wanted = True

    def _see(self, examples: Sequence[Example]) -> None:
        self._traffic.add(examples)
        if self._wanted and not self.is_running and not self._stopping and len(self._traffic.examples()) >= ENOUGH:
            self._wanted = False
            self.start()

    def _measure(self, examples: list[Example]) -> None:
        try:
            table = self._table(examples)
        except Exception as error:  # noqa: BLE001  # whatever a model raises ends this try alone
            if not self._stopping:
                _LOG.warning("no new budget table: %s", error, exc_info=not isinstance(error, AcmError))
        else:
            self._served.adopt(table)
            self.done += 1
            _LOG.warning("the budget table was measured anew, on %d recent inputs", len(examples))
        finally:
            self._running.release()

    def _table(self, examples: list[Example]) -> BudgetTable:
        """The table of these examples, measured on batches of like size."""
        served = self._served
        examples = sorted(examples, key=served.reader.cells)
        parts = [examples[start : start + _BATCH] for start in range(0, len(examples), _BATCH)]
        alike = [[part[number] for number in numbers] for part in parts for numbers in served.reader.together(part)]
        batches = [fit_to(served.model, served.reader.collate(part)) for part in alike]
        model = sharing_copy(served.model)
        model.register_forward_pre_hook(self._stand_back)
        inputs = [served.task.inputs(batch) for batch in batches]
        masks = {id(given): served.task.mask(batch) for given, batch in zip(inputs, batches, strict=True)}
        recalibrate(model, inputs, tokens=_TOKENS, mask=lambda given: masks[id(given)])
        table = rewritten(model).owner.table
        assert table is not None
        return table

    def _stand_back(self, *_: Any) -> None:
        """Put off a forward while requests wait, for 50 ms at most; none begins once the server stops."""
        if self._stopping:
            raise Refused("the server is stopping")
        end = time.monotonic() + _LONGEST_PAUSE
        while self._is_busy() and time.monotonic() < end:
            time.sleep(_PAUSE)


def sharing_copy(model: nn.Module) -> nn.Module:
    """A copy of a rewritten model with the same weights, in the same memory, and budgets of its own; no counters."""
    acms = rewritten(model).acms.values()
    own = {id(tensor) for acm in acms for tensor in acm.buffers(recurse=False)}
    shared: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers()) if id(t) not in own}
    made = copy.deepcopy(model, shared)
    for acm in rewritten(made).acms.values():
        acm.counts = None
    return made
