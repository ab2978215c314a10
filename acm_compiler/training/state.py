"""The state of a run on disk, from which it continues at the very batch.

    state/<phase>-<step>/model.safetensors   every live parameter and buffer
                         optimization.pt     optimizer and loss scaling: tensors and plain values only
                         parts/              of a sharded phase, in place of these two: every process's part of both
                         generators.pt       every process's random generators
                         state.json          position, budgets, what the run belongs to
    state/answers/       what the original model answered; see `answers`

A state is written under another name and renamed when it is complete; only then the one before it is removed.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException

from acm_compiler.errors import StorageError, UsageError
from acm_compiler.files import parse_json, remedy, whole_file
from acm_compiler.passes.rewrite.conversion import conversion
from acm_compiler.recipe import differences, first_differences
from acm_compiler.training.live_state import (
    generator_states,
    live_facts,
    live_tensors,
    named_tensors,
    restore_live_facts,
    restore_parts,
    restore_structure,
    restore_tensors,
)
from acm_compiler.training.machine import Machine
from acm_compiler.training.sharding import optimizer_parts, write_parts

log = logging.getLogger(__name__)

SCHEMA = 2
_NAME = re.compile(r"(\d+)-(\d+)")
_UNFINISHED = ".unfinished"
_FACTS, _PARTS = "state.json", "parts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Position of a run: `step` optimizer steps of phase number `phase` are done."""

    phase: int = 0
    step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Facts that `StateStore.load` found, apart from what it wrote into the model.

    `optimization` and `generators` are None between phases. `optimization` is the folder of all parts where the phase
    was sharded.
    """

    position: Position
    metrics_bytes: int
    optimization: dict[str, Any] | Path | None
    generators: dict[str, Any] | None


class StateStore:
    """Saves and loads the states of one run in one directory."""

    def __init__(self, directory: Path, machine: Machine, *, decisions: Mapping[str, Any]) -> None:
        self.directory, self.machine, self.decisions = directory / "state", machine, dict(decisions)

    def save(
        self, model: nn.Module, position: Position, *, metrics_bytes: int, optimization: dict[str, Any] | None
    ) -> None:
        """Put the run's state on disk; all processes call it. StorageError when it cannot be written.

        The run itself goes on as if nothing had been saved.
        """
        generators = self.machine.gather(generator_states(self.machine.device))
        facts = self._facts(model, position, metrics_bytes=metrics_bytes)
        final, new = self.directory / f"{position.phase}-{position.step}", self.directory / _UNFINISHED
        in_parts = self.machine.sharded and optimization is not None
        (there,) = self.machine.gather((final / _FACTS).is_file())[:1]
        if there:
            return
        with self._saving():
            if self.machine.is_main:
                shutil.rmtree(new, ignore_errors=True)
                new.mkdir(parents=True)
        if in_parts:
            assert optimization is not None
            with self._saving():
                held = {f"model/{name}": tensor.detach() for name, tensor in named_tensors(model)}
                write_parts(held | optimizer_parts(optimization["optimizer"]["state"]), new / _PARTS)
        with self._saving():
            if self.machine.is_main:
                _write(
                    new,
                    {} if in_parts else live_tensors(model),
                    facts,
                    {
                        "generators.pt": {"generators": generators},
                        **({} if in_parts or optimization is None else {"optimization.pt": optimization}),
                    },
                )
                _replace(final, new)

    @contextmanager
    def _saving(self) -> Iterator[None]:
        """Work of some processes; StorageError in all of them where it fails in any."""
        problem: tuple[str, str] | None = None
        try:
            yield
        except (OSError, RuntimeError, SafetensorError, CheckpointException) as error:
            problem = f"{getattr(error, 'strerror', None) or error}", remedy(error)
        problem = next((found for found in self.machine.gather(problem) if found is not None), None)
        if problem is not None:
            if self.machine.is_main:
                shutil.rmtree(self.directory / _UNFINISHED, ignore_errors=True)
            raise StorageError(
                "the run's state cannot be saved",
                where=str(self.directory),
                found=problem[0],
                fix=f"{problem[1]}; {what_remains(self.directory.parent)}",
            )

    def _facts(self, model: nn.Module, position: Position, *, metrics_bytes: int) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "phase": position.phase,
            "step": position.step,
            "recipe": self.decisions,
            "teacher": conversion(model).teacher,
            "processes": self.machine.world,
            "sharded": self.machine.sharded,
            "torch": torch.__version__,
            "metrics_bytes": metrics_bytes,
            "model": live_facts(model),
        }

    def load(self, model: nn.Module) -> Snapshot | None:
        """The latest complete state, written into `model`; None where there is none.

        UsageError when it belongs to another recipe, teacher or number of processes; StorageError when damaged.
        """
        found = _latest(self.directory)
        if found is None:
            return None
        try:
            facts = parse_json((found / _FACTS).read_text())
            self._check(facts, model)
            restore_structure(model, facts["model"])
            parts, running = found / _PARTS, facts["step"] > 0
            if parts.is_dir():
                restore_parts(model, parts)
            else:
                restore_tensors(model, found / "model.safetensors")
            restore_live_facts(model, facts["model"])
            generators = torch.load(found / "generators.pt", weights_only=True)["generators"]
            return Snapshot(
                position=Position(phase=facts["phase"], step=facts["step"]),
                metrics_bytes=facts["metrics_bytes"],
                optimization=_optimization(found) if running else None,
                generators=generators[self.machine.rank] if running else None,
            )
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise StorageError(
                "the saved state is damaged",
                where=str(found),
                found=error,
                fix="remove that folder to start over",
            ) from error

    def _check(self, facts: dict[str, Any], model: nn.Module) -> None:
        expected = {
            "schema": ("was written in another format", SCHEMA),
            "teacher": ("belongs to a model with other dense weights", conversion(model).teacher),
            "processes": ("belongs to another number of processes", self.machine.world),
        }
        if facts["step"]:
            expected["sharded"] = ("is of a phase that was sharded, or is to be", self.machine.sharded)
        for name, (what, value) in expected.items():
            if facts.get(name, False) != value:
                raise self._foreign(what, found=facts.get(name, False), expected=value)
        if changed := first_differences(facts["recipe"], self.decisions):
            raise self._foreign(f"belongs to another recipe (saved -> now):\n  {changed}")
        if facts["torch"] != torch.__version__:
            log.warning(
                "the run was started with torch %s and continues with %s: not bit for bit the same run",
                facts["torch"],
                torch.__version__,
            )

    def _foreign(self, what: str, *, found: object = None, expected: object = None) -> UsageError:
        return UsageError(
            f"the saved state {what}",
            where=str(self.directory),
            found=found,
            expected=expected,
            fix="continue with what the run was started with, or remove that folder to start over",
        )

    def discard(self) -> None:
        """Remove all states, once they are not needed any more."""
        if self.machine.is_main:
            discard_state(self.directory.parent)


def discard_state(directory: Path) -> None:
    """Remove the saved states of a run in `directory`; one that is killed meanwhile leaves none that seems complete."""
    states = directory / "state"
    for state in states.glob("[!.]*"):
        with suppress(OSError):
            state.rename(states / f".{state.name}")
    shutil.rmtree(states, ignore_errors=True)


def has_state(directory: Path) -> bool:
    """True if an interrupted run can be continued in `directory`."""
    return _latest(directory / "state") is not None


def what_remains(directory: Path) -> str:
    """Remains, in `directory`, of a run that stops without saving its state, as text."""
    if has_state(directory):
        return "the state saved before is complete: continue it with --resume"
    return "no state had been saved before: the run starts over"


def saved_position(directory: Path, decisions: Mapping[str, Any]) -> Position | None:
    """Position of the interrupted run in `directory`; None where there is none that `decisions` can continue."""
    found = _latest(directory / "state")
    try:
        facts = parse_json((found / _FACTS).read_text()) if found else None
        if facts is None or differences(facts["recipe"], dict(decisions)):
            return None
        return Position(phase=facts["phase"], step=facts["step"])
    except (OSError, ValueError, KeyError):
        return None  # `StateStore.load` says what is wrong with it


def _latest(directory: Path) -> Path | None:
    if not directory.is_dir():
        return None
    # a state got its name when it was complete: one that lacks a file is damaged
    found = [path for path in directory.iterdir() if _NAME.fullmatch(path.name) and any(path.glob("*"))]
    return max(found, key=lambda path: tuple(map(int, path.name.split("-"))), default=None)


def _write(new: Path, tensors: dict[str, Tensor], facts: dict[str, Any], parts: dict[str, Any]) -> None:
    """Fill the folder of a state: tensors of the model, if they are not there in parts, other tensors, and facts."""
    if tensors:
        with whole_file(new / "model.safetensors") as path:
            save_file(tensors, path)
    for name, part in parts.items():
        with whole_file(new / name) as path:
            torch.save(part, path)
    with whole_file(new / _FACTS) as path:
        path.write_text(json.dumps(facts, indent=1))


def _replace(final: Path, new: Path) -> None:
    """Give a complete state its name, and remove those before it."""
    shutil.rmtree(final, ignore_errors=True)
    _flush(new)
    new.rename(final)
    _flush(final.parent)
    for older in final.parent.iterdir():
        if older != final and _NAME.fullmatch(older.name):
            shutil.rmtree(older, ignore_errors=True)


def _optimization(found: Path) -> dict[str, Any] | Path:
    """Content of the file of a phase's optimizer, or the folder of parts."""
    if (found / _PARTS).is_dir():
        return found / _PARTS
    content: dict[str, Any] = torch.load(found / "optimization.pt", weights_only=True, map_location="cpu")
    return content


def _flush(path: Path) -> None:
    """Have the disk keep the entries of a directory, so that a rename never outruns what it names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
