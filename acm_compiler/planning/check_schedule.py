"""The check, before any work is done, that the phases of a schedule can follow each other on the sites of a plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from acm_compiler.errors import LayoutUnknown, UsageError, counted, did_you_mean, require_fitted
from acm_compiler.planning.decisions import PlannedSite
from acm_compiler.recipe.phases import Phase


def check_phase(until: str | None, schedule: Sequence[Phase]) -> None:
    """Refuse an `until` that names no phase of the schedule. UsageError."""
    names = [config.phase for config in schedule]
    if until is not None and until not in names:
        raise UsageError(
            f"the schedule has no phase {until!r}{did_you_mean(until, names)}",
            expected=", ".join(names) or "none: the schedule is empty",
        )


def check_schedule(schedule: Sequence[Phase], sites: Iterable[PlannedSite], *, measured: bool = False) -> None:
    """Refuse a schedule of which a phase would fail on what those before it leave.

    sites: as they are when it starts. measured: whether the gates have a budget table then. Raises SitesNotFitted,
    UsageError and what calibrate refuses, each with the phase's place.
    """
    sites = list(sites)
    fitted = all(site.state == "learners" for site in sites)
    sliced = [site.name for site in sites if site.is_sliced and site.state == "learners"]
    for index, phase in enumerate(schedule):
        where = f"schedule[{index}], {phase.phase}"
        if phase.imitates:
            _refuse_slices(sites, sliced, where)
        elif not phase.closed_form and not fitted:
            dense = [site.name for site in sites if site.state == "dense"]
            require_fitted(dense, "the phase", where=where, fix="put a calibrate or a distill phase before it")
        elif phase.teaches_gates and sliced:
            raise _gates_of_slices(sliced, where)
        elif phase.needs_budgets and not measured:
            raise _unmeasured(where)
        elif phase.closed_form:
            for site in sites:
                check_closed_form(site)
            # of form auto, those that have a partner may become slices
            sliced = [s.name for s in sites if s.form == "slices" or (s.form == "auto" and s.pair is not None)]
        fitted = True
        measured = measured or not phase.imitates


def _refuse_slices(sites: Sequence[PlannedSite], sliced: Sequence[str], where: str) -> None:
    """Distill fits no slices, and has nothing to train where there is nothing else."""
    certain = [site.name for site in sites if site.is_sliced]
    if certain and certain[0] not in sliced:
        raise UsageError(
            f"{counted(len(certain), 'site')} must become slices, which calibrate alone can fit",
            where=where,
            found=certain[0],
            fix="put a calibrate phase before it, or say form: svd at these sites",
        )
    if certain and len(certain) == len(sites):
        raise UsageError(
            "all sites are slices in bases of their own, which the unmodified network cannot teach",
            where=where,
            fix="leave the phase out, or train by finetune with objective: distillation",
        )


def _gates_of_slices(sliced: Sequence[str], where: str) -> UsageError:
    return UsageError(
        f"{counted(len(sliced), 'site')} will or may become slices in calibrate: the unmodified network has no labels "
        "for the gates of a basis of their own",
        where=where,
        found=sliced[0],
        fix="leave the phase out, calibrate has fitted the gates; or say form: svd at these sites",
    )


def _unmeasured(where: str) -> UsageError:
    return UsageError(
        "budget_range and update: learners need gates that were measured",
        where=where,
        fix="put a calibrate or a gate phase before it",
    )


def check_closed_form(site: PlannedSite) -> None:
    """Refuse a site that has no closed form, before any work is done. UsageError, LayoutUnknown."""
    if site.learner_act != site.act:
        raise UsageError(
            "learners with an activation of their own have no closed form",
            where=site.name,
            found=site.learner_act,
            expected=site.act,
            fix="plan with activation: auto, or train the site by the distill and gate phases",
        )
    if site.layout is None:
        raise LayoutUnknown(
            "which tokens belong to which example is not known here, so budgets cannot be measured",
            where=site.name,
            fix="plan with one example, then give batches of one; or plan with example inputs the first of which has "
            "the batch as its first axis; or exclude the site",
        )
