"""Items into which the native CPU kernel cuts its work for many threads, in multiply-adds; answers never show them."""

import ctypes
import heapq
import os
import subprocess
import sys
from itertools import groupby

import pytest
import torch

from acm_compiler.acm import ops
from acm_compiler.acm.arguments import LearnerWeights
from acm_compiler.codegen.cpu import build
from acm_compiler.errors import UsageError
from tests.codegen.test_cpu_kernel import FORMS, draw_k, drawn, native_output

THREADS = (2, 8, 16, 32, 64)
TOKENS = (197, 394, 1576, 4096, 25_216)
D, HIDDEN, N, HEADS = 768, 3072, 4, 12
LEAST = 1 << 15  # multiply-adds that are worth a thread


@pytest.fixture(scope="module")
def library():
    """The compiled kernel, in charge; its hooks for tests."""
    ops.load_kernels("cpu")
    return ctypes.CDLL(str(build.library_file()))


def site(kind: str, dtype: torch.dtype = torch.float32) -> tuple[list[torch.Tensor | None], str]:
    """Operands from w_in to w_top of a site of ViT-B, all of one value, and its form."""
    form = {"svd": "linear"}.get(kind, kind)

    def of(*shape: int) -> torch.Tensor:
        return torch.zeros(1, dtype=dtype).expand(shape)

    if form in ("rows", "cols"):
        part = D // HEADS // N
        w_in = of(N, HEADS, part, D) if form == "rows" else of(N, D, HEADS, part)
        return [w_in, None, None, None, None, of(N + 1, D), None], form
    width = HIDDEN // N if form != "linear" else D // 2 // N
    up = of(N, width, D) if form == "gated" else None
    return [of(N, width, D), None, up, None, of(D, N, width), of(N + 1, D), None], form


