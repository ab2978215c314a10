"""Gates trained to predict the log of every k's expected damage from a site's input."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import skip_init

from acm_compiler.acm import Gate
from acm_compiler.acm.precision import to_float64
from acm_compiler.passes.rewrite.offload import device_of
from acm_compiler.recipe.phases import half_cosine

_BATCH, _CLIP = 1024, 1.0
# a small sample is learned in fewer steps than were asked for: so many passes over it, but no fewer than so many steps
_PASSES, _FEWEST = 32, 50
# Adam moves every weight alike, so what a step does to a hidden unit grows with its inputs: the rate is _SPEED over
# their number, within bounds
_SPEED, _SLOWEST, _FASTEST = 1.5, 4e-3, 2e-2
# weights of the first layer, for inputs of spread 1, stay below this
_LARGEST = 8.0
# a token does no more to a step than if it did so many times the damage that is expected of it
_STEEPEST = 1e3
# damages far below a choice's mean are as good as none; also keeps the log finite where a choice is exact
_FLOOR, _FLOOR_OF_ALL = 1e-3, 1e-9


def fit_gates(gates: Sequence[Gate], x_TD: Tensor, damages: Sequence[Tensor], *, steps: int, seed: int) -> None:
    """Train gates that read the same input in place: exp(score of column c) becomes the mean damage of choice c given
    x; their rule "damage".

    x_TD: inputs of the site. damages: for every gate what each choice costs each token, [T, C], not negative. The
    likelihood is the gamma distribution's with a log link, whose minimum is the conditional mean whatever the noise of
    single tokens. Gates that are trained together become what each would alone: most of the time goes into reading x.
    """
    mean_D, spread_D = x_TD.mean(0), x_TD.std(0, unbiased=False)
    # what varies less than rounding does is constant: a class token before it has met another one
    # and the gate's own type, which may be float16, has to hold weights over it
    least = max(1e-9, _LARGEST / torch.finfo(gates[0].inner.weight.dtype).max)
    spread_D += torch.maximum(1e-3 * _rms(spread_D), 1e-4 * _rms(x_TD)).clamp_min(least)
    z_TD = ((x_TD - mean_D) / spread_D).float()
    students = [_Student(gate, damage_TC, seed) for gate, damage_TC in zip(gates, damages, strict=True)]
    steps = min(steps, max(_FEWEST, _PASSES * len(z_TD) // _BATCH))
    rate = min(max(_SPEED / x_TD.shape[1], _SLOWEST), _FASTEST)
    parameters = [parameter for student in students for parameter in student.gate.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=rate, fused=x_TD.device.type in ("cpu", "cuda"))
    with torch.enable_grad():
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = rate * half_cosine(step, steps)
            rows = torch.randint(len(z_TD), (_BATCH,), generator=students[0].generator, device="cpu").to(z_TD.device)
            optimizer.zero_grad()
            _losses(students, z_TD, rows).backward()
            for student in students:
                torch.nn.utils.clip_grad_norm_(student.gate.parameters(), _CLIP)
            optimizer.step()
    for student, gate in zip(students, gates, strict=True):
        student.write(gate, mean_D, spread_D)


class _Student:
    """A gate in fp32 for inputs of mean 0 and spread 1, and the damages that it learns, in units of their mean."""

    def __init__(self, gate: Gate, damage_TC: Tensor, seed: int) -> None:
        self.unit = damage_TC.mean().clamp_min(1e-30)
        self.target_TC = (damage_TC / self.unit).float()
        self.target_TC += _FLOOR * self.target_TC.mean(0) + _FLOOR_OF_ALL
        inner, kind = gate.inner, {"device": device_of(damage_TC), "dtype": torch.float32}
        self.gate = skip_init(Gate, inner.in_features, inner.out_features, damage_TC.shape[1], **kind)
        self.generator = torch.Generator().manual_seed(seed)
        self._start()

    @torch.no_grad()
    def _start(self) -> None:
        for layer, gain in ((self.gate.inner, 1.0), (self.gate.outer, 0.1)):
            bound = 1 / math.sqrt(layer.in_features)
            for tensor, scale in ((layer.weight, gain), (layer.bias, 1.0)):
                drawn = torch.rand(tensor.shape, generator=self.generator, dtype=tensor.dtype, device="cpu")
                tensor.copy_((2 * drawn - 1) * bound * scale)
        self.gate.outer.bias.copy_(self.target_TC.mean(0).log())

    @torch.no_grad()
    def write(self, gate: Gate, mean_D: Tensor, spread_D: Tensor) -> None:
        """Become `gate`, with the standardisation of its input in the first layer."""
        inner, outer = self.gate.inner, self.gate.outer
        weight = to_float64(inner.weight) / to_float64(spread_D)
        gate.inner.weight.copy_(weight)
        gate.inner.bias.copy_(to_float64(inner.bias) - weight @ to_float64(mean_D))
        gate.outer.weight.copy_(outer.weight)
        gate.outer.bias.copy_(outer.bias + self.unit.log())
        gate.rule = "damage"


def _losses(students: Sequence[_Student], z_TD: Tensor, rows: Tensor) -> Tensor:
    """The sum of all gates' losses on these rows: their first layers are run as one."""
    inners = [student.gate.inner for student in students]
    weight, bias = torch.cat([inner.weight for inner in inners]), torch.cat([inner.bias for inner in inners])
    hidden = F.gelu(F.linear(z_TD.index_select(0, rows), weight, bias)).split([i.out_features for i in inners], dim=1)
    pairs = zip(students, hidden, strict=True)
    return torch.stack([gamma_loss(s.gate.outer(h), s.target_TC.index_select(0, rows)) for s, h in pairs]).sum()


def _rms(values: Tensor) -> Tensor:
    return values.square().mean().sqrt()


def gamma_loss(score_TC: Tensor, damage_TC: Tensor) -> Tensor:
    """mean(e exp(-o) + o), least where exp(o) is the mean of e.

    Slopes of single terms are bounded for the first steps' sake: where e is far above exp(o), a straight line goes on.
    """
    excess_TC = F.relu(damage_TC.log() - score_TC - math.log(_STEEPEST))
    return (damage_TC * torch.exp(-score_TC - excess_TC) + _STEEPEST * excess_TC + score_TC).mean()
