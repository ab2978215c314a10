"""The native steps that are no ACMs, attention of few tokens and norms, against float64."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from acm_compiler.acm.steps import ATTENTION, Program, Step
from acm_compiler.codegen.compare import relative_error


@pytest.fixture(autouse=True)
def native(library):
    """The kernel, loaded."""


def attend(q, k, v, *, heads, length, causal=False, scale=0.3):
    program = Program(3, (Step("attention", (0, 1, 2), (heads, length, causal, scale)),), (3,))
    return torch.ops.acm.steps_cpu([q, k, v], program.text())[0]


def truth(q, k, v, *, heads, length, causal=False, scale=0.3):
    parts = [t.double().view(-1, length, heads, t.shape[1] // heads).transpose(1, 2) for t in (q, k, v)]
    y = F.scaled_dot_product_attention(*parts, is_causal=causal, scale=scale)
    return y.transpose(1, 2).reshape(q.shape)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("depth", [1, 7, 16, 64, 130])
@pytest.mark.parametrize("length", [1, 2, 16, 17, 37, 130])
def test_attention_is_that_of_float64(length, depth, causal):
    q, k, v = torch.randn(3, 2 * length, 3 * depth).unbind()
    options = {"heads": 3, "length": length, "causal": causal}
    assert relative_error(attend(q, k, v, **options), truth(q, k, v, **options)) < 2e-6


@pytest.mark.parametrize("causal", [False, True])
def test_large_scores_keep_their_weights(causal):
    q, k, v = torch.randn(3, 37, 32).unbind()
    options = {"heads": 2, "length": 37, "causal": causal, "scale": 80.0}
    assert relative_error(attend(q, k, v, **options), truth(q, k, v, **options)) < 2e-5


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_no_number_reaches_what_reads_it_and_nothing_else(value):
    q, k, v = torch.randn(3, 74, 32).unbind()
    q[5, 3], v[40, 20] = value, value
    options = {"heads": 2, "length": 37}
    y, expected = attend(q, k, v, **options), truth(q, k, v, **options)
    assert torch.equal(y.isfinite(), expected.isfinite())
    finite = expected.isfinite()
    assert relative_error(y[finite], expected[finite]) < 2e-6


def test_no_tokens_are_no_work():
    assert attend(*torch.randn(3, 0, 32).unbind(), heads=2, length=5).shape == (0, 32)


@pytest.mark.parametrize(
    ("shape", "heads", "length"), [((6, 32), 5, 3), ((6, 32), 2, 4)], ids=["parts of heads", "parts of sequences"]
)
def test_sizes_that_do_not_fit_are_refused(shape, heads, length):
    with pytest.raises(RuntimeError, match="must have whole heads and sequences"):
        attend(*torch.randn(3, *shape).unbind(), heads=heads, length=length)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("depth", [32, 64, 96, 20])
@pytest.mark.parametrize("length", [0, 1, 31, 32, 33, 197])
def test_attention_in_bfloat16_is_as_near_to_float64_as_torchs_own(length, depth, causal):
    operands = [t.transpose(1, 2) for t in torch.randn(3, 2, length, 3, depth).unbind()]
    options = {"scale": 0.2, "causal": causal}
    y = torch.ops.acm.attention_cpu(*operands, **options)
    with FakeTensorMode() as mode:
        fake = ATTENTION(*map(mode.from_tensor, operands), **options)
    assert y.shape == fake.shape and y.dtype == fake.dtype
    if length:
        assert y.stride() == fake.stride()
        exact = F.scaled_dot_product_attention(*(t.double() for t in operands), is_causal=causal, scale=0.2)
        theirs = F.scaled_dot_product_attention(*(t.bfloat16() for t in operands), is_causal=causal, scale=0.2)
        assert (y - exact).norm() < 1.1 * (theirs - exact).norm()


def test_attention_in_bfloat16_of_rows_that_lie_anywhere():
    q, k, v = torch.randn(2, 40, 4, 3, 64).permute(3, 0, 2, 1, 4).unbind()
    expected = torch.ops.acm.attention_cpu(q.contiguous(), k, v, scale=0.1, causal=False)
    turned = q.transpose(2, 3).contiguous().transpose(2, 3)  # values of a row apart: torch's own runs
    torch.testing.assert_close(torch.ops.acm.attention_cpu(q, k, v, scale=0.1, causal=False), expected)
    torch.testing.assert_close(
        torch.ops.acm.attention_cpu(turned, k, v, scale=0.1, causal=False), expected, rtol=0.02, atol=0.02
    )


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_no_number_stays_in_its_head_in_bfloat16(value):
    q, k, v = torch.randn(3, 2, 2, 33, 32).unbind()
    q[0, 1, 7, 3] = value
    y = torch.ops.acm.attention_cpu(q, k, v, scale=0.3, causal=False)
    assert y[0, 1, 7].isnan().all()
    y[0, 1, 7] = 0
    assert y.isfinite().all()


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_the_bits_do_not_depend_on_threads(threads):
    q, k, v = torch.randn(3, 400, 96).unbind()
    before = torch.get_num_threads()
    expected = attend(q, k, v, heads=6, length=40)
    torch.set_num_threads(threads)
    try:
        assert torch.equal(attend(q, k, v, heads=6, length=40), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(("tokens", "features"), [(0, 8), (1, 1), (37, 64), (9, 73)])
def test_norms_are_those_of_float64(tokens, features, affine, centred):
    x, weight, bias = 3 * torch.randn(tokens, features) + 20, torch.rand(features), torch.randn(features)
    tensors = [x, weight, bias] if affine else [x]
    operands = (0, 1, 2) if affine else (0, None, None)
    program = Program(len(tensors), (Step("norm", operands, (1e-5, centred)),), (len(tensors),))
    y = torch.ops.acm.steps_cpu(tensors, program.text())[0]
    expected = program.run([t.double() for t in tensors], gated=None)[0]
    torch.testing.assert_close(y, expected.float(), atol=2e-5, rtol=1e-5)
