"""The native CPU kernel with int8 weights against the reference: the same integers, floats to rounding."""

import ctypes
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from acm_compiler.acm import ops
from acm_compiler.acm.arguments import Weights
from acm_compiler.acm.quantized import integers
from acm_compiler.acm.reference import Norm, normalised, run_learners
from acm_compiler.codegen import cpu
from acm_compiler.codegen.compare import INT8_TOLERANCE, TOLERANCE, relative_error, require_equal
from acm_compiler.codegen.cpu.build import PLAIN
from acm_compiler.errors import UsageError, VerificationFailed
from tests.helpers.kernel_cases import FEW, FORMS, ODD, Case, k_of, require_same_bits_by_threads, to, weights_of

WIDE = (
    Case(form="gated", act="silu", tokens=300, d_in=130, d_out=90, width=75, learners=4),
    Case(form="gated", act="silu", tokens=61, d_in=257, d_out=33, width=3),
    Case(form="gated", act="silu", second="top", tokens=9, d_in=70, width=131, d_out=17),
    Case(form="linear", act="identity", second="per_k", tokens=16, d_in=7, width=5, d_out=3),
    Case(form="linear", act="identity", second="top", tokens=40, k="all"),
    Case(form="gated", act="silu", tokens=40, d_in=1, width=1, d_out=1, learners=1),
    Case(form="rows", heads=2, width=130, d_in=96, d_out=390, tokens=70),
    Case(form="cols", heads=2, width=130, d_in=390, d_out=70, tokens=70),
)


pytestmark = pytest.mark.usefixtures("library")


def drawn(case: Case, dtype: torch.dtype = torch.float32):
    """(x, k, int8 weights, residual) of a case."""
    torch.manual_seed(0)
    weights = ops.cast_weights(integers.quantized(to(weights_of(case), torch.float32)), dtype)
    x, residual = torch.randn(case.tokens, case.d_in), torch.randn(case.tokens, weights.b_out.shape[1])
    return x.to(dtype), k_of(case), weights, residual.to(dtype)


def native(x, k, w: Weights, residual=None):
    return torch.ops.acm.learners_cpu(x, k, *w.tensors, residual, form=w.form, act=w.act)


@pytest.mark.parametrize("case", FORMS + ODD + FEW + WIDE, ids=str)
def test_it_equals_the_reference(case, tiles):
    x, k, weights, residual = drawn(case)
    expected = run_learners(x, k, weights)
    assert relative_error(native(x, k, weights), expected) <= INT8_TOLERANCE
    near = (native(x, k, weights, residual) - residual - expected).abs().amax(1) <= 1e-5
    assert near.float().mean() >= 0.9  # all but those with a hidden value between two integers


@pytest.mark.parametrize("case", [case for case in WIDE + FORMS if case.act in ("identity", "silu")], ids=str)
def test_where_floats_are_rounded_alike_it_equals_the_reference_to_rounding(case, tiles):
    x, k, weights, _ = drawn(case)
    assert relative_error(native(x, k, weights), run_learners(x, k, weights)) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("case", FORMS, ids=str)
def test_bfloat16_tokens(case, tiles):
    x, k, weights, residual = drawn(case, torch.bfloat16)
    expected = run_learners(x, k, weights) + residual
    assert relative_error(native(x, k, weights, residual), expected) <= TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("case", FORMS + WIDE[:2], ids=str)
def test_a_token_keeps_its_bits_whatever_its_neighbours_and_with_or_without_tiles(case, library):
    x, k, weights, _ = drawn(case)
    library.acm_want_tiles(True)
    y = native(x, k, weights)
    many = native(x.repeat(7, 1), torch.cat([k, *((k + n) % (case.learners + 1) for n in range(6))]), weights)
    assert torch.equal(many[: case.tokens], y)
    library.acm_want_tiles(False)
    assert torch.equal(native(x, k, weights), y)
    for few in (1, 4, 13):
        assert torch.equal(native(x[-few:], k[-few:], weights), y[-few:])


def test_threads_do_not_change_a_bit(tiles):
    require_same_bits_by_threads(native, drawn)


@pytest.mark.parametrize("tokens", [3, 40])
def test_extreme_values_are_summed_without_loss(tokens, tiles):
    """The largest bytes times the largest weights of both signs, over a depth beyond 2^24 / (255 127)."""
    d = 1000
    x = torch.full((tokens, d), 255.0)
    x[:, ::3] = 0
    w = torch.full((1, 2, d), 127, dtype=torch.int8)
    w[0, 1] = -127
    out = torch.tensor([[[127, 0]], [[0, -127]]], dtype=torch.int8).reshape(2, 1, 2)
    weights = Weights(
        w_in=w, b_in=None, w_up=None, b_up=None, w_out=out, b_out=torch.zeros(2, 2), w_top=None,
        s_in=torch.ones(1, 2), s_out=torch.ones(2), act="identity", form="linear",
    )  # fmt: skip
    k = torch.ones(tokens, dtype=torch.int32)
    torch.testing.assert_close(native(x, k, weights), run_learners(x, k, weights), rtol=1e-6, atol=0)


