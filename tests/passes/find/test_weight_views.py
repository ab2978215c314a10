"""Views of parameters: the rows that a linear multiplies by, as torch's own indexing gives them."""

import pytest
import torch
from torch import fx

from acm_compiler.passes.find.weight_views import WeightView, linear_ref, part_spans, taken, view_of

ROWS, COLUMNS = 12, 5


def called(op: str, *args, **kwargs) -> fx.Node:
    """A call of an operation on a parameter."""
    graph = fx.Graph()
    return graph.call_method(op, (graph.placeholder("w"), *args), kwargs)


def read(view: WeightView, parameter: torch.Tensor) -> torch.Tensor:
    """The entries of the parameter that a view shows."""
    spans = {axis: slice(*span) for axis, span in zip(view.axes, view.spans, strict=True)}
    return parameter[tuple(spans[axis] for axis in range(parameter.dim()))].permute(view.axes)


@pytest.mark.parametrize(
    ("op", "args", "kwargs"),
    [
        ("t", (), {}),
        ("transpose", (0, 1), {}),
        ("permute", (1, 0), {}),
        ("permute", ((-1, 0),), {}),
        ("narrow", (0, 3, 4), {}),
        ("narrow", (), {"dim": 1, "start": 1, "length": 2}),
        ("narrow", (0, -4, 4), {}),
        ("narrow", (1, -3, 2), {}),
        ("slice", (0, 2, -3), {}),
        ("contiguous", (), {}),
    ],
)
def test_a_view_shows_what_torch_gives(op, args, kwargs):
    parameter = torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS)
    view = view_of(called(op, *args, **kwargs), op, WeightView.whole("w", (ROWS, COLUMNS)))
    expected = torch.ops.aten.slice(parameter, *args) if op == "slice" else getattr(parameter, op)(*args, **kwargs)
    assert isinstance(view, WeightView) and view.shape == tuple(expected.shape)
    assert torch.equal(read(view, parameter), expected)


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "size"),
    [
        ("chunk", (3,), {}, 12),
        ("chunk", (), {"chunks": 5}, 12),
        ("split", (5,), {}, 12),
        ("split", ([4, 8],), {}, 12),
        ("split_with_sizes", (), {"split_sizes": [1, 2, 9]}, 12),
        ("chunk", (4,), {}, 2),
        ("tensor_split", (5,), {}, 12),
        ("tensor_split", ([3, 7],), {}, 12),
        ("tensor_split", (), {"indices": (4, -2)}, 12),
    ],
)
def test_parts_are_torchs(op, args, kwargs, size):
    spans = part_spans(called(op, *args, **kwargs), op, size)
    parts = getattr(torch.arange(size), op)(*args, **kwargs)
    assert spans is not None and [list(range(*span)) for span in spans] == [part.tolist() for part in parts]


def test_parts_that_overlap_are_not_known():
    assert part_spans(called("tensor_split", [7, 3]), "tensor_split", 12) is None


def test_parts_by_something_that_is_computed_are_not_known():
    graph = fx.Graph()
    w, count = graph.placeholder("w"), graph.placeholder("count")
    assert part_spans(graph.call_method("split", (w, count)), "split", 12) is None


@pytest.mark.parametrize("index", [0, slice(None, None, 2), (slice(None), 1), [0, 1]])
def test_single_entries_and_every_other_one_are_no_matrix(index):
    assert view_of(called("getitem", index), "getitem", WeightView.whole("w", (ROWS, COLUMNS))) is None


def test_an_index_speaks_of_every_axis():
    assert taken(called("getitem", (Ellipsis, slice(1, 3))), "getitem", 3) == [slice(None), slice(None), slice(1, 3)]
    assert taken(called("select", 1, 4), "select", 2) == [slice(None), 4]
    assert taken(called("getitem", [0, 1]), "getitem", 2) is None


def test_a_linear_is_named_by_its_rows():
    whole, bias = WeightView.whole("w", (ROWS, COLUMNS)), WeightView.whole("b", (ROWS,))
    part = linear_ref(whole.sliced(0, 4, 8), 0, bias.sliced(0, 4, 8))
    assert not isinstance(part, str) and part.rows == (4, 8) and not part.transposed
    turned = linear_ref(whole.permuted((1, 0)), 0, None)
    assert not isinstance(turned, str) and turned.transposed and turned.rows is None and turned.bias is None


@pytest.mark.parametrize(
    ("weight", "bias", "reason"),
    [
        (WeightView.whole("w", (2, 4, 8)), None, "mixture of experts: w holds several matrices"),
        (WeightView.whole("w", (4, 8)).sliced(1, 0, 4), None, "only some input columns of w are used"),
        (WeightView.whole("w", (4, 8)).sliced(0, 0, 2), WeightView.whole("b", (4,)), "rows of w and of b do not match"),
    ],
)
def test_what_is_no_linear_has_a_reason(weight, bias, reason):
    assert str(linear_ref(weight, 0, bias)).startswith(reason)
