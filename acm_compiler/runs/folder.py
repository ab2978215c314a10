"""The folder that a recipe is carried out in: what an earlier run left there, and what becomes of it."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from acm_compiler.checkpoint import check_own_folder, holds_model, locked, save_id
from acm_compiler.checkpoint.folder import COMPARED
from acm_compiler.errors import AcmError, BudgetMissed, RunInterrupted, UsageError
from acm_compiler.evaluation.results import FILE, Evaluation, load_evaluation
from acm_compiler.progress import Say
from acm_compiler.recipe import Recipe, decisions, expand_paths, first_differences, load_recipe
from acm_compiler.recipe.datasets import DataConfig
from acm_compiler.recipe.tasks import TaskConfig
from acm_compiler.runs.given import Given
from acm_compiler.training.machine import Machine
from acm_compiler.training.schedule import refuse_past
from acm_compiler.training.state import has_state, saved_position
from acm_compiler.training.watch import MISSED

_REMEDY = "choose another folder by --out; or replace that model and what was measured on it: --force"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of a run: its folder, its start and its end.

    resume: continue from the state in `directory`; a finished result of the same recipe stays as it is. force: replace
    what an earlier run left there. Both: continue an unfinished run, replace a finished one. until: the phase after
    which to stop. strict_budget: a budget missed by more than .01 is an error at the end. judge: evaluate the finished
    model. resume_command: what an interrupted user is told to type.
    """

    directory: Path
    resume: bool = False
    force: bool = False
    until: str | None = None
    strict_budget: bool = False
    judge: bool = True
    resume_command: str = "acmc rewrite --resume"


@contextmanager
def one_run(directory: Path, machine: Machine, say: Say) -> Iterator[None]:
    """Be the only run in `directory`, all processes of a launch together. StorageError, or UsageError naming the other.

    The first process holds the lock for all of them; what it is refused, all of them raise.
    """
    refusal: AcmError | None = None
    with ExitStack() as held:
        if machine.is_main:
            try:
                check_own_folder(directory)
                held.enter_context(locked(directory, say))
            except AcmError as error:
                refusal = error
        refusal = machine.gather(refusal)[0]
        if refusal is not None:
            raise refusal
        yield


def check_run_folder(recipe: Recipe, options: RunOptions) -> bool:
    """True if there is nothing to resume, because the folder holds the complete result of this very recipe.

    Raises StorageError for a folder that is not ours, and UsageError, but for `force`, for one whose content a run
    would throw away: an unfinished run that is not resumed, or a saved model; UsageError also where that is to stop
    after a phase that it is past.
    """
    check_own_folder(options.directory)
    if not has_state(options.directory):
        if options.force or not holds_model(options.directory):
            return False
        if options.resume and (options.directory / "recipe.yaml").is_file():
            _check_same(load_recipe(options.directory / "recipe.yaml"), recipe, options.directory)
            return True
        raise UsageError("the folder holds a saved model", where=str(options.directory), fix=_REMEDY)
    if not (options.resume or options.force):
        raise UsageError(
            "an unfinished run has left its state here",
            where=str(options.directory / "state"),
            fix=f"continue it: {options.resume_command}; or start over without it: --force",
        )
    position = saved_position(options.directory, decisions(recipe)) if options.resume else None
    if options.until is not None and position is not None:
        refuse_past(options.until, recipe.schedule, position, where=options.directory / "state")
    return False


def describe_existing(options: RunOptions) -> str | None:
    """Effect of a run that `check_run_folder` lets begin on what its folder holds; None where that is nothing."""
    if has_state(options.directory):
        if options.resume:
            return f"continues the unfinished run in {options.directory}"
        return f"--force: starts over, without the state of the unfinished run in {options.directory}"
    if holds_model(options.directory):
        return f"--force: replaces the model in {options.directory}, once the new one is complete"
    return None


def still_to_come(phases: Sequence[str], options: RunOptions) -> str:
    """The phases left after `options.until`, and the command that runs them."""
    return f"stopped after {options.until}; still to come: {', '.join(phases)}\n  go on: {options.resume_command}"


