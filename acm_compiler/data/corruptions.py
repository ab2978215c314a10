"""Corruptions of images at five severities, after the list of ImageNet-C, in a form that fits images of any size.

Each works on pixel values between the smallest and the largest of an image, and is a function of the image, its index
and the severity alone.

Shapes: B images, C channels, H x W pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from acm_compiler.data.draws import normal, uniform

SEVERITIES = (1, 2, 3, 4, 5)
_SEED = 2019


def _noise(x: Tensor, s: float, index: Sequence[int]) -> Tensor:
    return x + 0.08 * s * _drawn(normal, x, index)


def _speckle(x: Tensor, s: float, index: Sequence[int]) -> Tensor:
    return x + 0.15 * s * x * _drawn(normal, x, index)


def _impulse(x: Tensor, s: float, index: Sequence[int]) -> Tensor:
    draw = _drawn(uniform, x, index)
    return torch.where(draw < 0.02 * s, 0.0, torch.where(draw > 1 - 0.02 * s, 1.0, x))


def _blur(x: Tensor, s: float, index: Sequence[int]) -> Tensor:
    sigma = 0.012 * s * x.shape[-1]
    reach = max(1, math.ceil(2.5 * sigma))
    weights = torch.exp(-0.5 * (torch.arange(-reach, reach + 1, device=x.device) / sigma).square())
    weights = (weights / weights.sum()).expand(x.shape[1], 1, 1, -1)
    for kernel in (weights, weights.transpose(2, 3)):
        sides = (reach, reach, 0, 0) if kernel.shape[3] > 1 else (0, 0, reach, reach)
        x = F.conv2d(F.pad(x, sides, mode="replicate"), kernel, groups=x.shape[1])
    return x


def _contrast(x: Tensor, s: float, index: Sequence[int]) -> Tensor:
    mean = x.mean((1, 2, 3), keepdim=True)
    return mean + (x - mean) * (1 - 0.17 * s)


def _brightness(x: Tensor, s: float, index: Sequence[int]) -> Tensor:
    return x + 0.12 * s


def _haze(x: Tensor, s: float, index: Sequence[int]) -> Tensor:
    coarse = uniform(_SEED, index, 16).view(-1, 1, 4, 4).to(x)
    return x * (1 - 0.13 * s) + 0.13 * s * F.interpolate(coarse, size=x.shape[2:], mode="bicubic").clamp(0, 1)


def _occlusion(x: Tensor, s: float, index: Sequence[int]) -> Tensor:
    side = round(0.11 * s * min(x.shape[2:]))
    corner = uniform(_SEED, index, 2).to(x)
    rows, columns = (torch.arange(n, device=x.device) for n in x.shape[2:])
    top, left = ((c * (n - side)).round()[:, None] for c, n in zip(corner.T, x.shape[2:], strict=True))
    hidden = ((rows >= top) & (rows < top + side))[:, :, None] & ((columns >= left) & (columns < left + side))[:, None]
    return torch.where(hidden[:, None], 0.5, x)


def _pixelate(x: Tensor, s: float, index: Sequence[int]) -> Tensor:
    small = [max(1, round(n / (1 + 0.75 * s))) for n in x.shape[2:]]
    return F.interpolate(F.interpolate(x, size=small, mode="area"), size=x.shape[2:], mode="nearest")


def _rotation(x: Tensor, s: float, index: Sequence[int]) -> Tensor:
    sign = torch.where(uniform(_SEED, index, 1)[:, 0] < 0.5, -1.0, 1.0).to(x)
    angle = sign * math.radians(9 * s)
    rows = [torch.stack([angle.cos(), -angle.sin()], 1), torch.stack([angle.sin(), angle.cos()], 1)]
    turn = torch.cat([torch.stack(rows, 1), x.new_zeros(len(x), 2, 1)], 2)
    grid = F.affine_grid(turn, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, padding_mode="border", align_corners=False)


def _drawn(draw: Callable[..., Tensor], x: Tensor, index: Sequence[int]) -> Tensor:
    """Random numbers, the same for all channels of a pixel."""
    return draw(_SEED, index, x.shape[2] * x.shape[3]).view(len(x), 1, *x.shape[2:]).to(x)


KINDS: dict[str, Callable[[Tensor, float, Sequence[int]], Tensor]] = {
    "noise": _noise,
    "speckle": _speckle,
    "impulse": _impulse,
    "blur": _blur,
    "contrast": _contrast,
    "brightness": _brightness,
    "haze": _haze,
    "occlusion": _occlusion,
    "pixelate": _pixelate,
    "rotation": _rotation,
}


def corrupted(image_BCHW: Tensor, kind: str, severity: int, index: Sequence[int]) -> Tensor:
    """The images under one corruption, in their own range; `index` numbers them, for what is drawn."""
    low = image_BCHW.amin((1, 2, 3), keepdim=True)
    span = (image_BCHW.amax((1, 2, 3), keepdim=True) - low).clamp_min(1e-6)
    return low + span * KINDS[kind]((image_BCHW - low) / span, float(severity), index).clamp(0, 1)
