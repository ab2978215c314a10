"""The native CPU kernel against the reference in float64."""

import os
import re
import subprocess
import sys
from typing import get_args

import pytest
import torch
from filelock import FileLock

from acm_compiler.acm import check_arguments, ops
from acm_compiler.acm.activations import resolve
from acm_compiler.acm.arguments import Weights
from acm_compiler.acm.reference import GateRule, run_learners
from acm_compiler.codegen import cpu
from acm_compiler.codegen.compare import TOLERANCE, relative_error
from acm_compiler.codegen.cpu import build
from acm_compiler.errors import KernelUnavailable, UsageError
from acm_compiler.site import ACTIVATIONS
from tests.acm.test_reference import FORMS

D, OUT, N, H = 24, 40, 4, 21
HEADS = 2


@pytest.fixture(autouse=True, scope="module")
def native():
    """The kernel is compiled (once per machine) and in charge."""
    ops.load_kernels("cpu")
    assert torch._C._dispatch_has_kernel_for_dispatch_key("acm::learners", "CPU")


def drawn(kind: str, dtype: torch.dtype, *, act: str = "gelu", sizes=(D, OUT, N, H)) -> Weights:
    """Weights of one kind of ACM, all of about the same size as their inputs."""
    d_in, d_out, n_learners, width = sizes

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, dtype=torch.float64) / shape[-1] ** 0.5).to(dtype)

    if kind in ("rows", "cols"):
        part = (OUT if kind == "rows" else D) // (HEADS * N)
        shape = (N, HEADS, part, D) if kind == "rows" else (N, OUT, HEADS, part)
        absent = dict.fromkeys(("b_in", "w_up", "b_up", "w_out", "w_top"))
        return Weights(w_in=draw(*shape), b_out=draw(N + 1, OUT), act="identity", form=kind, **absent)
    form = {"gated": "gated", "linear": "linear", "linear_top": "linear"}.get(kind, "mlp")
    gated, linear = form == "gated", form == "linear"
    return Weights(
        w_in=draw(n_learners, width, d_in),
        b_in=None if linear else draw(n_learners, width),
        w_up=draw(n_learners, width, d_in) if gated else None,
        b_up=draw(n_learners, width) if gated else None,
        w_out=draw(n_learners, d_out, n_learners, width) if kind == "per_k" else draw(d_out, n_learners, width),
        b_out=draw(n_learners + 1, d_out),
        w_top=draw(d_out, n_learners * width) if kind == "top" else draw(d_out, d_in) if kind == "linear_top" else None,
        act="identity" if linear else act,
        form=form,
    )


def native_output(x, k, w: Weights, residual=None):
    return torch.ops.acm.learners_cpu(x, k, *w.tensors, residual, form=w.form, act=w.act)


def truth(x, k, w: Weights):
    return run_learners(x.double(), k, ops.cast_weights(w, torch.float64))


def draw_k(tokens: int, pattern: str) -> torch.Tensor:
    if pattern == "mixed":
        return torch.randint(0, N + 1, (tokens,), dtype=torch.int32)
    k = torch.full((tokens,), 0 if pattern == "one high" else int(pattern), dtype=torch.int32)
    if pattern == "one high" and tokens:
        k[tokens // 2] = N
    return k


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pattern", ["0", "1", "2", "4", "mixed", "one high"])
@pytest.mark.parametrize("tokens", [0, 1, 63, 1201])
@pytest.mark.parametrize("kind", FORMS)
def test_it_equals_the_reference(kind, tokens, pattern, dtype):
    compare_with_reference(drawn(kind, dtype), tokens, pattern)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["mlp", "gated", "linear_top", "per_k", "top"])
def test_large_learners_run_one_after_the_other_and_equal_the_reference(kind, dtype):
    weights = drawn(kind, dtype, sizes=(384, 24, N, 345))
    assert weights.w_in[0].numel() > 1 << 17
    for pattern in ("4", "mixed", "one high"):
        compare_with_reference(weights, 61, pattern)


def compare_with_reference(weights: Weights, tokens: int, pattern: str) -> None:
    dtype = weights.w_in.dtype
    x, k = (
        torch.randn(tokens, weights.w_in.shape[-1] if weights.form != "cols" else D).to(dtype),
        draw_k(tokens, pattern),
    )
    y = native_output(x, k, weights)
    assert y.dtype == dtype and y.shape == (tokens, weights.b_out.shape[1])
    assert relative_error(y, truth(x, k, weights)) <= TOLERANCE[dtype]


