"""Inputs of a schedule (task, data, directory, callbacks) and its log, metrics.jsonl.

metrics.jsonl: one line per optimizer step, one per measurement in between, one per phase in closed form.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from acm_compiler.data import BatchStream
from acm_compiler.errors import StorageError
from acm_compiler.files import remedy
from acm_compiler.recipe.phases import CalibratePhase, Phase
from acm_compiler.recipe.schema import RunConfig
from acm_compiler.sources.inputs import Example
from acm_compiler.tasks import Task
from acm_compiler.training.state import what_remains

# opens the training data: the batches of so many examples over all `world` processes, as process `rank` sees them,
# by keywords `batch`, `seed`, `rank` and `world`
OpenData = Callable[..., BatchStream]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Everything a schedule needs beside the model.

    budget: the share of learner MACs that finetune aims at. directory: where `metrics.jsonl` and `state/` go.
    teacher: the model before conversion, for phases that learn from its outputs.
    decisions: of the recipe, as plain data; a state is continued only by a recipe with the same ones.
    resume_command: shown when interrupted.
    measure: called with the model after each gate and finetune phase, unless the next one frees the gates again; keeps
    the model's new budget table.
    calibrate: called with the model, a calibrate phase's section, and (inputs, mask) pairs on the run's device.
    evaluate: called every `run.eval_every` of a finetune phase; its figures go into `metrics.jsonl`.
    on_phase_end: called after each phase with the model, its section of the recipe, and the seconds it took.
    All processes make these calls.
    say: takes a line on a phase's progress, now and then, where no terminal shows a bar; the log when unset.
    """

    task: Task
    data: OpenData
    run: RunConfig
    directory: Path
    budget: float
    teacher: nn.Module | None = None
    decisions: Mapping[str, Any] = field(default_factory=dict)
    resume_command: str = "acmc rewrite --resume"
    measure: Callable[[nn.Module], object] | None = None
    calibrate: Callable[[nn.Module, CalibratePhase, Iterator[Example]], object] | None = None
    evaluate: Callable[[nn.Module], Mapping[str, Any]] | None = None
    on_phase_end: Callable[[nn.Module, Phase, float], object] | None = None
    say: Callable[[str], None] | None = None


class Journal:
    """Appends lines to a file; every line is complete when `write` returns. Without a path it keeps nothing.

    `keep_bytes`: how much of an earlier run's file stays; what was written after its last saved state is cut off.
    """

    def __init__(self, path: Path | None, *, keep_bytes: int = 0) -> None:
        self.path = path
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = path.open("ab")
            self.file.truncate(keep_bytes)
        except OSError as error:
            raise _unwritable(path, error) from error

    def write(self, line: dict[str, Any]) -> None:
        """Add one line. StorageError when the disk does not take it."""
        if self.path is None:
            return
        plain = {name: _plain(value) for name, value in line.items()}
        try:
            self.file.write(json.dumps(plain).encode() + b"\n")
            self.file.flush()
        except OSError as error:
            raise _unwritable(self.path, error) from error

    @property
    def size_bytes(self) -> int:
        """Length of the file."""
        return 0 if self.path is None else self.file.tell()

    def close(self) -> None:
        """Let go of the file."""
        if self.path is not None:
            self.file.close()


def _plain(value: Any) -> Any:
    """Numbers that JSON has no word for become null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _unwritable(path: Path, error: OSError) -> StorageError:
    return StorageError(
        "metrics cannot be written",
        where=str(path),
        found=error.strerror or error,
        fix=f"{remedy(error)}; {what_remains(path.parent)}",
    )