def _check_same(made_by: Recipe, recipe: Recipe, directory: Path) -> None:
    if changed := first_differences(decisions(expand_paths(made_by)), decisions(recipe)):
        raise UsageError(
            f"the folder holds the finished result of another recipe (there -> now):\n  {changed}",
            where=str(directory),
            fix=_REMEDY,
        )


def subject_of(directory: Path, data: DataConfig | None, task: TaskConfig | None) -> str | None:
    """Subject of an evaluation of the model saved in `directory` on this data: see `Evaluation.subject`.

    It starts with the save, and ends there where data or task are not known.
    """
    save = save_id(directory)
    if save is None or data is None or task is None:
        return save
    examples = "\n".join((data.model_dump_json(), task.model_dump_json()))
    return f"{save}:{hashlib.sha256(examples.encode()).hexdigest()[:16]}"


def other_file(kind: str, subject: str) -> str:
    """Name of the file in a run's folder for evaluations with this subject, on data of this kind that are not its own.

    Distinct subjects have distinct names, which `checkpoint.folder` knows as ours.
    """
    words = re.sub(r"\W+", "_", kind.removeprefix("python:"))
    return f"eval-{words}-{subject.rpartition(':')[2][:8]}.json"


def evaluation_file(directory: Path, given: Given, recipe: Recipe | None) -> str:
    """Name of the file in a run's folder for evaluations on the data and the task that were given: `eval.json`, but for
    others than the recipe's, or than those that the folder was first measured on, which have a file of their own.
    """
    own, known = Given().over(recipe), given.over(recipe)
    first, subject = (subject_of(directory, each.data, each.task) for each in (own, known))
    if own.data is None or own.task is None:
        before = load_evaluation(directory)
        first = before.subject if before is not None else None
    if known.data is None or not (first and subject) or first == subject:
        return FILE
    return other_file(known.data.kind, subject) if first.startswith(subject.partition(":")[0]) else FILE


def load_measured(directory: Path, given: Given, recipe: Recipe | None) -> Evaluation | None:
    """The evaluation of the model in `directory` on the data that were given, else on its own; None without either."""
    save = save_id(directory)
    for name in dict.fromkeys((evaluation_file(directory, given, recipe), FILE)):
        found = load_evaluation(directory, name)
        if found is not None and (save is None or (found.subject or save).startswith(save)):
            return found
    return None


def drop_measured(directory: Path, say: Say, *, evaluated: bool) -> None:
    """Remove what was measured on a model that has just been replaced, and exports of it; `evaluated`: eval.json is the
    new one's.
    """
    names = ("bench.json", "report", *COMPARED, "export", *(path.name for path in directory.glob("eval-*.json")))
    stale = [directory / name for name in (*(() if evaluated else (FILE,)), *names) if (directory / name).exists()]
    for path in stale:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    if stale:
        names = tuple(path.name for path in stale)
        made = " or exported from" if "export" in names else ""
        say(f"removed what was measured on{made} the model that was here: {', '.join(names)}")


@contextmanager
def as_run_interrupted(options: RunOptions) -> Iterator[None]:
    """Work after the phases, which starts over in a resumed run: Ctrl-C ends it as RunInterrupted, if they are kept."""
    try:
        yield
    except KeyboardInterrupt:
        if not has_state(options.directory):
            raise
        stopped = "stopped while evaluating, with all phases done and saved"
        raise RunInterrupted(stopped, fix=f"continue: {options.resume_command}") from None


def judged(evaluation: Evaluation | None, options: RunOptions) -> Evaluation | None:
    """The evaluation; BudgetMissed where it must not be so under `strict_budget`."""
    if evaluation is None or not options.strict_budget:
        return evaluation
    missed = [budget for budget in evaluation.budgets if abs(budget.reached - budget.asked) > MISSED]
    if missed:
        raise BudgetMissed(
            "the model is saved, but budgets were missed",
            found=", ".join(f"{b.asked:.3g} reached {b.reached:.3f}" for b in missed),
            expected=f"within {MISSED}",
            fix="ask for budgets without --strict-budget, or measure them on data more like the evaluation's",
        )
    return evaluation
