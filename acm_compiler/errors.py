"""Every way in which acm_compiler refuses or fails: one class each, with its exit code.

A message has four parts: what went wrong, where (a site, or `file:line:column`), what was found against
what was expected, and what to do about it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec

_LONGEST = 500  # characters of what was found


class AcmError(Exception):
    """Base of all errors meant for users; `exit_code` is what the command line returns for it."""

    exit_code = 1

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        found: object = None,
        expected: object = None,
        fix: str | None = None,
    ) -> None:
        self.what, self.where, self.found, self.expected, self.fix = what, where, found, expected, fix
        super().__init__(self._message())

    def _message(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        facts = [
            f"{label} {value}"
            for label, value in (("found", _shortened(self.found)), ("expected", self.expected))
            if value is not None
        ]
        if facts:
            head = f"{head} ({', '.join(facts)})"
        return f"{head}\n  {self.fix}" if self.fix else head


def _shortened(found: object) -> object:
    """`found`, without what makes an error unreadable, such as all numbers of a tensor that was given for a word."""
    text = str(found)
    return found if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"


class UsageError(AcmError):
    """An argument, option or combination of them that cannot be meant."""

    exit_code = 2


class RecipeError(AcmError):
    """A recipe that does not hold; `problems` lists every fault found, each as `file:line:column: what`."""

    exit_code = 2

    def __init__(self, problems: Sequence[str], *, fix: str | None = None) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems), fix=fix)


class SelectionError(UsageError):
    """A site pattern or name that matches nothing."""


class ModelSourceError(UsageError):
    """A model reference that names nothing that can be built here."""


class DataError(AcmError):
    """A data set that is missing, empty or unreadable."""


class UnusableClip(DataError):
    """An unusable recording; `fault` is the reason in a word or two, such as `unreadable` or `too long`."""

    def __init__(self, fault: str, *, where: str, found: object = None, expected: object = None) -> None:
        self.fault = fault
        super().__init__(f"the clip is {fault}", where=where, found=found, expected=expected)


class FunctionFailed(AcmError):
    """A user's function, named by `python:`, or the module that holds it, raised; the message shows where."""


class NothingToConvert(AcmError):
    """The model holds no site; the skips give the reasons."""

    exit_code = 3


class CaptureFailed(AcmError):
    """The model could not be seen as a graph with the example inputs given."""

    exit_code = 3


class BudgetUnreachable(AcmError):
    """The budget asked for lies outside what the plan can reach."""

    exit_code = 4


class BudgetMissed(AcmError):
    """The measured budget differs from the one asked for by more than the tolerance (strict runs only)."""

    exit_code = 4


class VerificationFailed(AcmError):
    """Two things that must agree do not."""

    exit_code = 5


class UnexpectedMetric(AcmError):
    """The model to convert is not as good, or as bad, as the recipe says it is."""

    exit_code = 5


class RunInterrupted(AcmError):
    """The run was stopped by a signal after its state had been saved."""

    exit_code = 130


class AlreadyRewritten(AcmError):
    """The model already holds ACMs."""


class NotRewritten(AcmError):
    """The model holds no ACMs."""


class FixedBudget(AcmError):
    """A graph that keeps the budget at which it was made: an exported program, or a model frozen for good."""


class PlanMismatch(AcmError):
    """The plan was made for another model."""


class SitesNotFitted(AcmError):
    """Sites still run their dense region because no phase has fitted their learners."""


class NoBudgetTable(AcmError):
    """The model's gates were never measured, so no knob belongs to a budget."""


class NoDenseRegion(AcmError):
    """The dense regions are gone; they are needed to calibrate, distill or revert."""


class LayoutUnknown(AcmError):
    """A site's tokens cannot be mapped back to the examples of a batch."""


class NothingRecorded(AcmError):
    """Figures were asked for, but no forward pass has produced any."""


class TrainingFailed(AcmError):
    """A phase met a value it cannot train on, such as a loss that is not finite."""


class StorageError(AcmError):
    """A directory or file that cannot be read or written as needed."""


class PackageMissing(AcmError):
    """The request needs an optional package that is not installed."""


def require_packages(packages: Sequence[str], what: str, extra: str) -> None:
    """Raise PackageMissing, which says what needs them and the extra that brings them, unless all are installed."""
    if missing := [name for name in packages if find_spec(name) is None]:
        raise PackageMissing(f"{what} needs {' and '.join(missing)}", fix=f"pip install 'acm_compiler[{extra}]'")


class KernelUnavailable(AcmError):
    """A kernel that was asked for cannot be built or loaded here."""


class CompiledModelError(AcmError):
    """The request needs the eager model, but a compiled one was given."""


def check_bool(value: object, name: str) -> None:
    """UsageError unless the argument `name` is True or False: texts such as "no" would count as True."""
    import numpy as np  # not for a command that only prints

    if not isinstance(value, (bool, np.bool_)):
        raise UsageError(f"{name} must be True or False", found=repr(value))


def nearest(name: str, known: Iterable[str], *, count: int = 3, least: float = 0.5) -> list[str]:
    """The `count` known names most like `name`, best first; none that is less alike than `least`."""
    import difflib  # not before something is misspelt

    return difflib.get_close_matches(name, list(known), n=count, cutoff=least)


def counted(number: int, noun: str) -> str:
    """Thousands apart, and the noun in its number: 10,800 examples, 1 batch."""
    plural = "es" if noun.endswith(("s", "x", "ch")) else "s"
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def a_few_of(names: Sequence[str], most: int = 3) -> str:
    """The first of some names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


_FIT = "fit them: acm.calibrate(model, batches), a recipe's distill phase, or acm.plan(..., init='random')"


def require_fitted(dense: Sequence[str], request: str, *, where: str | None = None, fix: str = _FIT) -> None:
    """Raise SitesNotFitted, naming them, while sites run their dense region (docs/semantics.md, The start).

    dense: names of those that do. request: subject of the sentence.
    """
    if dense:
        count = f"{len(dense)} sites still run their" if len(dense) > 1 else "1 site still runs its"
        what = f"{request} needs learners, but {count} dense region"
        raise SitesNotFitted(what, where=where, found=a_few_of(dense), fix=fix)


def did_you_mean(name: str, known: Iterable[str], *, count: int = 1) -> str:
    """` (did you mean 'epochs'?)`, or an empty string when nothing is alike."""
    names = nearest(name, known, count=count)
    return f" (did you mean {', '.join(repr(n) for n in names)}?)" if names else ""


def excluded_text(found: Mapping[str, Sequence[str]]) -> str:
    """Counts of excluded examples by fault, and a few names: `2 missing (a.mp3, b.mp3), 1 empty (c.mp3)`."""
    return ", ".join(
        f"{len(names):,} {fault} ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})"
        for fault, names in found.items()
    )
