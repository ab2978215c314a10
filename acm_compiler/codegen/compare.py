"""Kernels against the reference: the tolerances, and the check that ACM_CHECK=1 runs on every call."""

from __future__ import annotations

import gc

import torch
from torch import Tensor

from acm_compiler.acm import ACM
from acm_compiler.errors import VerificationFailed

# largest relative norm of the error of a token's output
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def relative_error(y: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of `expected`, of all tokens together; NaN must stand in the same places."""
    if not torch.equal(y.isnan(), expected.isnan()):
        return float("inf")
    difference = (y.double() - expected.double()).nan_to_num(0).norm()
    size = expected.double().nan_to_num(0).norm()
    return float(difference / size) if size > 0 else float(difference)


def require_equal(y: Tensor, expected: Tensor, w_in: Tensor | None) -> None:
    """VerificationFailed, naming the ACM that `w_in` belongs to, when a kernel's answer is not the reference's."""
    error = relative_error(y, expected)
    if not error <= TOLERANCE[y.dtype]:
        raise VerificationFailed(
            "a kernel's answer differs from the reference",
            where=_owner(w_in),
            found=f"relative error {error:.1e}",
            expected=f"at most {TOLERANCE[y.dtype]:.0e}",
            fix="ACM_KERNEL=reference runs without kernels",
        )


def _owner(w_in: Tensor | None) -> str | None:
    """The name of the live ACM with these weights; only sought once something is wrong."""
    # not isinstance: that would ask dead weak proxies for their class
    acms = [obj for obj in gc.get_objects() if issubclass(type(obj), ACM)]
    names = [acm.name for acm in acms if w_in is not None and acm.learners.w_in.data_ptr() == w_in.data_ptr()]
    return names[0] if names else None