def plans_of(library, threads: int, x, k, weights, form: str) -> list[list[int]]:
    """The items' sizes of each plan that a call makes for so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    library.acm_watch_plans()
    try:
        torch.ops.acm.learners_cpu(x, k, *LearnerWeights(*weights), form=form, act="gelu")
    finally:
        torch.set_num_threads(before)
        room = (ctypes.c_int64 * 100_000)()
        count = library.acm_watched_plans(room, len(room))
    assert 0 < count <= len(room)
    return [list(sizes) for some, sizes in groupby(room[:count], bool) if some]


def busy(sizes: list[int], threads: int) -> tuple[int, float]:
    """Number of threads that get an item, where each takes the next one, and their mean load over the largest."""
    loads = [0] * threads
    heapq.heapify(loads)
    for size in sizes:
        heapq.heapreplace(loads, loads[0] + size)
    return sum(load > 0 for load in loads), sum(loads) / threads / max(loads)


def choices(tokens: int, pattern: str) -> torch.Tensor:
    """k of each token: one for all, a share of each, few with a high one."""
    if pattern == "mixed":
        return torch.arange(tokens, dtype=torch.int32) % N + 1
    k = torch.full((tokens,), 1 if pattern == "one high" else int(pattern), dtype=torch.int32)
    k[0] = N if pattern == "one high" else k[0]
    return k


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("kind", ["mlp", "svd", "rows", "cols"])
def test_nine_of_ten_threads_have_work_in_items_of_like_size(library, kind, threads):
    weights, form = site(kind)
    for tokens in TOKENS:
        x = torch.zeros(1, D).expand(tokens, D)
        for pattern in ("1", "2", "3", "4", "mixed", "one high"):
            for sizes in plans_of(library, threads, x, choices(tokens, pattern), weights, form):
                case = (tokens, pattern, len(sizes))
                working, share = busy(sizes, threads)
                assert working >= 0.9 * threads and share >= 0.75, case
                assert max(sizes) * len(sizes) <= 2 * sum(sizes), case


@pytest.mark.parametrize("tokens", [1, 8])
def test_a_decoders_few_tokens_have_work_for_as_many_threads_as_pay(library, tokens):
    weights, form = site("gated")
    x = torch.zeros(1, D).expand(tokens, D)
    for threads in THREADS:
        for k in range(1, N + 1):
            for sizes in plans_of(library, threads, x, torch.full((tokens,), k), weights, form):
                pays = min(threads, sum(sizes) // LEAST)
                assert busy(sizes, threads)[0] >= 0.85 * pays, (threads, k, len(sizes))
                assert max(sizes) * len(sizes) <= 2 * sum(sizes), (threads, k, len(sizes))


def test_two_threads_take_even_strips_of_one_tokens_columns(library):
    """Many slices of few columns, put together, were read a quarter slower."""
    weights = drawn("gated", torch.float32, sizes=(576, 576, 8, 192)).tensors
    for k in (3, 5, 8):
        plans = plans_of(library, 2, torch.zeros(1, 576), torch.full((1,), k), weights, "gated")
        assert [len(set(sizes)) for sizes in plans] == [1, 1]
        assert [len(sizes) % 2 for sizes in plans] == [0, 0]


def test_what_is_too_little_for_two_threads_is_not_shared(library):
    weights = drawn("linear", torch.float32)
    for threads in THREADS:
        plans = plans_of(library, threads, torch.zeros(9, 24), choices(9, "mixed"), weights.tensors, "linear")
        assert [len(sizes) for sizes in plans] == [1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [0, 3, 300, 1300])
@pytest.mark.parametrize("kind", FORMS)
def test_threads_give_the_same_bits(library, kind, tokens, dtype):
    weights, x, k = drawn(kind, dtype), torch.randn(tokens, 24).to(dtype), draw_k(tokens, "mixed")
    x[1::7] = torch.nan
    assert_same_bits(x, k, weights, (2, 7))


@pytest.mark.parametrize("kind", ["mlp", "gated", "per_k", "linear_top"])
def test_shared_panels_waiting_sums_and_many_chunks_give_the_same_bits(library, kind):
    """Layers deeper than a panel; k of few tokens high; more tokens than a chunk has."""
    for sizes, tokens in (((1100, 200, N, 300), 200), ((40, 70, N, 33), 4500)):
        weights, x = drawn(kind, torch.float32, sizes=sizes), torch.randn(tokens, sizes[0])
        assert_same_bits(x, draw_k(tokens, "mixed"), weights, (2, 7, 16))


def assert_same_bits(x, k, weights, numbers) -> None:
    before = torch.get_num_threads()
    try:
        outputs = []
        for threads in (1, *numbers):
            torch.set_num_threads(threads)
            outputs.append(native_output(x, k, weights))
    finally:
        torch.set_num_threads(before)
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("k_type", [torch.int32, torch.int64], ids=str)
def test_many_tokens_are_sorted_by_all_threads_into_the_same_order(library, k_type):
    tokens = (1 << 16) + 77
    weights, x, k = drawn("linear", torch.float32), torch.randn(tokens, 24), draw_k(tokens, "mixed").to(k_type)
    assert_same_bits(x, k, weights, (2, 7))
    torch.testing.assert_close(native_output(x[-50:], k[-50:], weights), native_output(x, k, weights)[-50:])
    k[tokens - 3] = N + 1
    with pytest.raises(UsageError, match=rf"k in \[0, {N}\]"):
        native_output(x, k, weights)


MANY = """
import ctypes, torch
from acm_compiler.acm import ops
from acm_compiler.codegen.cpu import build
from tests.codegen.test_cpu_kernel import drawn, native_output
ops.load_kernels("cpu")
worked = ctypes.CDLL(str(build.library_file())).acm_threads_that_worked
torch.manual_seed(0)
for form in ("mlp", "gated", "linear_top", "rows", "cols"):
    weights = drawn(form, torch.float32, sizes=(24, 40, 4, 200))
    x, k = torch.randn(6000, 24), torch.randint(0, 5, (6000,))
    answers = []
    for threads in (1, 2, 8, 16, 32, 64):
        torch.set_num_threads(threads)
        worked()  # one thread by itself is not counted
        answers.append(native_output(x, k, weights))
        print(threads, worked(), torch.equal(answers[0], answers[-1]))
"""


def test_up_to_64_threads_all_have_work_and_give_the_same_bits():
    """Counted with more threads than cores: who has work does not depend on when they run."""
    environment = {**os.environ, "OMP_NUM_THREADS": "64", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-c", MANY]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    rows = [line.split() for line in done.stdout.splitlines()]
    assert len(rows) == 30
    assert [row for row in rows if int(row[1]) < 0.9 * int(row[0]) and row[0] != "1"] == []
    assert {row[2] for row in rows} == {"True"}


FREED = """
import resource, torch
from acm_compiler.acm import Learners, ops
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
learners = Learners(16, 16, 4, 5000, form="mlp", act="gelu")
learners.start_random()
torch.set_num_threads(1)
with torch.no_grad():
    x, k = torch.randn(1000, 16), torch.full((1000,), 4)
    ops.learners(x[:9], k[:9], learners.weights())
    before = resident()
    ops.learners(x, k, learners.weights())  # 80 MB of hidden values
    print((resident() - before) >> 20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_a_large_buffer_is_freed_when_its_call_ends():
    done = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 16
