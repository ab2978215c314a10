"""A recipe's schedule carried out, from any saved state."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from acm_compiler.calibration.examples import held_out_every
from acm_compiler.data import BatchStream
from acm_compiler.data.draws import derive
from acm_compiler.errors import RunInterrupted, UsageError
from acm_compiler.passes.rewrite.conversion import conversion, rewritten, sites
from acm_compiler.planning.check_schedule import check_phase, check_schedule
from acm_compiler.recipe.phases import CalibratePhase, DistillPhase, FinetunePhase, GatePhase, TrainedPhase
from acm_compiler.recipe.phases import Phase as PhaseConfig
from acm_compiler.sources.inputs import Example
from acm_compiler.training.finetune import Finetune
from acm_compiler.training.live_state import seed_generators
from acm_compiler.training.loop import PhaseLoop, Run
from acm_compiler.training.machine import Machine, open_machine
from acm_compiler.training.phase import Job, Phase
from acm_compiler.training.sharding import sharded
from acm_compiler.training.site_phases import distill_phase, gate_phase, start_projections
from acm_compiler.training.state import Position, Snapshot, StateStore
from acm_compiler.training.watch import Interrupts, Journal, warn_of_collapse, warn_of_missed_budget


def run_schedule(
    model: nn.Module, schedule: Sequence[PhaseConfig], job: Job, *, resume: bool = False, until: str | None = None
) -> int:
    """Train `model`, in place, by the phases of `schedule`, and return how many of them are done then.

    `until` names the phase after which to stop; with `resume`, the next of that name, if there is one. UsageError where
    there is none, and the saved state is past the end of the last.

    With `resume`, what a saved state says is done is not done again; the weights at the end are those of a run that
    was never interrupted, bit for bit on the same machine, threads and versions. Without it, or without a saved
    state, the run starts from the beginning. The state stays in the directory until `discard_state`.
    Raises RunInterrupted after SIGINT or SIGTERM with the state saved, TrainingFailed, StorageError, UsageError.
    """
    _check(model, schedule, job, until)
    machine = open_machine(job.run.precision, job.run.device, sharded=job.run.sharded)
    model.to(machine.device)
    store = StateStore(job.directory, machine, decisions=job.decisions)
    snapshot = None
    if resume:
        snapshot = store.load(model)
        if until is not None and snapshot is not None:
            refuse_past(until, schedule, snapshot.position, where=store.directory)
    else:
        store.discard()
    path = job.directory / "metrics.jsonl" if machine.is_main else None
    journal = Journal(path, keep_bytes=snapshot.metrics_bytes if snapshot else 0)
    run = Run(model=model, job=job, machine=machine, journal=journal, store=store, interrupts=Interrupts())
    try:
        with run.interrupts.watched():
            return _run_phases(run, schedule, snapshot, until)
    finally:
        journal.close()


def _run_phases(run: Run, schedule: Sequence[PhaseConfig], snapshot: Snapshot | None, until: str | None) -> int:
    first = snapshot.position.phase if snapshot else 0
    if until is not None and until not in [config.phase for config in schedule[first:]]:
        if schedule[first - 1].teaches_gates and conversion(run.model).table is None:
            _measure(run, until)  # it was stopped on its way into a phase that needs no budgets
        return first
    for index in range(first, len(schedule)):
        config, began = schedule[index], time.monotonic()
        if isinstance(config, TrainedPhase):
            last = config.phase == until or index + 1 == len(schedule)
            follows = None if last else schedule[index + 1]
            _train(run, config, index=index, snapshot=snapshot if index == first else None, follows=follows)
        else:
            _calibrate(run, config, index)
            seconds = round(time.monotonic() - began, 4)
            run.journal.write({"phase": config.phase, "step": 1, "epoch": 0, "seconds": seconds})
        if run.job.on_phase_end is not None:
            run.job.on_phase_end(run.model, config, time.monotonic() - began)
        run.save(Position(phase=index + 1))
        (stop,) = run.machine.any(run.interrupts.received is not None)
        if stop:
            raise run.interrupted(f"phase {config.phase}")
        if config.phase == until:
            return index + 1
    return len(schedule)


def _train(
    run: Run, config: TrainedPhase, *, index: int, snapshot: Snapshot | None, follows: PhaseConfig | None
) -> None:
    """One phase with everything that belongs to its end; `follows` is the next one of this run."""
    job, machine = run.job, run.machine
    if config.imitates and (snapshot is None or snapshot.optimization is None):
        start_projections(run.model)
    with sharded(run.model, machine):
        phase = make_phase(run.model, config, job, machine)
        parts = _open_data(run, config.loaded_batch, index)
        loop = PhaseLoop(run, phase, config, batches=parts, index=index)
        stopped = f"stopped before the first step of phase {phase.name}; what was computed for it is kept"
        with _ended_at_once(run, stopped):
            phase.prepare(parts, loop.steps)
        loop.train(snapshot)
    phase.complete()
    if machine.is_main:
        k_min = {name: acm.k_min for name, acm in sites(run.model).items()}
        warn_of_collapse(loop.watch, phase.name, k_min, remedy=config.remedy)
        if config.aims_at_one_budget:
            warn_of_missed_budget(loop.watch, job.budget)
    freed = config.teaches_gates and follows is not None and follows.frees_gates
    # learners that moved under measured gates reach other budgets than before
    stale = conversion(run.model).table is not None if config.imitates else not freed
    if stale:
        _measure(run, phase.name)


def _measure(run: Run, phase: str) -> None:
    """Measure budgets, if this run does. The state after the phase's last step is there: Ctrl-C ends it at once."""
    if run.job.measure is not None:
        with _ended_at_once(run, f"stopped while measuring budgets after phase {phase}, whose state is saved"):
            run.job.measure(run.model)


