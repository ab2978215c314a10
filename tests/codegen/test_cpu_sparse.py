"""The native CPU kernel of `acm::sparse_learners` against `sparse_output` in float64."""

import ctypes
from dataclasses import replace

import pytest
import torch

from acm_compiler.acm import ops
from acm_compiler.acm.arguments import Weights
from acm_compiler.acm.reference import hidden
from acm_compiler.acm.sparse import Thresholds, cut, sparse_output
from acm_compiler.codegen.compare import TOLERANCE, relative_error
from acm_compiler.errors import UsageError
from acm_compiler.passes.rewrite.offload import kept as offloaded
from acm_compiler.passes.rewrite.offload import offloading
from acm_compiler.site import ACTIVATIONS
from tests.codegen.test_cpu_kernel import D, H, N, draw_k
from tests.codegen.test_cpu_kernel import drawn as drawn_weights

HALF = torch.bfloat16
FORMS = ("mlp", "gated", "top")
LARGE = (384, 300, N, 345)  # work for many threads, and more rows than are near at a time
_CLEAR = 1.1  # a value's size over the least one, or the other way, so that rounding cuts no other values


@pytest.fixture(autouse=True)
def kept(library):
    """The library, which keeps nothing yet."""
    library.acm_kept_panels.restype = ctypes.c_int64
    library.acm_keep_panels(ctypes.c_bool(False))
    library.acm_keep_panels(ctypes.c_bool(True))
    yield library
    library.acm_keep_panels(ctypes.c_bool(True))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def output(x, k, w: Weights, least: Thresholds):
    return torch.ops.acm.sparse_learners_cpu(x, k, *least, *w.tensors[:7], form=w.form, act=w.act)


def truth(x, k, w: Weights, least: Thresholds):
    return sparse_output(x.double(), k, ops.cast_weights(w, torch.float64), least)


def drawn(kind: str, dtype: torch.dtype = torch.float32, **options) -> Weights:
    weights = drawn_weights(kind, dtype, **options)
    return replace(weights, w_top=weights.w_top * 2) if kind == "top" else weights


def between(values_TC):
    """A size for each column that some, all or none of its values are below, none near it, float32 [C]."""
    sizes = torch.cat([torch.zeros(1, values_TC.shape[1]), values_TC.abs().sort(0).values])
    above = torch.cat([sizes[1:], sizes[-1:] * _CLEAR**4 + 1e-3])
    free = torch.rand(sizes.shape).masked_fill(above < sizes * _CLEAR**2, -1)
    row = free.argmax(0, keepdim=True)
    low, high = (values.gather(0, row)[0] for values in (sizes, above))
    return torch.where(low == 0, high / 2, (low * high).sqrt()).float()


def thresholds_of(x, w: Weights, skipped: str = "some") -> Thresholds:
    """Sizes below which none, some or all values are, of these tokens."""
    n, width, d_in = w.w_in.shape
    if skipped != "some":
        size = 0.0 if skipped == "none" else torch.inf
        return Thresholds(torch.full((d_in,), size), torch.full((n, width), size))
    inputs = between(x.double()) if len(x) else torch.ones(d_in)
    h = hidden(cut(x.double(), inputs), ops.cast_weights(w, torch.float64), n)
    return Thresholds(inputs, (between(h) if len(x) else torch.ones(n * width)).view(n, width))


def compare(x, k, w: Weights, least: Thresholds) -> None:
    y = output(x, k, w, least)
    assert y.dtype == x.dtype and y.shape == (len(x), w.b_out.shape[1])
    assert relative_error(y, truth(x, k, w, least)) <= TOLERANCE[x.dtype]


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 2, 5, 16, 17])
@pytest.mark.parametrize("kind", FORMS)
def test_it_equals_the_reference(kind, tokens, dtype, kept):
    weights, x = drawn(kind, dtype), torch.randn(tokens, D).to(dtype)
    for skipped in ("none", "some", "all"):
        for pattern in ("0", "1", "3", "4", "mixed", "one high"):
            compare(x, draw_k(tokens, pattern), weights, thresholds_of(x, weights, skipped))
    matrices = {"mlp": 2, "gated": 3, "top": 3}[kind]
    assert kept.acm_kept_panels() == (matrices if 0 < tokens <= 16 else 0)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("kind", FORMS)
