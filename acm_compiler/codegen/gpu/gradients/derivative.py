"""Derivatives of the activations, in fp32."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _softplus(x):
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _of_sigmoids(x, ACT: tl.constexpr):
    if ACT == "gelu_tanh":  # x * sigmoid(u(x))
        s = tl.sigmoid(x * (1.5957691216057308 + 0.07135481627272282 * x * x))
        return s + x * s * (1.0 - s) * (1.5957691216057308 + 0.21406444881816846 * x * x)
    elif ACT == "silu":
        s = tl.sigmoid(x)
        return s + x * s * (1.0 - s)
    elif ACT == "quick_gelu":
        s = tl.sigmoid(1.702 * x)
        return s + 1.702 * x * s * (1.0 - s)
    elif ACT == "tanh":
        t = 2.0 * tl.sigmoid(2.0 * x) - 1.0
        return 1.0 - t * t
    elif ACT == "sigmoid":
        s = tl.sigmoid(x)
        return s * (1.0 - s)
    elif ACT == "mish":
        t = 2.0 * tl.sigmoid(2.0 * _softplus(x)) - 1.0
        return t + x * (1.0 - t * t) * tl.sigmoid(x)
    else:
        tl.static_assert(ACT == "softplus", "an activation whose derivative no kernel knows")
        return tl.where(x > 20.0, 1.0, tl.sigmoid(x))


@triton.jit
def derive(x, ACT: tl.constexpr):
    """Derivative of ACT at an fp32 block; at a kink that of torch."""
    if ACT == "identity":
        return tl.full(x.shape, 1.0, tl.float32)
    elif ACT == "relu":
        return tl.where(x <= 0.0, 0.0, 1.0)
    elif ACT == "relu6":
        return tl.where((x <= 0.0) | (x >= 6.0), 0.0, 1.0)
    elif ACT == "relu2":
        return tl.where(x <= 0.0, 0.0, 2.0 * x)
    elif ACT == "gelu":
        return 0.5 + 0.5 * tl.erf(0.7071067811865476 * x) + 0.3989422804014327 * x * tl.exp(-0.5 * x * x)
    elif ACT == "elu":
        return tl.where(x > 0.0, 1.0, tl.exp(tl.minimum(x, 0.0)))
    elif ACT == "leaky_relu":
        return tl.where(x > 0.0, 1.0, 0.01)
    elif ACT == "hardswish":
        return tl.where(x <= -3.0, 0.0, tl.where(x < 3.0, x * (1.0 / 3.0) + 0.5, 1.0))
    else:
        return _of_sigmoids(x, ACT)