def listed_in(header: str, pattern: str) -> list[str]:
    """The quoted names in what `pattern` matches of a header of the kernel."""
    text = (build.SOURCE.parent / header).read_text()
    return [name for found in re.findall(pattern, text) for name in re.findall(r'"(\w+)"', found)]


def test_the_kernel_knows_every_name_and_leaves_none_to_the_reference_unsaid():
    header = (build.SOURCE.parent / "activations.h").read_text()
    assert re.findall(r"^  is\((\w+),", header, re.MULTILINE) == list(ACTIVATIONS)
    assert listed_in("operation.h", r"kFormNames\[\] = \{[^}]*") == list(check_arguments._FORMS)
    assert sorted(listed_in("rule.h", r'rule == "\w+"')) == sorted(get_args(GateRule))


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_every_activation_is_torchs(act):
    weights = drawn("mlp", torch.float32, act=act)
    x = torch.randn(40, D) * 6
    x[0] *= 40
    k = draw_k(40, "mixed")
    y, expected = native_output(x, k, weights), truth(x, k, weights)
    error = ((y - expected).norm(dim=1) / expected.norm(dim=1)).max()
    assert error <= 4 * TOLERANCE[torch.float32], act
    assert resolve(act)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["mlp", "linear_top", "rows"])
def test_the_residual_is_added(kind, dtype):
    weights, x, k = drawn(kind, dtype), torch.randn(77, D).to(dtype), draw_k(77, "mixed")
    residual = torch.randn(77, OUT).to(dtype)
    y = native_output(x, k, weights, residual)
    assert relative_error(y, truth(x, k, weights) + residual.double()) <= TOLERANCE[dtype]


def test_rows_far_apart_and_columns_far_apart_are_read_right():
    weights, k = drawn("mlp", torch.float32), draw_k(31, "mixed")
    wide = torch.randn(31, 3, D)
    for x in (wide[:, 1], wide.flatten(1).t()[:D, :].t(), torch.randn(D, 31).t(), wide[::1, 0].flip(0)):
        assert relative_error(native_output(x, k, weights), truth(x, k, weights)) <= TOLERANCE[torch.float32]


def test_int64_k_is_taken_too():
    weights, x, k = drawn("gated", torch.float32), torch.randn(9, D), draw_k(9, "mixed")
    torch.testing.assert_close(native_output(x, k.long(), weights), native_output(x, k, weights))


@pytest.mark.parametrize("kind", FORMS)
def test_a_token_never_sees_its_neighbours(kind):
    weights, x, k = drawn(kind, torch.float32), torch.randn(90, D), draw_k(90, "mixed")
    clean = native_output(x, k, weights)
    poisoned = x.clone()
    poisoned[7::3] = torch.nan
    kept = ~poisoned.isnan().any(1)
    y = native_output(poisoned, k, weights)
    torch.testing.assert_close(y[kept], clean[kept], rtol=1e-5, atol=1e-6)
    ran = ~kept & (k > 0)
    assert ran.any() and y[ran].isnan().any(1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [20, 90])
@pytest.mark.parametrize("kind", FORMS)
def test_a_token_keeps_its_bits_whatever_its_neighbours_run(kind, tokens, dtype):
    weights, x, k = drawn(kind, dtype), torch.randn(tokens, D).to(dtype), draw_k(tokens, "mixed")
    others, other_k = torch.randn(tokens, D).to(dtype), draw_k(tokens, "mixed")
    others[3::7], other_k[3::7] = x[3::7], k[3::7]
    assert torch.equal(native_output(others, other_k, weights)[3::7], native_output(x, k, weights)[3::7])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 5, 32, 33, 2500])
@pytest.mark.parametrize("kind", FORMS)
def test_few_and_many_tokens_are_right(kind, tokens, dtype):
    compare_with_reference(drawn(kind, dtype), tokens, "mixed")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [9, 40])