def test_large_learners_without_biases_equal_the_reference(kind, dtype):
    weights = replace(drawn(kind, dtype, sizes=LARGE), b_in=None, b_up=None)
    for tokens in (1, 3, 16):
        x = torch.randn(tokens, LARGE[0]).to(dtype)
        for pattern in ("1", "4", "mixed"):
            compare(x, draw_k(tokens, pattern), weights, thresholds_of(x, weights))


@pytest.mark.parametrize("kind", ["mlp", "gated"])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_every_activation_equals_the_reference(act, kind):
    weights, x = drawn(kind, act=act), torch.randn(3, D)
    compare(x, torch.tensor([2, 4, 1]), weights, thresholds_of(x, weights))


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (7, 3, 2, 5), (67, 129, 3, 33)], ids=str)
def test_odd_sizes_equal_the_reference(sizes):
    for kind in FORMS:
        weights, x = drawn(kind, sizes=sizes), torch.randn(4, sizes[0])
        k = torch.tensor([0, sizes[2], 1, sizes[2] // 2], dtype=torch.int64)
        compare(x, k, weights, thresholds_of(x, weights))


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("kind", FORMS)
def test_a_token_has_the_same_bits_alone_and_with_any_number_of_threads(kind, dtype, kept):
    weights, x = drawn(kind, dtype, sizes=LARGE), torch.randn(16, LARGE[0]).to(dtype)
    k, least = draw_k(16, "mixed"), thresholds_of(x, weights)
    together = output(x, k, weights, least)
    kept.acm_threads_that_worked()
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            alone = torch.cat([output(x[i : i + 1], k[i : i + 1], weights, least) for i in range(16)])
            assert torch.equal(alone, together)
            assert torch.equal(output(x, k, weights, least), together)
            assert threads == 1 or kept.acm_threads_that_worked() == threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", FORMS)
def test_what_a_skipped_value_is_multiplied_by_is_not_read(kind):
    weights, x, k = drawn(kind, act="relu"), torch.randn(1, D), torch.tensor([N if kind == "top" else 2])
    least = thresholds_of(x, weights)
    expected = truth(x, k, weights, least)
    skipped = x[0].abs() < least.inputs
    h = hidden(cut(x.double(), least.inputs), ops.cast_weights(weights, torch.float64), N).view(N, H)
    weights.w_in[..., skipped] = torch.nan
    if weights.w_up is not None:
        weights.w_up[..., skipped] = torch.nan
    x[0, skipped] = 0
    none = (h.abs() < least.hidden) | (h == 0)
    assert skipped.any() and none.any() and not skipped.all() and not none.all()
    second = weights.w_out if kind != "top" else weights.w_top.view(-1, N, H)
    second[:, none] = torch.nan
    assert relative_error(output(x, k, weights, least), expected) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("kind", FORMS)
def test_nan_and_infinity_are_not_skipped(kind, dtype):
    weights, x, k = drawn(kind, dtype), torch.randn(5, D).to(dtype), torch.tensor([2, 3, 0, 4, 1])
    least = thresholds_of(x, weights)
    x[1, 3], x[2, 0], x[3, 5] = torch.nan, torch.nan, torch.nan
    y = output(x, k, weights, least)
    assert y[[1, 3]].isnan().all()
    assert relative_error(y[[0, 2, 4]], truth(x, k, weights, least)[[0, 2, 4]]) <= TOLERANCE[dtype]
    nothing = thresholds_of(x, weights, "all")
    assert output(x, k, weights, nothing)[[1, 3]].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_rows_and_sizes_may_lie_strided(dtype, kept):
    weights, wide = drawn("gated", dtype), torch.randn(6, 2 * D).to(dtype)
    for x in (wide[:, :D], wide[:, ::2], wide[::2, D:]):
        k, least = draw_k(2 * len(x), "mixed")[::2], thresholds_of(x, weights)
        apart = Thresholds(*(t.repeat_interleave(2, -1)[..., ::2] for t in least))
        assert torch.equal(output(x, k, weights, apart), output(x.contiguous(), k.contiguous(), weights, least))
    assert kept.acm_kept_panels() == 3


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_copies_are_kept_made_anew_after_a_write_and_let_go(dtype, kept):
    weights, x = drawn("gated", dtype), torch.randn(2, D).to(dtype)
    k = torch.tensor([3, 2])
    compare(x, k, weights, thresholds_of(x, weights))
    kept.acm_columns_packed()
    compare(x, k, weights, thresholds_of(x, weights))
    assert kept.acm_columns_packed() == 0 and kept.acm_kept_panels() == 3
    for weight in (weights.w_in, weights.w_up, weights.w_out):
        for write in (lambda w: w.mul_(-1.5), lambda w: w.data.copy_(w.flip(0))):
            write(weight)
            compare(x, k, weights, thresholds_of(x, weights))
            assert kept.acm_columns_packed() > 0 and kept.acm_kept_panels() == 3
    del weights, weight
    assert kept.acm_kept_panels() == 0


def test_weights_of_which_nothing_may_be_kept_go_to_the_reference(tmp_path, kept):
    weights, x, k = drawn("gated", sizes=(128, 128, N, 48)), torch.randn(2, 128), torch.tensor([3, 2])
    least = thresholds_of(x, weights)
    with offloading(tmp_path):
        in_files = offloaded(weights)
    assert all(w.untyped_storage().filename for w in (in_files.w_in, in_files.w_up, in_files.w_out))
    strided = replace(weights, w_out=weights.w_out.transpose(0, 2).contiguous().transpose(0, 2))
    for other in (in_files, strided):
        compare(x, k, other, least)
    with torch.inference_mode():
        compare(x, k, replace(weights, w_out=weights.w_out.clone()), least)
    assert kept.acm_kept_panels() == 0
    kept.acm_keep_panels(ctypes.c_bool(False))
    compare(x, k, weights, least)
    assert kept.acm_kept_panels() == 0


def test_it_is_in_charge_on_cpus():
    weights, x, k = drawn("top"), torch.randn(3, D), torch.tensor([1, 4, 2])
    least = thresholds_of(x, weights)
    y = torch.ops.acm.sparse_learners(x, k, *least, *weights.tensors[:7], form=weights.form, act=weights.act)
    assert torch.equal(y, output(x, k, weights, least))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"inputs": torch.zeros(D, dtype=torch.float64)}, "thresholds_in"),
        ({"inputs": torch.zeros(D + 1)}, "thresholds_in"),
        ({"hidden": torch.zeros(N, H + 1)}, "thresholds_hidden"),
    ],
    ids=["type", "inputs", "hidden"],
)
def test_what_does_not_fit_is_refused_in_words(change, message):
    weights, x = drawn("mlp"), torch.randn(2, D)
    least = thresholds_of(x, weights)._replace(**change)
    with pytest.raises(UsageError, match=message):
        output(x, torch.tensor([1, 2]), weights, least)


def test_an_illegal_k_is_refused():
    weights, x = drawn("mlp"), torch.randn(2, D)
    with pytest.raises(UsageError, match="5"):
        output(x, torch.tensor([1, N + 1]), weights, thresholds_of(x, weights))


def test_other_types_go_to_the_reference(kept):
    weights, x, k = drawn("mlp", torch.float64), torch.randn(2, D, dtype=torch.float64), torch.tensor([1, 4])
    compare(x, k, weights, thresholds_of(x, weights))
    assert kept.acm_kept_panels() == 0
