"""Device functions shared by both layers: tiles decoded from the counts of the dispatch, inner products, build options.

Tokens are sorted by k, descending, so the tokens that run learner n are a prefix of the order and
c_n = #{tokens with k >= n} are all there is to know. Band q holds the tiles of tokens whose k is q; a tile that
straddles two k belongs to the larger (unless OWN: then both bands visit it, each for its own rows).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_band(
    tile, counts, Q_HI: tl.constexpr, Q_LO: tl.constexpr, N: tl.constexpr, PER_K: tl.constexpr,
    FIXED: tl.constexpr, OWN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Locate a tile: (q, index inside the band, first row tile, row tiles, column tiles, lo, hi, all tiles).

    Bands run from Q_HI down to Q_LO and are PER_K * q + FIXED columns wide. Rows [lo, hi) may be written.
    """
    above = 0
    if Q_HI < N:
        above = tl.load(counts + Q_HI + 1)
    lo_ = above
    hi_ = tl.load(counts + Q_LO)
    covered = above // BM
    start, q_, local, first, rows_, columns_ = 0, 0, 0, 0, 1, 1
    for i in tl.static_range(Q_HI - Q_LO + 1):
        c = tl.load(counts + (Q_HI - i))
        if OWN:
            covered = above // BM
        end = tl.where(c > above, (c + BM - 1) // BM, covered)
        columns = ((Q_HI - i) * PER_K + FIXED + BN - 1) // BN
        size = (end - covered) * columns
        inside = (tile >= start) & (tile < start + size)
        q_ = tl.where(inside, Q_HI - i, q_)
        local = tl.where(inside, tile - start, local)
        first = tl.where(inside, covered, first)
        rows_ = tl.where(inside, end - covered, rows_)
        columns_ = tl.where(inside, columns, columns_)
        if OWN:
            lo_ = tl.where(inside, above, lo_)
            hi_ = tl.where(inside, c, hi_)
        start += size
        covered = end
        above = c
    return q_, local, first, rows_, columns_, lo_, hi_, start


@triton.jit
def raster(local, rows, columns, GROUP: tl.constexpr):
    """(row tile, column tile) of a band's tile: GROUP row tiles at a time, so that weights stay in the cache."""
    width = GROUP * columns
    group = local // width
    height = tl.minimum(rows - group * GROUP, GROUP)
    rest = local - group * width
    return group * GROUP + rest % height, rest // height


@triton.jit
def k_of_rows(rows, counts, N: tl.constexpr):
    """k of sorted rows, int32: how many of the counts lie above each."""
    k = (rows < tl.load(counts + 1)).to(tl.int32)
    for n in tl.static_range(2, N + 1):
        k += (rows < tl.load(counts + n)).to(tl.int32)
    return k


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


@triton.jit
def load_rows(
    source, first, end, n0, stride, WIDTH, CUT: tl.constexpr, DESCRIPTOR: tl.constexpr, BK: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Rows from `first` on and columns from n0 on, [BK, BN], zeros beyond WIDTH; CUT: also from row `end` on."""
    rows = first + tl.arange(0, BK)
    if DESCRIPTOR:
        block = source.load([first, n0])
        if CUT:
            block = tl.where((rows < end)[:, None], block, 0.0)
    else:
        columns = n0 + tl.arange(0, BN)
        mask = (columns < WIDTH)[None, :]
        if CUT:
            mask = mask & (rows < end)[:, None]
        block = tl.load(source + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=mask, other=0.0)
    return block


@triton.jit
def load_weights(
    w, pointers, n0, k, length, stride, WIDTH, TURNED: tl.constexpr, DESCRIPTOR: tl.constexpr, EVEN: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Weights of outputs from n0 on and of inputs [k, k + BK), [BN, BK]; TURNED: w is [inputs, WIDTH outputs].

    What lies beyond `length` is zero if it is read by pointers, and else as `load_block` has it.
    """
    if TURNED:
        return tl.trans(load_rows(w, k, length, n0, stride, WIDTH, not (EVEN or DESCRIPTOR), DESCRIPTOR, BK, BN))
    else:
        return load_block(w, pointers, n0, k, length, DESCRIPTOR, EVEN, BK)


def kernel_options(*, warps: int, stages: int | None = None) -> dict[str, int]:
    """Options of a launch or a build; `stages` of the pipeline, None for Triton's own number.

    Multiplications and additions are fused, whatever Triton's default is: it is to change with 3.10.
    """
    options = {"num_warps": warps, "enable_fp_fusion": True}
    return options if stages is None else options | {"num_stages": stages}