@pytest.mark.parametrize("width", [3, 4, 16, 50])
def test_deep_products_are_summed_in_parts(width, tokens, dtype):
    weights = drawn(
        "gated", dtype, act="silu", sizes=(1030 if width % 2 == 0 else 1031, 70, 30 if width == 50 else 4, width)
    )
    x = torch.randn(tokens, weights.w_in.shape[-1]).to(dtype)
    k = torch.randint(0, weights.learners + 1, (tokens,))
    assert relative_error(native_output(x, k, weights), truth(x, k, weights)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("k", [-1, N + 1])
def test_a_k_outside_its_range_is_the_references_error(k):
    weights, choices = drawn("mlp", torch.float32), draw_k(20, "mixed")
    choices[11] = k
    with pytest.raises(UsageError, match=rf"k in \[0, {N}\]"):
        native_output(torch.randn(20, D), choices, weights)


def test_what_it_does_not_cover_runs_on_the_reference():
    x, k = torch.randn(20, D), draw_k(20, "mixed")
    composite = drawn("mlp", torch.float32, act="mul(x, sigmoid(mul(x, 2)))")
    assert "not supported by the native" in cpu.not_covered(act=composite.act, dtype=torch.float32)
    torch.testing.assert_close(native_output(x, k, composite), run_learners(x, k, composite))
    double = drawn("mlp", torch.float64)
    assert "float64" in cpu.not_covered(act="gelu", dtype=torch.float64)
    torch.testing.assert_close(native_output(x.double(), k, double), run_learners(x.double(), k, double))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (7, 130, 2, 65), (256, 32, 6, 16), (300, 40, 3, 450), (34, 18, 3, 10)])
