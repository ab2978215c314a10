"""A LayerNorm folded into the native CPU operator: against float64, rounded as torch's own, one token at a time."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from acm_compiler.acm import ops
from acm_compiler.acm.gated_learners import GATED
from acm_compiler.acm.reference import run_learners
from acm_compiler.codegen.compare import TOLERANCE, relative_error
from tests.acm.test_reference import FORMS
from tests.codegen.test_cpu_gate import drawn as drawn_gate
from tests.codegen.test_cpu_gate import scalars
from tests.codegen.test_cpu_kernel import OUT, D, N, drawn

EPS = 1e-5
CHOICES = {"cost": 0.7, "k_min": 0, "rule": "logits"}


@pytest.fixture(autouse=True, scope="module")
def native():
    ops.load_kernels("cpu")
    assert torch._C._dispatch_has_kernel_for_dispatch_key("acm::gated_learners", "CPU")


class Site:
    """A gate, learners and a norm of one type, and ways to call them."""

    def __init__(self, kind="mlp", dtype=torch.float32, *, sizes=(D, OUT, N, 21), affine=True, gate=8):
        d_in = sizes[0]
        self.gate, self.learners = (
            drawn_gate(d_in, gate, 0).to(dtype).requires_grad_(False),
            drawn(kind, dtype, sizes=sizes),
        )
        self.norm = ((torch.rand(d_in) + 0.5).to(dtype), torch.randn(d_in).to(dtype)) if affine else (None, None)

    def run(self, x, *, low=0, high=N, residual=None, folded=True):
        w = self.learners
        norm = (*self.norm,) if folded else (None, None)
        options = CHOICES | {"form": w.form, "act": w.act, "norm_eps": EPS if folded else None}
        bounds = scalars(0.3, low, high)
        return GATED(x, *self.gate.weights(), *bounds, *w.tensors, residual, *norm, **options)

    def truth(self, x, k):
        """The output with the same k for every token, in float64."""
        norm = [None if t is None else t.double() for t in self.norm]
        z = F.layer_norm(x.double(), x.shape[1:], *norm, EPS)
        k = torch.full((x.shape[0],), k, dtype=torch.int32)
        return run_learners(z, k, ops.cast_weights(self.learners, torch.float64))

    def normalised(self, x):
        return F.layer_norm(x, x.shape[1:], *[None if t is None else t.to(x.dtype) for t in self.norm], EPS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 63, 1201])
@pytest.mark.parametrize("features", [D, 7])
def test_an_rms_norm_equals_the_reference(features, tokens, dtype):
    site, x = Site("gated", dtype, sizes=(features, OUT, N, 21)), (torch.randn(tokens, features) * 3 + 2).to(dtype)
    weight, w = site.norm[0], site.learners
    options = CHOICES | {"form": w.form, "act": w.act, "norm_eps": EPS, "norm_centred": False}
    z = F.rms_norm(x.double(), (features,), weight.double(), EPS)
    for k in (0, 2, N):
        y = GATED(x, *site.gate.weights(), *scalars(0.3, k, k), *w.tensors, None, weight, None, **options)
        truth = run_learners(z, torch.full((tokens,), k), ops.cast_weights(w, torch.float64))
        assert relative_error(y, truth) <= TOLERANCE[dtype]
    if tokens and dtype == torch.float32:  # the gate reads the same rows
        apart = torch.ops.acm.gated_learners_reference
        free = [*site.gate.weights(), *scalars(0.3, 0, N), *w.tensors, None, weight, None]
        torch.testing.assert_close(GATED(x, *free, **options), apart(x, *free, **options), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 63, 1201])
@pytest.mark.parametrize("kind", FORMS)
def test_it_equals_the_reference(kind, tokens, dtype):
    site, x = Site(kind, dtype), (torch.randn(tokens, D) * 3 + 2).to(dtype)
    residual = torch.randn(tokens, OUT).to(dtype)
    for k in range(N + 1):
        y = site.run(x, low=k, high=k, residual=residual)
        assert y.dtype == dtype
        assert relative_error(y, site.truth(x, k) + residual.double()) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["mlp", "gated", "rows", "cols"])
def test_gates_choose_what_they_choose_behind_a_norm_of_its_own(kind, dtype):
    site, x = Site(kind, dtype), (torch.randn(700, D) * 3 + 2).to(dtype)
    y, apart = site.run(x), site.run(site.normalised(x), folded=False)
    same = (y - apart).double().norm(dim=1) <= TOLERANCE[dtype] * apart.double().norm(dim=1)
    assert same.float().mean() > 0.99  # others have two choices closer to each other than rounding
    assert not torch.allclose(y[:-1], y[1:])


@pytest.mark.parametrize("mean", [0.0, 100.0, -3e4])
@pytest.mark.parametrize("width", [64, 768, 771])
def test_rows_far_from_zero_lose_no_digits(width, mean):
    """Torch's own norm is off by 3e-6 at a mean of 100 deviations."""
    site = Site(sizes=(width, 40, N, 200))
    x = torch.randn(90, width) + mean
    for k in (1, N):
        assert relative_error(site.run(x, low=k, high=k), site.truth(x, k)) <= TOLERANCE[torch.float32]
    assert mean == 0 or relative_error(site.normalised(x), site.normalised(x.double())) > TOLERANCE[torch.float32]


