"""A gate that predicts the log of the expected damage of every k from a site's input (QUALITY 3)."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.utils import skip_init

from acm_compiler.acm import Gate
from acm_compiler.float64 import to_float64

_BATCH, _CLIP = 1024, 1.0
# Adam moves every weight alike, so what a step does to a hidden unit grows with its inputs: the rate is _SPEED over
# their number, within bounds
_SPEED, _SLOWEST, _FASTEST = 1.5, 4e-3, 2e-2
# damages far below a choice's mean are as good as none; also keeps the log finite where a choice is exact
_FLOOR, _FLOOR_OF_ALL = 1e-3, 1e-9


def fit_gate(gate: Gate, x_TD: Tensor, damage_TC: Tensor, *, steps: int, seed: int) -> None:
    """Train `gate` in place: exp(score of column c) becomes the mean damage of choice c given x; its rule "damage".

    x_TD: inputs of the site. damage_TC: what each choice costs each token, not negative. The likelihood is the gamma
    distribution's with a log link, whose minimum is the conditional mean whatever the noise of single tokens.
    """
    mean_D, spread_D = x_TD.mean(0), x_TD.std(0, unbiased=False)
    # what varies less than rounding does is constant: a class token before it has met another one
    spread_D += torch.maximum(1e-3 * _rms(spread_D), 1e-4 * _rms(x_TD)).clamp_min(1e-9)
    z_TD = ((x_TD - mean_D) / spread_D).float()
    unit = damage_TC.mean().clamp_min(1e-30)
    target_TC = (damage_TC / unit).float()
    target_TC += _FLOOR * target_TC.mean(0) + _FLOOR_OF_ALL
    student = skip_init(Gate, x_TD.shape[1], gate.inner.out_features, damage_TC.shape[1], device=x_TD.device)
    generator = torch.Generator().manual_seed(seed)
    _start(student, target_TC, generator)
    rate = min(max(_SPEED / x_TD.shape[1], _SLOWEST), _FASTEST)
    optimizer = torch.optim.Adam(student.parameters(), lr=rate, fused=x_TD.device.type in ("cpu", "cuda"))
    with torch.enable_grad():
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = rate / 2 * (1 + math.cos(math.pi * step / steps))
            rows = torch.randint(len(z_TD), (_BATCH,), generator=generator).to(z_TD.device)
            optimizer.zero_grad()
            gamma_loss(student(z_TD[rows]), target_TC[rows]).backward()
            torch.nn.utils.clip_grad_norm_(student.parameters(), _CLIP)
            optimizer.step()
    with torch.no_grad():
        student.outer.bias.add_(unit.log())
    _fold(student, gate, mean_D, spread_D)
    gate.rule = "damage"


def _rms(values: Tensor) -> Tensor:
    return values.square().mean().sqrt()


def gamma_loss(score_TC: Tensor, damage_TC: Tensor) -> Tensor:
    """mean(e exp(-o) + o), least where exp(o) is the mean of e; single terms are bounded for the first steps' sake."""
    return ((damage_TC * torch.exp(-score_TC)).clamp(max=1e3) + score_TC).mean()


@torch.no_grad()
def _start(student: Gate, target_TC: Tensor, generator: torch.Generator) -> None:
    for layer, gain in ((student.inner, 1.0), (student.outer, 0.1)):
        bound = 1 / math.sqrt(layer.in_features)
        for tensor, scale in ((layer.weight, gain), (layer.bias, 1.0)):
            drawn = torch.rand(tensor.shape, generator=generator)
            tensor.copy_((2 * drawn - 1) * bound * scale)
    student.outer.bias.copy_(target_TC.mean(0).log())


@torch.no_grad()
def _fold(student: Gate, gate: Gate, mean_D: Tensor, spread_D: Tensor) -> None:
    """Write the student into `gate`, with the standardisation of its input in the first layer."""
    weight = to_float64(student.inner.weight) / to_float64(spread_D)
    gate.inner.weight.copy_(weight)
    gate.inner.bias.copy_(to_float64(student.inner.bias) - weight @ to_float64(mean_D))
    gate.outer.weight.copy_(student.outer.weight)
    gate.outer.bias.copy_(student.outer.bias)
