"""Fit every site's learners and gate from passes over the data."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from acm_compiler.acm import Gate
from acm_compiler.calibration.choose_gates import ScoredGate
from acm_compiler.calibration.damage import Judged, mean_trace
from acm_compiler.calibration.examples import Examples, Options
from acm_compiler.calibration.in_threads import in_threads
from acm_compiler.calibration.install import FittedSite
from acm_compiler.calibration.learners.candidates import Learned, Unit, choose_forms, learn, sharing, units, with_gates
from acm_compiler.calibration.learners.fit_learners import ENOUGH_TOKENS
from acm_compiler.calibration.learners.slices import Fit, fit_pairs
from acm_compiler.calibration.observe import PassTotals, observe, reading
from acm_compiler.calibration.records import SiteRecord
from acm_compiler.errors import TrainingFailed, a_few_of, counted
from acm_compiler.passes.rewrite.build_acm import fitted_learners
from acm_compiler.passes.rewrite.conversion import Rewritten
from acm_compiler.passes.rewrite.dense_region import DenseWeights
from acm_compiler.passes.rewrite.freed_memory import has_room
from acm_compiler.passes.rewrite.offload import let_go, trim
from acm_compiler.planning.decisions import PlannedSite
from acm_compiler.progress import Progress
from acm_compiler.runtime import ranks
from acm_compiler.sources.inputs import Example

Records = dict[str, SiteRecord]
# sites that see few tokens per example end the reading no later than at this many times the tokens asked for
_PATIENCE = 4
# bytes that the sample of a narrow site may take, where so many tokens fit that its gate profits
_SAMPLE_BYTES, _LARGEST_SAMPLE = 2**23, 4
_UNKNOWN = "nothing tells which sites matter, and expected damage is the mean squared change of a site's own output"
_NO_ANSWER = (
    "the model's answer is zero on all of the data, like that of a head which was never trained: "
    f"{_UNKNOWN}, summed over its tokens"
)
_NO_GRADIENT = (
    "the model's answer has no gradient, as if it were made under torch.no_grad() or detached: "
    f"{_UNKNOWN}, every token and direction alike"
)
# times as many bytes may be in files as in memory
_IN_FILES = 4
# float64 matrices of its width that fitting a site takes at once
_MATRICES = 10
# tokens of each site whose scores guess the first knobs
_SCORED = 2048


def fit_all(
    found: Rewritten, dense: Mapping[str, DenseWeights], examples: Examples, options: Options, progress: Progress
) -> list[FittedSite]:
    """Fit learners and gate of every site, in the plan's order; the model must be in eval mode.

    dense: as of `read_dense`.
    """
    planned = found.plan.sites
    groups = list(in_memory(planned, options))
    fitted: list[FittedSite] = []
    for number, group in enumerate(groups, start=1):
        records = {site.name: _record(site, dense, options) for site in group}
        seen = _read(found, examples, records, options, progress)
        _refuse_useless(seen, records)
        if number == 1 and not (seen.energy > 0 and seen.has_gradients):
            warnings.warn(_NO_GRADIENT if seen.energy > 0 else _NO_ANSWER, stacklevel=4)
        passes = f", pass {number} of {len(groups)}" if len(groups) > 1 else ""
        progress.finish(_amount_read(seen, records, options) + passes)
        progress.part("site", len(planned), done=len(fitted))
        fitted += _fit_group(found, records, examples, seen, options, progress)
        progress.finish(f"learners and gates of {len(fitted)} of {counted(len(planned), 'site')} fitted")
    order = {site.name: place for place, site in enumerate(planned)}
    fitted.sort(key=lambda fit: order[fit.site.name])
    _warn_of_few_tokens(planned, fitted)
    return fitted


def in_memory(planned: Sequence[PlannedSite], options: Options) -> Iterator[list[PlannedSite]]:
    """The sites in groups whose records fit the memory, or files, allowed, at least one (or one pair) each."""
    allowed = options.memory_bytes * (1 if options.offload in (None, "cpu") else _IN_FILES)
    group: list[PlannedSite] = []
    used = 0
    rarest = max(1, min(site.runs for site in planned))
    for unit in units(planned):
        size = 0
        for site in unit:
            # in examples like the planned one, all have seen enough tokens once the site that sees the fewest has
            tokens = math.ceil(options.tokens * min(max(1, site.runs / rarest), _PATIENCE))
            sample, shown = _sample(site, options), _shown(options)
            size += SiteRecord.size_bytes(site, tokens, sample, options.backward_passes, shown=shown)
        if group and used + size > allowed:
            yield group
            group, used = [], 0
        group += unit
        used += size
    yield group


def _record(site: PlannedSite, dense: Mapping[str, DenseWeights], options: Options) -> SiteRecord:
    # one seed: sites that read the same input sample the same tokens
    sample, shown = _sample(site, options), _shown(options)
    return SiteRecord(site, dense[site.name], sample=sample, seed=options.seed, shown=shown)


def _shown(options: Options) -> int:
    """Inputs kept of every MLP to train its learners on."""
    return min(options.local_tokens, options.tokens) if options.local_steps else 0


def _sample(site: PlannedSite, options: Options) -> int:
    """Tokens kept of `site` for its gate: those asked for, and up to four times as many of few features."""
    fits = _SAMPLE_BYTES // (4 * (site.d_in + 1))
    return max(options.sample, min(_LARGEST_SAMPLE * options.sample, fits))


def _read(found: Rewritten, examples: Examples, records: Records, options: Options, progress: Progress) -> PassTotals:
    """One pass; the first one decides how many batches all of them use."""

    def seen_all(tokens: int) -> bool:
        counts = [record.tokens for record in records.values()]
        return min(counts) >= tokens or max(counts) >= _PATIENCE * tokens

    def report(number: int) -> None:
        least = min(record.tokens for record in records.values())
        progress.advance(counted(number, "batch"), to=min(least, options.tokens))

    progress.part("token", options.tokens)
    batches: Iterator[Example] = (
        iter(examples.fitted) if examples.fitted else examples.read(lambda: seen_all(options.tokens))
    )
    with_gradients = options.gradient_tokens
    seen = observe(
        found,
        reading(batches, report),
        records,
        options,
        enough=lambda: with_gradients is not None and seen_all(with_gradients),
        apart=examples.apart,
    )
    for record in records.values():
        record.join()
    parts = ranks.gathered(seen)
    return PassTotals(
        examples=seen.examples,
        judged=sum(part.judged for part in parts),
        energy=sum(part.energy for part in parts),
        has_gradients=any(part.has_gradients for part in parts),
    )


def _refuse_useless(seen: PassTotals, records: Records) -> None:
    """Raise DataError where a site never ran, TrainingFailed where the model's answer is not finite."""
    for record in records.values():
        record.require_tokens()
    if not math.isfinite(seen.energy):
        raise TrainingFailed(
            "the model's answer is not finite on this data",
            found=f"a squared norm of {seen.energy}",
            fix="look for such values in the data and in the model's weights, or run it in a wider floating type; "
            "where they are meant, as in a mask of logits, give answer= that leaves them out",
        )