def test_rows_of_one_value_and_rows_with_an_outlier_are_normalised_too():
    site, x = Site(sizes=(768, 40, N, 200), affine=False), torch.randn(40, 768)
    x[3], x[4], x[5, 7] = 5.0, 0.0, 1e4
    assert relative_error(site.run(x, low=N, high=N), site.truth(x, N)) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("tokens", [20, 300])
def test_bfloat16_is_rounded_where_a_norm_by_itself_rounds(tokens):
    site = Site(dtype=torch.bfloat16, sizes=(512, 40, N, 256))
    x = (torch.randn(tokens, 512) * 2 + 1).bfloat16()
    y, apart = (
        site.run(x, low=N, high=N),
        site.run(site.normalised(x), low=N, high=N, folded=False),
    )
    # the same but for normalised values that fell on the other side of a border between two bfloat16
    assert relative_error(y, apart.double()) <= 2e-3


@pytest.mark.parametrize("missing", [(0,), (1,), (0, 1)])
def test_norms_without_weight_or_bias(missing):
    site, x = Site(), torch.randn(50, D) * 2 + 1
    site.norm = tuple(None if i in missing else t for i, t in enumerate(site.norm))
    assert relative_error(site.run(x, low=2, high=2), site.truth(x, 2)) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("kind", FORMS)
def test_a_token_keeps_its_bits_whatever_its_neighbours_are(kind):
    site, x = Site(kind), torch.randn(90, D)
    clean = site.run(x)
    poisoned = x.clone()
    poisoned[7::3] = torch.nan
    kept = ~poisoned.isnan().any(1)
    assert torch.equal(site.run(poisoned)[kept], clean[kept])


@pytest.mark.parametrize("tokens", [3, 300, 1300])
@pytest.mark.parametrize("kind", ["mlp", "rows", "cols"])
def test_threads_give_the_same_bits(kind, tokens):
    site, x, threads = Site(kind), torch.randn(tokens, D), torch.get_num_threads()
    one = site.run(x)
    try:
        torch.set_num_threads(3)
        several = site.run(x)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(several, one)


def test_strided_tokens():
    site, wide = Site(), torch.randn(31, 3, D)
    for x in (wide[:, 1], torch.randn(D, 31).t(), wide[:, 0].flip(0)):
        assert torch.equal(site.run(x), site.run(x.contiguous()))


@pytest.mark.parametrize("change", ["float64", "float16", "float32 norm", "composite"])
def test_what_the_kernel_does_not_cover_is_normalised_in_front_of_it(change):
    site, x = Site(), torch.randn(40, D)
    if change in ("float64", "float16"):
        dtype = getattr(torch, change)
        site, x = Site(dtype=dtype), x.to(dtype)
    elif change == "float32 norm":
        site, x = Site(dtype=torch.bfloat16), x.bfloat16()
        site.norm = tuple(t.float() for t in site.norm)
    else:
        site.learners = drawn("mlp", torch.float32, act="mul(x, sigmoid(mul(x, 2)))")
    assert relative_error(site.run(x, low=N, high=N), site.truth(x, N)) <= TOLERANCE[x.dtype]


@pytest.mark.slow
@pytest.mark.parametrize("vectors", ["avx2", "default"])
def test_it_holds_with_shorter_vectors_too(vectors):
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": vectors}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", __file__]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-3000:]


KEPT = """
import ctypes, sys, torch
from tests.codegen.test_cpu_kernel import SMALL
exec(SMALL.split("tokens, d")[0])
from acm_compiler.acm.gated_learners import GATED
from tests.codegen.test_cpu_norm import Site
torch.set_num_threads(1)
tokens, d, dtype = 48, 256, getattr(torch, sys.argv[1])
small, site = (Site(dtype=dtype, sizes=(d, d, 4, width)) for d, width in ((8, 8), (d, 128)))
x = torch.randn(tokens, d, dtype=dtype)
with torch.no_grad():
    small.run(x[:1, :8], low=4)
    ctypes.CDLL(str(build.library_file())).acm_keep_panels(False)
    before = library.mallinfo2()
    y = site.run(x, low=4)
    after = library.mallinfo2()
kept = after.uordblks + after.hblkhd - before.uordblks - before.hblkhd - y.nbytes
print(kept / (tokens * 4 * 128 * dtype.itemsize))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it asks glibc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_normalised_rows_take_no_more_room_than_rows_of_the_hidden_layer(dtype):
    """Three buffers are meant: hidden values, a panel of weights, and normalised rows, which are half as long here."""
    done = subprocess.run([sys.executable, "-c", KEPT, dtype], capture_output=True, text=True, check=True)
    assert 1.4 <= float(done.stdout) <= 2.7
