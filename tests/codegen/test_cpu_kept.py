"""Packed weights of the native CPU kernel: kept from call to call, or made once a call; answers never show which."""

import ctypes
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from acm_compiler.acm.quantized import integers
from acm_compiler.acm.reference import run_learners
from acm_compiler.codegen.compare import TOLERANCE, relative_error
from acm_compiler.passes.rewrite.offload import kept as offloaded
from acm_compiler.passes.rewrite.offload import offloading
from tests.helpers.kernel_cases import FORMS, Case, inputs_of, to, weights_of

HALF = torch.bfloat16
THREADS = (1, 2, 8, 64)
WIDE = (
    Case(tokens=4200, learners=4, width=48, d_in=128, d_out=80),
    Case(form="gated", act="silu", tokens=1100, width=20, d_in=130, d_out=33),
    Case(form="linear", act="identity", bias=False, second="top", tokens=2100, k="mixed"),
    Case(form="cols", heads=2, width=16, d_in=48, tokens=2100),
    Case(tokens=70, width=1100, d_in=96, d_out=48, second="per_k"),
)


@pytest.fixture(autouse=True)
def kept(library):
    """The library; panels are kept again after a test."""
    library.acm_kept_panels.restype = library.acm_columns_packed.restype = ctypes.c_int64
    library.acm_keep_panels(ctypes.c_bool(False))
    library.acm_keep_panels(ctypes.c_bool(True))
    yield library
    library.acm_keep_panels(ctypes.c_bool(True))


def native(one, weights=None):
    w = weights or one.weights
    return torch.ops.acm.learners_cpu(one.x, one.k, *w.tensors, one.residual, form=w.form, act=w.act)


