"""Activations inside kernel epilogues, in fp32, and their derivatives: few instructions where results are of 16 bits.

INTERPRET selects plain formulas in place of the approximate instructions of the GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

INTERPRETED = bool(knobs.runtime.interpret)
"""True if kernels run in Triton's interpreter in this process."""


@triton.jit
def _tanh(x, INTERPRET: tl.constexpr):
    if INTERPRET:
        return 2.0 * tl.sigmoid(2.0 * x) - 1.0
    else:
        return tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f, f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _reciprocal(x, INTERPRET: tl.constexpr):
    if INTERPRET:
        return 1.0 / x
    else:
        asm: tl.constexpr = "rcp.approx.ftz.f32 $0, $1;"
        return tl.inline_asm_elementwise(asm, "=f, f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _exp2(x, INTERPRET: tl.constexpr):
    """2^x, zero below 2^-126."""
    if INTERPRET:
        return tl.exp2(x)
    else:
        asm: tl.constexpr = "ex2.approx.ftz.f32 $0, $1;"
        return tl.inline_asm_elementwise(asm, "=f, f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _half_logit(x):
    """Half the logit of Phi(x), its tanh being 2 Phi(x) - 1: fitted on |x| <= 8; beyond, the clamp keeps it rising."""
    s = tl.minimum(x * x, 64.0)
    return x * (0.7975072370084152 + s * (0.03700623506684452 + s * -0.0003516124737655334))


@triton.jit
def gelu(x, SHORT: tl.constexpr, INTERPRET: tl.constexpr):
    """x * Phi(x). SHORT: off by less than 3e-5 (results in bf16); else by less than 1e-6."""
    if SHORT:
        v = 0.5 * x
        return v * _tanh(_half_logit(x), INTERPRET) + v
    else:
        # Abramowitz & Stegun 7.1.28 for erfc(|x| / sqrt 2), the coefficients divided by powers of sqrt 2
        t = tl.abs(x)
        p = 5.382975e-06 * t + 4.889063566e-05
        p = p * t + 3.800357500e-05
        p = p * t + 3.2776263e-03
        p = p * t + 2.11410061e-02
        p = p * t + 4.98673470e-02
        p = p * t + 1.0
        p = p * p
        p = p * p
        p = p * p
        return tl.maximum(x, 0.0) - 0.5 * t * _reciprocal(p * p, INTERPRET)


@triton.jit
def _sigmoid(x, SHORT: tl.constexpr, INTERPRET: tl.constexpr):
    if SHORT:
        return 0.5 * _tanh(0.5 * x, INTERPRET) + 0.5
    else:
        return tl.sigmoid(x)


@triton.jit
def _softplus(x):
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _tanh_family(x, ACT: tl.constexpr, SHORT: tl.constexpr, INTERPRET: tl.constexpr):
    if ACT == "gelu":
        return gelu(x, SHORT, INTERPRET)
    elif ACT == "gelu_tanh":
        return x * _sigmoid(x * (1.5957691216057308 + 0.07135481627272282 * x * x), SHORT, INTERPRET)
    elif ACT == "silu":
        return x * _sigmoid(x, SHORT, INTERPRET)
    elif ACT == "quick_gelu":
        return x * _sigmoid(1.702 * x, SHORT, INTERPRET)
    elif ACT == "tanh":
        return 2.0 * _sigmoid(2.0 * x, SHORT, INTERPRET) - 1.0
    elif ACT == "sigmoid":
        return _sigmoid(x, SHORT, INTERPRET)
    elif ACT == "mish":
        return x * (2.0 * _sigmoid(2.0 * _softplus(x), SHORT, INTERPRET) - 1.0)
    else:
        tl.static_assert(ACT == "softplus", "an activation that no kernel knows")
        return tl.where(x > 20.0, x, _softplus(x))


@triton.jit
def activate(x, ACT: tl.constexpr, SHORT: tl.constexpr, INTERPRET: tl.constexpr):
    """ACT of an fp32 block; ACT is one of site.ACTIVATIONS."""
    if ACT == "identity":
        return x
    elif ACT == "relu":
        return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACT == "relu6":
        return tl.minimum(tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL), 6.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACT == "relu2":
        return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) * tl.maximum(x, 0.0)
    elif ACT == "elu":
        return tl.where(x > 0.0, x, tl.exp(tl.minimum(x, 0.0)) - 1.0)
    elif ACT == "leaky_relu":
        return tl.where(x > 0.0, x, 0.01 * x)
    elif ACT == "hardswish":
        return x * tl.minimum(tl.maximum(x + 3.0, 0.0), 6.0) * (1.0 / 6.0)
    else:
        return _tanh_family(x, ACT, SHORT, INTERPRET)


@triton.jit
def _derive_gelu(x, SHORT: tl.constexpr, INTERPRET: tl.constexpr):
    """Phi(x) + x phi(x). SHORT: Phi as in `gelu`."""
    cumulative = 0.5 * _tanh(_half_logit(x), INTERPRET) + 0.5 if SHORT else 0.5 + 0.5 * tl.erf(0.7071067811865476 * x)
    return cumulative + x * _exp2(x * x * -0.7213475204444817 - 1.3257480647361593, INTERPRET)


@triton.jit
def _derive_tanh_family(x, ACT: tl.constexpr, SHORT: tl.constexpr, INTERPRET: tl.constexpr):
    if ACT == "gelu":
        return _derive_gelu(x, SHORT, INTERPRET)
    elif ACT == "gelu_tanh":  # x * sigmoid(u(x))
        s = _sigmoid(x * (1.5957691216057308 + 0.07135481627272282 * x * x), SHORT, INTERPRET)
        return s + x * s * (1.0 - s) * (1.5957691216057308 + 0.21406444881816846 * x * x)
    elif ACT == "silu":
        s = _sigmoid(x, SHORT, INTERPRET)
        return s + x * s * (1.0 - s)
    elif ACT == "quick_gelu":
        s = _sigmoid(1.702 * x, SHORT, INTERPRET)
        return s + 1.702 * x * s * (1.0 - s)
    elif ACT == "tanh":
        t = 2.0 * _sigmoid(2.0 * x, SHORT, INTERPRET) - 1.0
        return 1.0 - t * t
    elif ACT == "sigmoid":
        s = _sigmoid(x, SHORT, INTERPRET)
        return s * (1.0 - s)
    elif ACT == "mish":
        t = 2.0 * _sigmoid(2.0 * _softplus(x), SHORT, INTERPRET) - 1.0
        return t + x * (1.0 - t * t) * _sigmoid(x, SHORT, INTERPRET)
    else:
        tl.static_assert(ACT == "softplus", "an activation whose derivative no kernel knows")
        return tl.where(x > 20.0, 1.0, _sigmoid(x, SHORT, INTERPRET))


@triton.jit
def derive(x, ACT: tl.constexpr, SHORT: tl.constexpr, INTERPRET: tl.constexpr):
    """Derivative of ACT at an fp32 block; at a kink that of torch."""
    if ACT == "identity":
        return tl.full(x.shape, 1.0, tl.float32)
    elif ACT == "relu":
        return tl.where(x <= 0.0, 0.0, 1.0)
    elif ACT == "relu6":
        return tl.where((x <= 0.0) | (x >= 6.0), 0.0, 1.0)
    elif ACT == "relu2":
        return tl.where(x <= 0.0, 0.0, 2.0 * x)
    elif ACT == "elu":
        return tl.where(x > 0.0, 1.0, tl.exp(tl.minimum(x, 0.0)))
    elif ACT == "leaky_relu":
        return tl.where(x > 0.0, 1.0, 0.01)
    elif ACT == "hardswish":
        return tl.where(x <= -3.0, 0.0, tl.where(x < 3.0, x * (1.0 / 3.0) + 0.5, 1.0))
    else:
        return _derive_tanh_family(x, ACT, SHORT, INTERPRET)
