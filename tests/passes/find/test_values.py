"""Parts of a parameter that two readers share, and the vectors of a tensor."""

import pytest

from acm_compiler.passes.find.values import Read, tokens_of
from acm_compiler.passes.find.weight_views import WeightView
from acm_compiler.site import LinearRef


@pytest.mark.parametrize(("shape", "expected"), [((2, 5, 8), 10), ((8,), 1), ((0, 8), 0)])
def test_tokens_are_all_axes_but_the_last(shape, expected):
    assert tokens_of(shape) == expected


@pytest.mark.parametrize(
    ("rows", "transposed", "span", "expected"),
    [
        ((0, 8), False, (8, 16), False),
        ((0, 9), False, (8, 16), True),
        ((16, 24), False, (8, 16), False),
        ((15, 24), False, (8, 16), True),
        (None, False, (8, 16), True),  # all rows
    ],
)
def test_rows_overlap_where_both_have_one(rows, transposed, span, expected):
    view = view_of(axis=0, span=span)
    ref = LinearRef(weight="w", bias=None, transposed=transposed, rows=rows)
    assert Read(reader="r", view=view).overlaps(ref) is expected


def test_rows_of_a_transposed_weight_are_its_columns():
    ref = LinearRef(weight="w", bias=None, transposed=True, rows=(0, 8))
    assert Read(reader="r", view=view_of(axis=1, span=(4, 6))).overlaps(ref)
    assert not Read(reader="r", view=view_of(axis=1, span=(8, 12))).overlaps(ref)
    assert Read(reader="r", view=view_of(axis=0, span=(8, 12))).overlaps(ref)  # a part of every column


def view_of(*, axis, span):
    """A part of a matrix [24, 12] along one axis."""
    return WeightView.whole("w", (24, 12)).sliced(axis, *span)
