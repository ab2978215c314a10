"""Rounding by moments: the error it makes small, against nearest values and every choice of integers, in float64."""

from itertools import product

import pytest
import torch

from acm_compiler.acm.quantized import int4
from acm_compiler.acm.quantized.int4 import Grids
from acm_compiler.calibration.quantized.rounding import damped, error, round_rows


def moments(columns: int, seed: int = 0) -> torch.Tensor:
    """Second moments of correlated vectors, some columns much larger than others; float64."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns, generator=generator, dtype=torch.float64)
    sizes = torch.logspace(-1, 1, columns, dtype=torch.float64)
    return damped((mix * sizes).T @ (mix * sizes) / columns)


def nearest(w: torch.Tensor, parts: int = 1) -> torch.Tensor:
    return int4.dequantize_weight(*int4.quantize_weight(w, parts=parts), parts=parts).double()


@pytest.mark.parametrize(("columns", "parts"), [(2, 1), (34, 1), (96, 1), (120, 3), (64, 2)])
def test_no_row_errs_by_more_than_its_nearest_values_and_most_by_far_less(columns, parts):
    torch.manual_seed(columns)
    w, c = torch.randn(40, columns, dtype=torch.float64), moments(columns)
    made = round_rows(w, c, parts=parts)
    off = w - nearest(w, parts)
    plain = torch.linalg.vecdot(off @ c, off)
    ours = error(w, made, c)
    assert (ours <= plain * (1 + 1e-6)).all()
    assert ours.sum() < (0.5 if columns > 2 else 1) * plain.sum()
    values, scales = int4.pack(made.q, made.grids)
    stored = int4.dequantize_weight(values, scales, parts=parts).double()
    torch.testing.assert_close(stored, made.floats, rtol=1e-6, atol=1e-6)


def test_integers_are_close_to_the_best_of_all():
    torch.manual_seed(0)
    w, c = torch.randn(12, 4, dtype=torch.float64), moments(4)
    made = round_rows(w, c)
    best = torch.full((12,), torch.inf, dtype=torch.float64)
    every = torch.tensor(list(product(range(16), repeat=4)), dtype=torch.float64)
    for row in range(12):
        grid = Grids(*(t[row] for t in made.grids))
        off = w[row] - grid.floats(every[:, None])[:, 0]
        best[row] = torch.linalg.vecdot(off @ c, off).min()
    ours = error(w, made, c)
    assert (ours >= best * (1 - 1e-9)).all() and ours.sum() < 1.5 * best.sum()


def test_columns_that_do_not_go_together_get_their_nearest_values():
    torch.manual_seed(0)
    w, c = torch.randn(9, 64, dtype=torch.float64), torch.diag(torch.rand(64, dtype=torch.float64) + 0.1)
    made = round_rows(w, c)
    for at, (a, b) in enumerate(made.bounds):
        grid = Grids(*(t[:, at] for t in made.grids))
        moved = (grid.nearest(w[:, a:b]) - made.q[:, a:b]).abs()
        # a grid that is fitted last may leave a value at the other side of the middle
        assert moved.max() <= 1 and moved.mean() < 0.05


def test_what_was_4_bits_before_is_kept():
    torch.manual_seed(0)
    q = torch.randint(0, 16, (5, 3, 32))
    q[..., 0], q[..., 1] = 0, 15
    scale, least = torch.rand(5, 3, 1).half() + 0.01, torch.randn(5, 3, 1).half()
    w = (q * scale.double() + least.double()).flatten(1)
    torch.testing.assert_close(round_rows(w, moments(96)).floats, w, rtol=0, atol=2e-3)


@pytest.mark.parametrize("c", [torch.zeros(40, 40), torch.ones(40, 40)], ids=["none", "one direction"])
def test_moments_of_few_directions_do(c):
    w = torch.randn(6, 40, dtype=torch.float64)
    made = round_rows(w, damped(c.double()))
    assert made.floats.isfinite().all() and (made.floats - w).abs().max() < 4


def test_rounding_is_the_same_every_time():
    w, c = torch.randn(6, 40, dtype=torch.float64), moments(40)
    assert torch.equal(round_rows(w, c).floats, round_rows(w, c).floats)
