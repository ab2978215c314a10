"""The comparison that every kernel's test and ACM_CHECK=1 rest on: what a kernel can lose is seen."""

import pytest
import torch

from acm_compiler.codegen.compare import TOLERANCE, relative_error, require_equal
from acm_compiler.errors import VerificationFailed

TOKENS, WIDTH, DEEP = 25216, 768, 12
LIMIT = TOLERANCE[torch.bfloat16]


@pytest.fixture(scope="module")
def answer():
    """Rows of a large call, exact and as a kernel rounds them."""
    exact = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    return exact.bfloat16(), exact


def of_all(y, expected):
    """One norm over everything, which is too little."""
    return float((y.double() - expected.double()).norm() / expected.double().norm())


def test_rounding_is_within_the_tolerance(answer):
    assert relative_error(*answer) <= LIMIT / 5


def test_three_tokens_of_zeros_are_seen(answer):
    y, exact = answer[0].clone(), answer[1]
    y[[7, 9000, 25000]] = 0
    assert of_all(y, exact) <= LIMIT < relative_error(y, exact)
    with pytest.raises(VerificationFailed, match="relative error 1"):
        require_equal(y, exact.bfloat16(), None)


@pytest.mark.parametrize("corner", [(0, 0), (12800, 640)])
def test_a_tile_that_lost_one_of_twelve_steps_is_seen(answer, corner):
    y, exact = answer[0].clone(), answer[1]
    tile = tuple(slice(start, start + 128) for start in corner)
    step = torch.randn(128, 128, generator=torch.Generator().manual_seed(2)) * DEEP**-0.5
    y[tile] = (exact[tile] - step).bfloat16()
    assert of_all(y, exact) <= LIMIT < relative_error(y, exact)


def test_what_is_not_finite_must_stand_in_the_same_places():
    expected = torch.randn(5, 3)
    expected[1, 1], expected[2, 0], expected[3, 2] = torch.nan, torch.inf, -torch.inf
    assert relative_error(expected.clone(), expected) == 0
    for place, value in (((1, 1), 0.0), ((2, 0), -torch.inf), ((3, 2), torch.nan), ((0, 0), torch.inf)):
        y = expected.clone()
        y[place] = value
        assert relative_error(y, expected) == float("inf")


def test_tokens_of_zeros_and_sums_that_cancel_and_no_tokens_are_compared():
    expected = torch.cat([torch.zeros(1, 40), 1e-9 * torch.ones(1, 40), torch.ones(8, 40)])
    assert relative_error(expected + 1e-9, expected) < 1e-7
    assert relative_error(torch.full((3, 4), 0.5), torch.zeros(3, 4)) > 0.5
    assert relative_error(torch.zeros(0, 4), torch.zeros(0, 4)) == 0