def test_odd_sizes(sizes, dtype):
    weights = drawn("gated", dtype, act="silu", sizes=sizes)
    x, k = torch.randn(201, sizes[0]).to(dtype), torch.randint(0, sizes[2] + 1, (201,))
    assert relative_error(native_output(x, k, weights), truth(x, k, weights)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("tokens", [20, 300])
def test_bfloat16_is_rounded_where_the_dense_layers_do_and_nowhere_else(tokens):
    """Sums are of floats: what is left of the error is the rounding of hidden values and of the answer."""
    weights, x = drawn("mlp", torch.bfloat16, sizes=(512, 40, N, 256)), torch.randn(tokens, 512).bfloat16()
    k = torch.full((tokens,), N)
    w_in, w_out = weights.w_in.double().flatten(0, 1), weights.w_out.double().flatten(1)
    hidden = torch.nn.functional.gelu(x.double() @ w_in.t() + weights.b_in.double().flatten())
    as_dense = (hidden.bfloat16().double() @ w_out.t() + weights.b_out[N].double()).bfloat16()
    y = native_output(x, k, weights)
    # the same but for sums that fell on the other side of a border between two bfloat16
    assert relative_error(y, as_dense.double()) <= 2e-3


LARGE = """
import resource, torch
from acm_compiler.acm import Learners, ops
learners = Learners(32, 32, 4, 1024, form="mlp", act="gelu")
learners.start_random()
x, k = torch.randn(40_000, 32), torch.full((40_000,), 4, dtype=torch.int32)
with torch.no_grad():
    ops.learners(x[:64], k[:64], learners.weights())
    pages = int(open("/proc/self/statm").read().split()[0])
    limit = pages * resource.getpagesize() + 40_000 * 4096  # a quarter of the dense hidden activation
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    print(tuple(ops.learners(x, k, learners.weights()).shape))
    x @ torch.zeros(32, 4096)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited as Linux does it")
def test_a_quarter_of_the_dense_hidden_activation_is_memory_enough():
    done = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "(40000, 32)"
    assert "tried to allocate 655360000 bytes" in done.stderr  # what the dense layer then asks for


SMALL = """
import ctypes, sys, torch
from acm_compiler.acm import Learners, ops
from acm_compiler.codegen.cpu import build

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in
                ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keep")]

library = ctypes.CDLL(None)
library.mallinfo2.restype = Info
tokens, d, width, dtype = int(sys.argv[1]), 1024, int(sys.argv[2]), getattr(torch, sys.argv[3])
torch.set_num_threads(1)  # each thread has buffers of its own
with torch.no_grad():
    first, learners = (
        Learners(d, d, 4, width, form="mlp", act="gelu").to(dtype) for d, width in ((8, 8), (d, width))
    )
    x, k = torch.randn(tokens, d, dtype=dtype), torch.full((tokens,), 4, dtype=torch.int32)
    ops.learners(x[:1, :8], k[:1], first.weights())
    ctypes.CDLL(str(build.library_file())).acm_keep_panels(False)
    before = library.mallinfo2()
    y = ops.learners(x, k, learners.weights())
    after = library.mallinfo2()
kept = after.uordblks + after.hblkhd - before.uordblks - before.hblkhd - y.nbytes
print(kept / (tokens * 4 * width * dtype.itemsize))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it asks glibc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("tokens", "width"), [(48, 128), (400, 2)], ids=["wide", "narrow"])
@pytest.mark.parametrize(
    "vectors", [None, *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("avx2", "default"))]
)
def test_a_small_call_keeps_no_buffer_larger_than_the_dense_hidden_activation(vectors, tokens, width, dtype):
    """Two buffers are meant, hidden values and a panel of weights."""
    environment = os.environ if vectors is None else {**os.environ, "ATEN_CPU_CAPABILITY": vectors}
    command = [sys.executable, "-c", SMALL, str(tokens), str(width), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert 0.9 <= float(done.stdout) <= 2.1


def test_where_torchs_products_are_the_faster_ones_the_reference_stays(monkeypatch, caplog):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delenv("ACM_KERNEL", raising=False)
    with caplog.at_level("INFO", logger="acm_compiler.backend"):
        assert not cpu.take_over()
    assert "macOS" in caplog.text


def test_without_a_compiler_the_reference_stays_and_one_line_says_so(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(build, "_COMPILERS", ())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("ACM_KERNEL", raising=False)
    with caplog.at_level("INFO", logger="acm_compiler.backend"):
        assert not cpu.take_over()
    assert [record.message for record in caplog.records if "no C++ compiler was found" in record.message]
    monkeypatch.setenv("ACM_KERNEL", "cpu")
    with pytest.raises(KernelUnavailable, match="install one"):
        cpu.take_over()


def test_a_compiler_that_fails_is_quoted(monkeypatch, tmp_path):
    broken = tmp_path / "broken++"
    broken.write_text("#!/bin/sh\necho 'error: this is no compiler' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(KernelUnavailable, match="this is no compiler"):
        build.library_file()
    assert not list((tmp_path / "cache" / "acm_compiler").iterdir())


COMPILER = """#!/bin/sh
echo call >> calls
until [ -e began.0 ] && [ -e began.1 ]; do sleep 0.05; done
sleep 0.5
for made; do :; done
echo library > "$made"
"""
ASK = """import sys, pathlib
from acm_compiler.codegen.cpu import build
pathlib.Path(f"began.{sys.argv[1]}").touch()
print(build.library_file())"""


def test_of_two_processes_one_compiles_and_the_other_waits_for_it(tmp_path):
    (tmp_path / "c++").write_text(COMPILER)
    (tmp_path / "c++").chmod(0o700)
    root = str(build.SOURCE.parents[3])
    env = os.environ | {"CXX": str(tmp_path / "c++"), "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": root}
    ask = [sys.executable, "-c", ASK]
    both = [subprocess.Popen([*ask, n], cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True) for n in "01"]
    (first, _), (second, _) = (process.communicate(timeout=120) for process in both)
    assert first == second and first.strip().endswith(".so")
    assert (tmp_path / "calls").read_text() == "call\n"


def test_a_folder_that_knows_no_locks_is_compiled_in_all_the_same(tmp_path, monkeypatch):
    class Refused(FileLock):
        def _acquire(self):
            raise NotImplementedError("no locks here")

    monkeypatch.setattr(build, "FileLock", Refused)
    monkeypatch.setattr(build, "compile_library", lambda command, target: target.touch())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.library_file().is_file()


SWITCHED = """
import logging, torch
logging.basicConfig(level="INFO")
from acm_compiler.acm import check_arguments, ops
from tests.codegen.test_cpu_kernel import drawn, draw_k, D
weights = drawn("mlp", torch.float32)
with torch.no_grad():
    ops.learners(torch.randn(9, D), draw_k(9, "mixed"), weights)
print(torch._C._dispatch_has_kernel_for_dispatch_key("acm::learners", "CPU"))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("switch", "value", "native"), [("ACM_KERNEL", "reference", False), ("ACM_CHECK", "1", True)])
def test_switches_choose_what_runs(switch, value, native, monkeypatch):
    monkeypatch.setenv(switch, value)
    done = subprocess.run([sys.executable, "-c", SWITCHED], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(native)]
    assert ("without the native CPU kernel" in done.stderr) != native


def test_an_unknown_kernel_is_refused(monkeypatch):
    monkeypatch.setenv("ACM_KERNEL", "tritn")
    with pytest.raises(UsageError, match="triton"):
        cpu.take_over()
