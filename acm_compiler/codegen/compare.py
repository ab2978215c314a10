"""Kernels against the reference: the tolerances, and the check that ACM_CHECK=1 runs on every call."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from acm_compiler.acm import ACM
from acm_compiler.acm.ops import REFERENCE
from acm_compiler.errors import VerificationFailed

TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Largest `relative_error` of a kernel's output."""
INT8_TOLERANCE = 5e-3
"""The same for quantised learners: a hidden value between two integers may become the other one."""
_BLOCK = 128  # of the kernels' largest tiles
_LEAST = 0.1  # a part with a smaller share of the median part's norm may be a sum of large numbers that cancel


class Errors(NamedTuple):
    """The largest relative errors of an output: of a token, of a block of 128 x 128 values, and of all of it."""

    token: float
    block: float
    whole: float


def relative_errors(y: Tensor, expected: Tensor) -> Errors:
    """The largest relative error of `y` [..., O] in each kind of part.

    The norm of a part's difference over the norm of `expected` there, or over a tenth of that of the median part where
    this is more. NaN and infinities must stand in the same places; else infinity.
    """
    y, expected = (values.double().reshape(-1, values.shape[-1]) for values in (y, expected))
    odd = ~(y.isfinite() & expected.isfinite())
    if not torch.allclose(y[odd], expected[odd], equal_nan=True):
        return Errors(*[float("inf")] * 3)
    lost, size = ((values.masked_fill(odd, 0)).square() for values in (y - expected, expected))
    return Errors(
        _largest(lost.sum(1), size.sum(1)), _largest(_by_block(lost), _by_block(size)), _largest(lost.sum(), size.sum())
    )


def relative_error(y: Tensor, expected: Tensor) -> float:
    """The largest of `relative_errors`."""
    return max(relative_errors(y, expected))


def _by_block(squares_TO: Tensor) -> Tensor:
    rows, columns = squares_TO.shape
    whole = F.pad(squares_TO, (0, -columns % _BLOCK, 0, -rows % _BLOCK))
    return whole.unflatten(1, (-1, _BLOCK)).unflatten(0, (-1, _BLOCK)).sum((1, 3)).flatten()


def _largest(lost: Tensor, size: Tensor) -> float:
    """The largest root of a ratio of sums of squares; of the sum itself where there is nothing to compare it with."""
    if not size.numel():
        return 0.0
    size = size.clamp(min=_LEAST**2 * size.median())
    return float(torch.where(size > 0, lost / size, lost).max().sqrt())


def require_equal(y: Tensor, expected: Tensor, w_in: Tensor | None) -> None:
    """VerificationFailed, naming the ACM that `w_in` belongs to, when a kernel's output is not the reference's."""
    error, limit = relative_error(y, expected), TOLERANCE[y.dtype]
    if w_in is not None and w_in.dtype in (torch.int8, torch.uint8):
        limit = max(limit, INT8_TOLERANCE)
    if not error <= limit:
        raise VerificationFailed(
            "a kernel's output differs from the reference",
            where=_owner(w_in),
            found=f"relative error {error:.1e}",
            expected=f"at most {limit:.0e}",
            fix="ACM_KERNEL=reference runs without kernels",
        )


def checked(learners: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A kernel of `acm::learners` whose output is compared with the reference's at every call (ACM_CHECK=1)."""

    def run(x: Tensor, k: Tensor, w_in: Tensor, *tensors: Tensor | None, form: str, act: str) -> Tensor:
        y = learners(x, k, w_in, *tensors, form=form, act=act)
        require_equal(y, REFERENCE(x, k, w_in, *tensors, form=form, act=act), w_in)
        return y

    return run


def _owner(w_in: Tensor | None) -> str | None:
    """The name of the live ACM with these weights; only sought once something is wrong."""
    # not isinstance: that would ask dead weak proxies for their class
    acms = [obj for obj in gc.get_objects() if issubclass(type(obj), ACM)]
    names = [acm.name for acm in acms if w_in is not None and acm.learners.w_in.data_ptr() == w_in.data_ptr()]
    return names[0] if names else None
