"""Proof on the model itself that a change of basis changes no answer, before anything is left out."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from acm_compiler.acm import ACM, Learners
from acm_compiler.calibration.examples import mask_in
from acm_compiler.calibration.fit_learners import as_module
from acm_compiler.calibration.outputs import Answer, answers, energy
from acm_compiler.calibration.slices import Fit
from acm_compiler.inputs import call_model
from acm_compiler.passes.rewrite.conversion import sites
from acm_compiler.runtime.batch_context import batch as batch_context
from acm_compiler.runtime.measure_budgets import Example, undisturbed

_LOG = logging.getLogger(__name__)
# relative error of the model's answer, by floating type
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def proven(model: nn.Module, pairs: Sequence[Sequence[Fit]], example: Example, *, answer: Answer) -> list[bool]:
    """Which pairs leave the answer as it is; the others are told in the log.

    All pairs run all their slices in one forward. Only where that moves the answer is every pair tried alone.
    """
    acms = sites(model)
    tolerances = [_TOLERANCE[acms[pair[0].site.name].learners.w_in.dtype] for pair in pairs]
    learners = [
        {part.site.name: as_module(part.weights, part.site, acms[part.site.name].learners.w_in) for part in pair}
        for pair in pairs
    ]
    mask_BS = mask_in(model, example)
    wanted = _answers(model, {}, example, answer)
    everywhere = {name: module for pair in learners for name, module in pair.items()}
    if _moved(wanted, _answers(model, everywhere, example, answer), mask_BS) <= min(tolerances):
        return [True] * len(pairs)
    hold = []
    for pair, tolerance in zip(learners, tolerances, strict=True):
        error = _moved(wanted, _answers(model, pair, example, answer), mask_BS)
        hold.append(error <= tolerance)
        if not hold[-1]:
            _LOG.info("%s: not sliced, a change of basis moves the model's answer by %.1e", " and ".join(pair), error)
    return hold


def _answers(model: nn.Module, learners: Mapping[str, Learners], example: Example, answer: Answer) -> list[Tensor]:
    """The model's answer when these sites run all their slices and others are dense."""
    with undisturbed(model), batch_context(model, mask=example[1]), _trial(model, learners):
        return answers(call_model(model, example[0]), answer, mask_in(model, example))


def _moved(wanted: list[Tensor], found: list[Tensor], mask_BS: Tensor | None) -> float:
    """The size of the difference over that of the answer; padding left out."""
    moved = energy([f - w for f, w in zip(found, wanted, strict=True)], mask_BS)
    return (moved / max(energy(wanted, mask_BS), 1e-300)) ** 0.5


@contextmanager
def _trial(model: nn.Module, learners: Mapping[str, Learners]) -> Iterator[None]:
    """While open, the named sites run all of these learners, and all others their dense regions."""
    acms = sites(model)
    before = {name: (acm.learners, acm.state, acm.tap) for name, acm in acms.items()}
    try:
        for name, acm in acms.items():
            if name in learners:
                acm.learners, acm.state, acm.tap = learners[name], "learners", None
                acm.set_choices(knob=0.0, k_lo=acm.count, k_hi=acm.count)
            else:
                acm.tap = _pass_on
        yield
    finally:
        for name, acm in acms.items():
            acm.learners, acm.state, acm.tap = before[name]


def _pass_on(acm: ACM, x: Tensor, output: Tensor) -> None:
    pass