def _amount_read(seen: PassTotals, records: Records, options: Options) -> str:
    """Examples and tokens of a pass, as text."""
    tokens = [record.tokens for record in records.values()]
    least, most = min(tokens), max(tokens)
    each = counted(least, "token") if least == most else f"{least:,} to {counted(most, 'token')}"
    fewer = f", fewer than the {options.tokens:,} asked for," if most < options.tokens else ""
    return f"read {counted(seen.examples, 'example')}, {each}{fewer} at each of {counted(len(records), 'site')}"


def _fit_group(
    found: Rewritten, records: Records, examples: Examples, seen: PassTotals, options: Options, progress: Progress
) -> Iterator[FittedSite]:
    """The sites of one pass, one after the other; each record is dropped when it is used up."""
    trim(hold=has_room())
    elsewhere = mean_trace(records.values())
    inputs = _inputs(records)
    groups = list(units([record.site for record in records.values()]))
    pairs = [[records[site.name] for site in unit] for unit in groups if len(unit) == 2]
    judge = partial(_judge, inputs=inputs, elsewhere=elsewhere)
    judged = judge([record for pair in pairs for record in pair])
    slices = fit_pairs(found, pairs, judged, examples.fitted, options)
    pairs.clear()
    candidates: list[list[Unit]] = []
    like = {name: acm.learners.w_in for name, acm in found.acms.items()}
    neighbours = sharing(groups, inputs)
    workers = min(len(neighbours), _workers([record.site for record in records.values()], found, options))

    def fit(task: _Task) -> list[list[Unit]]:
        alone = [record for unit in task.parts for record in unit if record.site.name not in task.judged]
        known = task.judged | judge(alone)
        return with_gates([learn(unit, known, task.slices, options) for unit in task.parts], options, like=like)

    for offered in in_threads(fit, _tasks(neighbours, records, judged, slices), workers=workers):
        candidates += offered
        let_go(offered)
        trim()
        last = offered[-1][0][-1].site.name
        progress.advance(last, to=progress.done + sum(len(forms[0]) for forms in offered))
    inputs.clear()
    chosen = choose_forms(candidates)
    candidates.clear()
    for learned in [part for unit in chosen for part in unit]:
        yield _fitted(learned, seen, like=like[learned.site.name])
        let_go(learned)
        trim()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """Neighbouring units of sites and what is known of them, by name: the facts and the slices of those in pairs."""

    parts: list[list[SiteRecord]]
    judged: dict[str, Judged]
    slices: dict[str, Fit]