@pytest.mark.parametrize("case", FORMS, ids=str)
def test_zeros_tiny_values_and_what_is_not_finite(case, tiles):
    x, _, weights, _ = drawn(case)
    k = torch.full((case.tokens,), case.learners)
    x[0], x[1], x[2] = 0, 1e-42, x[2] * 1e30
    clean = native(x, k, weights)
    torch.testing.assert_close(clean, run_learners(x, k, weights), rtol=1e-3, atol=1e-3, equal_nan=True)
    for odd in (torch.nan, torch.inf, -torch.inf):
        lost = x.clone()
        lost[3, 5] = odd
        y = native(lost, k, weights)
        assert torch.equal(y.isnan(), run_learners(lost, k, weights).isnan()) and y[3].isnan().any()
        others = torch.arange(case.tokens) != 3
        torch.testing.assert_close(y[others], clean[others], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("form", ["mlp", "cols"])
def test_a_norm_in_front_belongs_to_it(form, tiles):
    case = next(case for case in FORMS if case.form == form)
    x, _, weights, residual = drawn(case)
    norm = Norm(weight=torch.randn(case.d_in), bias=torch.randn(case.d_in), eps=1e-5)
    gate = (torch.randn(8, case.d_in), torch.randn(8), torch.randn(case.learners, 8), torch.randn(case.learners))
    knob, bounds = torch.tensor(0.1), (torch.tensor(0), torch.tensor(case.learners))
    choices = {"cost": 1.0, "k_min": 1, "rule": "logits"}
    y = torch.ops.acm.gated_learners(
        x, *gate, knob, *bounds, *weights.tensors, residual, norm.weight, norm.bias,
        **choices, form=form, act=weights.act, norm_eps=norm.eps,
    )  # fmt: skip
    z = normalised(x, norm)
    k = torch.ops.acm.gate(z, *gate, knob, *bounds, **choices)
    assert k.unique().numel() > 1
    assert relative_error(y - residual, run_learners(z, k, weights)) <= 2 * INT8_TOLERANCE


def test_scales_that_do_not_fit_are_the_references_error():
    x, k, weights, _ = drawn(Case(form="rows", heads=2, width=16, d_out=48))
    tensors = weights.tensors
    for odd in (tensors._replace(s_in=tensors.s_in[:-1]), tensors._replace(s_out=torch.ones(48))):
        with pytest.raises(UsageError, match="acm::learners"):
            torch.ops.acm.learners_cpu(x, k, *odd, form=weights.form, act=weights.act)
    k[3] = 9
    with pytest.raises(UsageError, match="more learners"):
        native(x, k, weights)


def test_the_check_of_every_call_allows_for_a_value_between_two_integers():
    x, k, weights, _ = drawn(Case(tokens=700, width=96))
    y = run_learners(x, k, weights)
    require_equal(y * (1 + 1e-3), y, weights.w_in)
    with pytest.raises(VerificationFailed, match="at most 5e-03"):
        require_equal(y * 1.01, y, weights.w_in)
    with pytest.raises(VerificationFailed, match="at most 5e-06"):
        require_equal(y * (1 + 1e-3), y, None)


def test_a_processor_without_vectors_of_bytes_says_so(monkeypatch):
    assert cpu.not_covered(act="gelu", dtype=torch.float32, is_quantized=True) is None
    monkeypatch.setattr(cpu, "levels_here", lambda: [PLAIN])
    assert "AVX2" in cpu.not_covered(act="gelu", dtype=torch.float32, is_quantized=True)
    assert cpu.not_covered(act="gelu", dtype=torch.float32) is None


FEWER = """
import sys, types, pytest, torch
has = {**torch.cpu.get_capabilities(), sys.argv[1]: False}
torch.cpu.get_capabilities = lambda: types.MappingProxyType(has)
sys.exit(pytest.main(sys.argv[2:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("vectors", "lacking"), [("avx512", "avx512_vnni"), ("avx2", "nothing"), ("avx2", "avx_vnni")])
def test_older_vectors_give_the_same(vectors, lacking):
    tests = "test_it_equals or test_a_token or test_extreme or test_zeros"
    command = [sys.executable, "-c", FEWER, lacking, "-q", "-p", "no:cacheprovider", __file__, "-k", tests]
    done = subprocess.run(
        command, env=os.environ | {"ATEN_CPU_CAPABILITY": vectors}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:]


def test_panels_are_kept_while_a_weight_lives_and_is_not_written(library, tiles):
    x, k, weights, _ = drawn(Case(tokens=40))
    library.acm_kept_panels.restype = ctypes.c_int64
    few = native(x[:4], k[:4], weights)
    before = library.acm_kept_panels()
    first = native(x, k, weights)
    made = library.acm_kept_panels() - before
    assert made > 0 and torch.equal(native(x, k, weights), first)
    assert library.acm_kept_panels() - before == made
    assert torch.equal(native(x[:4], k[:4], weights), few)  # now from panels
    weights.w_in.neg_()
    assert relative_error(native(x, k, weights), run_learners(x, k, weights)) <= INT8_TOLERANCE
    assert library.acm_kept_panels() - before == made
    del weights
    assert library.acm_kept_panels() == before


def test_no_panels_are_kept_of_what_torch_does_not_count_writes_to(library):
    x, k, weights, _ = drawn(Case(tokens=40))
    before = library.acm_kept_panels()
    with torch.inference_mode():
        inferred = replace(weights, w_in=weights.w_in.clone(), w_out=weights.w_out.clone())
        first = native(x, k, inferred)
        inferred.w_in.neg_()
        assert relative_error(native(x, k, inferred), run_learners(x, k, inferred)) <= INT8_TOLERANCE
    assert torch.equal(first, native(x, k, weights))
    assert library.acm_kept_panels() > before  # those of the weights that are counted