@contextmanager
def _ended_at_once(run: Run, stopped: str) -> Iterator[None]:
    """Work without steps, which starts over in a resumed run: Ctrl-C ends it as RunInterrupted, in these words."""
    try:
        with run.interrupts.paused():
            yield
    except KeyboardInterrupt:
        raise RunInterrupted(stopped, fix=f"continue: {run.job.resume_command}") from None


def _calibrate(run: Run, config: CalibratePhase, index: int) -> None:
    """One calibration, of which nothing is kept when it is interrupted."""
    job, device = run.job, run.machine.device
    seed_generators(job.run.seed, index)

    def examples() -> Iterator[Example]:
        # of several processes all read whole batches, and run a share of each
        stream = replace(
            _open_data(run, config.loaded_batch, index), apart=held_out_every(config.tokens), rank=0, world=1
        )
        for cpu_batch in stream.epoch():
            batch = {name: value.to(device) for name, value in cpu_batch.items()}
            yield job.task.call_arguments(batch)

    assert job.calibrate is not None
    with _ended_at_once(run, "stopped inside phase calibrate, of which nothing is kept"):
        job.calibrate(run.model, config, examples())


def _open_data(run: Run, batch: int, index: int) -> BatchStream:
    """The training data as phase number `index` sees it."""
    seed = derive(run.job.run.seed, index)
    return run.job.data(batch=batch, seed=seed, rank=run.machine.rank, world=run.machine.world)


MAKERS: dict[type[TrainedPhase], Callable[[nn.Module, Any, Job, Machine], Phase]] = {
    DistillPhase: distill_phase,
    GatePhase: gate_phase,
    FinetunePhase: Finetune,
}


def make_phase(model: nn.Module, config: TrainedPhase, job: Job, machine: Machine) -> Phase:
    """The phase that a section of the recipe's schedule describes."""
    return MAKERS[type(config)](model, config, job, machine)


def _check(model: nn.Module, schedule: Sequence[PhaseConfig], job: Job, until: str | None) -> None:
    if job.calibrate is None and (solved := [config.phase for config in schedule if config.closed_form]):
        raise UsageError(f"this run cannot carry out the phase {solved[0]!r}", expected="phases that take steps")
    check_phase(until, schedule)
    found = rewritten(model)
    check_schedule(schedule, found.reached.sites, measured=found.owner.table is not None)


def refuse_past(until: str, schedule: Sequence[PhaseConfig], position: Position, *, where: Path) -> None:
    """UsageError where a later phase has changed the model since the last end of phase `until`."""
    names = [config.phase for config in schedule]
    done, ahead = names[: position.phase], names[position.phase :]
    if until in ahead or (position.step == 0 and done[-1] == until):
        return
    rest = f", or name a phase that is not over: {', '.join(dict.fromkeys(ahead))}" if ahead else ""
    raise UsageError(
        f"the run is past the end of phase {until!r}",
        where=str(where),
        found=f"a state after step {position.step} of {ahead[0]}" if position.step else f"a state after {done[-1]}",
        fix=f"leave out --until{rest}",
    )