def drawn(case, dtype):
    torch.manual_seed(0)
    return inputs_of(replace(case, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("case", FORMS + WIDE, ids=str)
def test_kept_or_not_a_bit_is_the_same(case, dtype, tiles, kept):
    one = drawn(case, dtype)
    first = native(one)
    assert kept.acm_kept_panels() > 0
    assert torch.equal(native(one), first)
    kept.acm_keep_panels(ctypes.c_bool(False))
    assert kept.acm_kept_panels() == 0
    assert torch.equal(native(one), first)
    assert kept.acm_kept_panels() == 0


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_a_written_weight_is_packed_anew_and_a_dead_one_let_go(dtype, tiles, kept):
    one = drawn(Case(tokens=90, d_in=130, d_out=70, width=34), dtype)
    native(one)
    made = kept.acm_kept_panels()
    for weight in (one.weights.w_in, one.weights.w_out):
        weight.mul_(-1.5)
        expected = run_learners(one.x.double(), one.k, to(one.weights, torch.float64))
        assert relative_error(native(one), expected + one.residual.double()) <= TOLERANCE[dtype]
        assert kept.acm_kept_panels() == made
    del one, weight
    assert kept.acm_kept_panels() == 0


@pytest.mark.parametrize("dtype", [torch.float32, HALF, torch.int8], ids=str)
def test_weights_written_past_torch_s_count_are_packed_anew(dtype, tiles, kept):
    """Put an average of weights in their place: `parameter.data.copy_(average)`."""
    one = drawn(Case(tokens=90, d_in=130, d_out=70, width=34), torch.float32 if dtype == torch.int8 else dtype)
    weights = integers.quantized(one.weights) if dtype == torch.int8 else one.weights
    before = native(one, weights)
    counted = weights.w_in._version
    weights.w_in.data.copy_(weights.w_in.flip(0))
    assert weights.w_in._version == counted
    after = native(one, weights)
    assert not torch.equal(after, before)
    kept.acm_keep_panels(ctypes.c_bool(False))
    assert torch.equal(native(one, weights), after)


def test_of_weights_whose_writes_torch_does_not_count_nothing_is_kept(tiles, kept):
    one = drawn(Case(tokens=90), HALF)
    with torch.inference_mode():
        tensors = {n: t if t is None else t.clone() for n, t in one.weights.tensors._asdict().items()}
        inferred = type(one.weights)(**tensors, form=one.weights.form, act=one.weights.act)
        before = native(one, inferred)
        inferred.w_in.neg_()
        assert not torch.equal(native(one, inferred), before)
    assert kept.acm_kept_panels() == 0
    assert torch.equal(native(one), before)


def test_of_offloaded_weights_nothing_is_kept(tmp_path, kept):
    one = drawn(Case(tokens=90, learners=4, width=48, d_in=128, d_out=128), torch.float32)
    expected = native(one)
    kept.acm_keep_panels(ctypes.c_bool(False))
    kept.acm_keep_panels(ctypes.c_bool(True))
    with offloading(tmp_path):
        in_files = offloaded(one.weights)
    assert all(w.untyped_storage().filename is not None for w in (in_files.w_in, in_files.w_out))
    assert torch.equal(native(one, in_files), expected)
    assert kept.acm_kept_panels() == 0


def test_few_tokens_read_weights_where_they_lie(kept):
    few = drawn(Case(tokens=2, d_in=128, width=64), torch.float32)
    native(few)
    assert kept.acm_kept_panels() == 0
    many = drawn(Case(tokens=200, d_in=128, width=64), torch.float32)
    assert native(many, few.weights).shape == (200, 80) and kept.acm_kept_panels() > 0


def choices(x, weights):
    bound = torch.tensor(0, dtype=torch.int32), torch.tensor(4, dtype=torch.int32)
    return torch.ops.acm.gate_cpu(x, *weights, torch.tensor(0.3), *bound, cost=0.7, k_min=0, rule="logits")


def drawn_gate(dtype, width=13):
    torch.manual_seed(0)
    return [torch.randn(*shape).to(dtype) for shape in ((width, 66), (width,), (5, width), (5,))]


@pytest.mark.parametrize("tokens", [2, 90])
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("written", range(4))
def test_a_gate_is_packed_once_and_anew_when_a_weight_is_written(written, tokens, dtype, tiles, kept):
    weights, x = drawn_gate(dtype), torch.randn(tokens, 66).to(dtype)
    before = choices(x, weights)
    assert kept.acm_kept_panels() == 1
    kept.acm_columns_packed()
    assert torch.equal(choices(x, weights), before) and kept.acm_columns_packed() == 0
    for write in (weights[written].neg_, lambda: weights[written].data.copy_(weights[written].flip(0) * 3)):
        write()
        after = choices(x, weights)
        assert torch.equal(after, choices(x, [weight.clone() for weight in weights]))
    assert not torch.equal(after, before) or tokens == 2
    kept.acm_keep_panels(ctypes.c_bool(False))
    assert torch.equal(choices(x, weights), after) and kept.acm_kept_panels() == 0
    kept.acm_keep_panels(ctypes.c_bool(True))
    choices(x, weights)
    del weights[written]
    assert kept.acm_kept_panels() == 0


def test_gates_that_share_their_first_layer_choose_by_their_own_second(kept):
    weights, x = drawn_gate(torch.float32), torch.randn(90, 66)
    for outer in (weights[2], weights[2][:3], weights[2].flip(0)):
        own = [*weights[:2], outer, weights[3][: len(outer)]]
        kept.acm_keep_panels(ctypes.c_bool(False))
        expected = choices(x, own)
        kept.acm_keep_panels(ctypes.c_bool(True))
        choices(x, weights)
        assert torch.equal(choices(x, own), expected) and torch.equal(choices(x, own), expected)


def test_of_a_gate_that_lies_strided_or_was_inferred_nothing_is_kept(kept):
    weights, x = drawn_gate(torch.float32), torch.randn(90, 66)
    expected = choices(x, weights)
    strided = [weights[0].t().contiguous().t(), *weights[1:]]
    kept.acm_keep_panels(ctypes.c_bool(False))
    kept.acm_keep_panels(ctypes.c_bool(True))
    assert torch.equal(choices(x, strided), expected)
    with torch.inference_mode():
        inferred = [weight.clone() for weight in weights]
        assert torch.equal(choices(x, inferred), expected)
    assert kept.acm_kept_panels() == 0


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_a_call_packs_each_column_once_whatever_its_chunks_and_threads(dtype, threads, kept):
    """4,200 tokens are five chunks for one thread."""
    one = drawn(WIDE[0], dtype)
    kept.acm_keep_panels(ctypes.c_bool(False))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        kept.acm_columns_packed()
        native(one)
        assert kept.acm_columns_packed() == 4 * 48 + 80
        kept.acm_keep_panels(ctypes.c_bool(True))
        native(one)
        assert kept.acm_columns_packed() == 4 * 48 + 80
        native(one)
        assert kept.acm_columns_packed() == 0
    finally:
        torch.set_num_threads(before)


def test_gelu_of_every_bfloat16_is_right_to_its_rounding(tiles):
    """Compared with float64; where GELU is near zero, to 2e-6."""
    v = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(HALF)
    v = v[v.abs() <= 1000]
    case = Case(form="mlp", learners=1, width=2, d_in=2, d_out=1, residual=False, dtype=HALF)
    weights = to(weights_of(case), HALF)
    for tensor in weights.tensors:
        if tensor is not None:
            tensor.zero_()
    weights.w_in[0, 0, 0] = weights.w_out[0, 0, 0] = 1
    x = torch.stack([v, torch.zeros_like(v)], 1)
    k = torch.ones(len(v), dtype=torch.int32)
    y = torch.ops.acm.learners_cpu(x, k, *weights.tensors, form="mlp", act="gelu")[:, 0].double()
    exact = torch.nn.functional.gelu(v.double())
    wrong = ~((y - exact).abs() <= exact.abs() * 2**-8 * 1.01 + 2e-6)
    assert not wrong.any(), (v[wrong], y[wrong])


SWITCHED = """
import ctypes, torch
from acm_compiler.acm import Learners, ops
from acm_compiler.codegen.cpu import build
learners = Learners(64, 64, 4, 16, form="mlp", act="gelu")
learners.start_random()
with torch.no_grad():
    ops.learners(torch.randn(99, 64), torch.full((99,), 4, dtype=torch.int32), learners.weights())
print(ctypes.CDLL(str(build.library_file())).acm_kept_panels())
"""


@pytest.mark.slow
@pytest.mark.parametrize("switch", [None, "0"])
def test_a_switch_says_that_nothing_is_kept(switch):
    environment = os.environ if switch is None else {**os.environ, "ACM_KEEP_PANELS": switch}
    done = subprocess.run([sys.executable, "-c", SWITCHED], capture_output=True, text=True, check=True, env=environment)
    assert (int(done.stdout) == 0) == (switch == "0")
