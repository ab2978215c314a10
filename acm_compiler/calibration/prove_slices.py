"""Proof on the model itself that a change of basis changes no answer, before anything is left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from acm_compiler.acm import ACM, Learners
from acm_compiler.batch_context import batch as batch_context
from acm_compiler.calibration.examples import mask_in
from acm_compiler.calibration.outputs import Answer, answers, energy
from acm_compiler.conversion import sites
from acm_compiler.inputs import call_model
from acm_compiler.measure import Example, undisturbed

# relative error of the model's answer, by floating type
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def slices_error(model: nn.Module, learners: Mapping[str, Learners], example: Example, *, answer: Answer) -> float:
    """How far, relative to its size, the answer moves when these sites run all their slices and others are dense."""
    mask_BS = mask_in(example)
    with undisturbed(model), batch_context(model, mask=example[1]):
        with _trial(model, {}):
            wanted = answers(call_model(model, example[0]), answer, mask_BS)
        with _trial(model, learners):
            found = answers(call_model(model, example[0]), answer, mask_BS)
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


def _pass_on(acm: ACM, x: torch.Tensor, output: torch.Tensor) -> None:
    pass
