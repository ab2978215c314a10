"""The models of the zoo, built, planned and rewritten once for all tests of a model."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy
import pytest
import torch
from torch import Tensor, nn

import acm_compiler as acm
from acm_compiler.passes.capture.graph import tensors
from acm_compiler.planning.plan import Plan
from acm_compiler.sources.inputs import call_model
from tests.zoo.catalogue import MODELS
from tests.zoo.entry import Inputs, Model

# one model for each way an ACM gets into a model; the default suite runs these
QUICK = {"W": "hf Llama", "T": "hf BERT", "S": "hf Whisper", "R": "torchvision Swin"}

_PLANS: dict[tuple[str, str], Plan] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model in eval mode with no parameter at its usual start (zero biases hide faults), and its plan."""

    entry: Model
    model: nn.Module
    inputs: Inputs
    plan: Plan


def built(name: str) -> tuple[nn.Module, Inputs]:
    """A new copy of the model, the same at every call."""
    torch.manual_seed(0)
    model, inputs = MODELS[name].build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval(), inputs


@functools.lru_cache(maxsize=2)
def case(name: str) -> Case:
    """The model called `name`; tests leave it as it is."""
    model, inputs = built(name)
    plan = _PLANS[name, "auto"] = _PLANS.get((name, "auto")) or acm.plan(model, inputs)
    return Case(entry=MODELS[name], model=model, inputs=inputs, plan=plan)


def plan_of(name: str, *, init: Literal["auto", "random"] = "auto") -> Plan:
    """The plan of the model called `name`, made once per session."""
    if (name, init) not in _PLANS:
        one = case(name)
        _PLANS[name, init] = one.plan if init == "auto" else acm.plan(one.model, one.inputs, init=init)
    return _PLANS[name, init]


def answers(model: nn.Module, inputs: Inputs, *, seed: int = 1) -> list[Tensor]:
    """Every tensor of floating point that the model gives; what it draws at random depends on `seed` alone."""
    torch.manual_seed(seed)
    numpy.random.seed(seed)  # some models mask their inputs by it
    return [tensor for tensor in tensors(call_model(model, inputs)) if tensor.is_floating_point()]


def assert_alike(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Equal to 1e-5 of the largest value, output by output."""
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()


def every(marker: str, names: Sequence[str]) -> list[Any]:
    """`names` as parameters of a test; all but the quick ones under `marker`."""
    marks = (getattr(pytest.mark, marker), pytest.mark.slow)
    return [pytest.param(name, marks=() if name in QUICK.values() else marks) for name in names]
