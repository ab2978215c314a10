"""The inner products that all layers share: loops over the reduction axis with the loads that an architecture wants."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def multiply(a, b, acc, PRECISION: tl.constexpr, INTERPRET: tl.constexpr):
    """acc + a @ b.T in fp32."""
    if INTERPRET:  # the interpreter's dot takes bf16 for its bit pattern
        return tl.dot(a.to(tl.float32), tl.trans(b.to(tl.float32)), acc, input_precision="ieee")
    else:
        return tl.dot(a, tl.trans(b), acc, input_precision=PRECISION)


@triton.jit
def row_pointers(base, rows, stride, BK: tl.constexpr):
    """Pointers to the first BK elements of each row, [rows, BK]; int64."""
    return base + rows.to(tl.int64)[:, None] * stride + tl.arange(0, BK)[None, :]


@triton.jit
def load_block(source, pointers, row, k, length, DESCRIPTOR: tl.constexpr, EVEN: tl.constexpr, BK: tl.constexpr):
    """Elements [k, k + BK) of a block of rows, zeros beyond `length` (beyond the row, for a descriptor)."""
    if DESCRIPTOR:
        return source.load([row, k])
    elif EVEN:
        return tl.load(pointers + k)
    else:
        return tl.load(pointers + k, mask=((k + tl.arange(0, BK)) < length)[None, :], other=0.0)