def _tasks(
    neighbours: Iterable[Sequence[Sequence[PlannedSite]]],
    records: Records,
    judged: dict[str, Judged],
    slices: dict[str, Fit],
) -> Iterator[_Task]:
    """The tasks of all sites; what each holds is held here no longer."""
    for groups in neighbours:
        names = [site.name for unit in groups for site in unit]
        yield _Task(
            parts=[[records.pop(site.name) for site in unit] for unit in groups],
            judged={name: judged.pop(name) for name in names if name in judged},
            slices={name: slices.pop(name) for name in names if name in slices},
        )


def _workers(planned: Sequence[PlannedSite], found: Rewritten, options: Options) -> int:
    """Number of tasks worked on at once: no more than there are threads, nor than memory holds beside statistics."""
    elsewhere = options.offload == "cpu" or any(acm.k_lo.device.type != "cpu" for acm in found.acms.values())
    if elsewhere or ranks.world() > 1 or not has_room():
        return 1
    widest = max(max(site.d_in, site.d_out, site.dense_width or 0) for site in planned)
    room = options.memory_bytes // (_MATRICES * 8 * widest**2)
    return max(1, min(torch.get_num_threads(), room))


def _judge(records: Sequence[SiteRecord], *, inputs: Mapping[str, Tensor], elsewhere: float) -> dict[str, Judged]:
    """The facts against which learners of these sites are judged, by site; they take as much room as the records."""
    return {record.site.name: Judged.of(record, inputs[record.site.name], elsewhere=elsewhere) for record in records}


def _inputs(records: Records) -> dict[str, Tensor]:
    """The sampled inputs of every site; one tensor for neighbours that read the same, as q, k and v do."""
    inputs: dict[str, Tensor] = {}
    last = None
    for name, record in records.items():
        own = record.sample.vectors
        last = inputs[name] = last if last is not None and torch.equal(last, own) else own
    return inputs


def _fitted(learned: Learned, seen: PassTotals, *, like: Tensor) -> FittedSite:
    # damage is a share of the squared norm of one example's output
    site, unit = learned.site, seen.judged / seen.energy if seen.energy > 0 else 1.0
    gates = [_in_units(gate, unit, learned.x_TD) for gate in (learned.gate, learned.evened_gate)]
    # one example's damage is the sum over its tokens
    per_example = unit * learned.tokens / seen.examples
    damage = tuple(float(value) * per_example for value in learned.damage_TC.cpu().numpy().mean(0, dtype=float))
    learners = fitted_learners(site, learned.weights, like=like)
    return FittedSite(site=site, learners=learners, gates=tuple(gates), damage=damage)


@torch.no_grad()
def _in_units(gate: Gate, unit: float, x_TD: Tensor) -> ScoredGate:
    """The gate with its damages times `unit`."""
    gate.outer.bias.add_(math.log(unit))
    return ScoredGate(gate=gate, scores=gate(x_TD[:_SCORED]).float())


def _warn_of_few_tokens(planned: Sequence[PlannedSite], fitted: Sequence[FittedSite]) -> None:
    given_up = [
        fit.site for site, fit in zip(planned, fitted, strict=True) if site.second_layer != fit.site.second_layer
    ]
    if given_up:
        widest, named = max(site.dense_width or 0 for site in given_up), a_few_of([site.name for site in given_up], 1)
        warnings.warn(
            f"too few tokens to refit the second layer of {counted(len(given_up), 'MLP site')} ({named}): "
            f"the original one is kept, which is worse below k = N; {ENOUGH_TOKENS * widest} tokens are the "
            f"minimum, {5 * widest} are enough",
            stacklevel=5,
        )
