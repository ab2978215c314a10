"""Operands that do not fit each other are refused by every implementation of the operators, and nothing is read."""

import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from acm_compiler.acm import ops
from acm_compiler.acm.gated_learners import GATED
from acm_compiler.acm.gradients.operators import LEARNERS_BACKWARD
from acm_compiler.codegen import gpu as cuda
from acm_compiler.codegen.cpu import build as build_cpu
from acm_compiler.codegen.cpu.build import levels_here
from acm_compiler.codegen.gpu.calls import operators
from acm_compiler.errors import UsageError
from tests.acm.test_reference import OUT, D
from tests.helpers.build import planned_site, stack_of
from tests.helpers.sanitizer_cases import T, gate_call, gated_call, learners_call


@pytest.fixture(autouse=True, scope="module")
def native():
    """The kernel is compiled (once per machine) and in charge."""
    ops.load_kernels("cpu")
    assert torch._C._dispatch_has_kernel_for_dispatch_key("acm::learners", "CPU")


def traced(op):
    """The operator as a compiler sees it."""

    def call(*args, **kwargs):
        with FakeTensorMode() as mode:
            return op(*(arg if arg is None else mode.from_tensor(arg) for arg in args), **kwargs)

    return call


IMPLEMENTATIONS = {
    "learners": {
        "native": ops.LEARNERS,
        "reference": ops.REFERENCE,
        "traced": traced(ops.LEARNERS),
        "cuda": operators.learners,  # looks at no device before it has looked at the operands
        "backward": lambda *args, **kwargs: LEARNERS_BACKWARD(torch.randn(T, OUT), *args, **kwargs),
    },
    "gate": {
        "native": ops.GATE,
        "reference": ops.GATE_REFERENCE,
        "traced": traced(ops.GATE),
        "cuda": operators.gate,
    },
}


SCALARS = ("knob", "k_lo", "k_hi")


def wrong_ones(tensor):
    """The same operand, cut and grown along every axis, in one dimension more, and of another type."""
    for axis, size in enumerate(tensor.shape):
        yield tensor.narrow(axis, 0, size - 1)
        yield torch.cat([tensor, tensor.narrow(axis, 0, 1)], axis)
    yield tensor[None]
    yield tensor.double() if tensor.is_floating_point() else tensor.float()
    yield tensor.to("meta")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS["learners"])
@pytest.mark.parametrize("kind", ["gated", "per_k", "linear_top", "rows", "cols"])
def test_an_operand_of_the_learners_that_does_not_fit_is_refused(kind, implementation):
    args, kwargs = learners_call(kind)
    call = IMPLEMENTATIONS["learners"][implementation]
    for name, good in args._asdict().items():
        for wrong in () if good is None else wrong_ones(good):
            # the message may name another operand, where that one is the first to disagree with w_in
            with pytest.raises(UsageError, match=r"^operand \w+ of acm::learners does not fit the others"):
                call(*args._replace(**{name: wrong}), **kwargs)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS["gate"])
def test_an_operand_of_the_gate_that_does_not_fit_is_refused(implementation):
    args, kwargs = gate_call()
    call = IMPLEMENTATIONS["gate"][implementation]
    for name, good in args._asdict().items():
        for wrong in wrong_ones(good):
            # tokens may be as many as they are, and of any type
            if (name in ("x", *SCALARS) and wrong.dtype != good.dtype) or (name == "x" and wrong.shape[1:] == (D,)):
                continue
            with pytest.raises(UsageError, match="of acm::gate does not fit the others"):
                call(*args._replace(**{name: wrong}), **kwargs)
    for wrong in ({"rule": "logit"}, {"k_min": -1}):
        with pytest.raises(UsageError, match="unknown choice of acm::gate"):
            call(*args, **kwargs | wrong)


@pytest.mark.parametrize("op", [GATED, traced(GATED), operators.gated_learners], ids=["native", "traced", "cuda"])
@pytest.mark.parametrize("norm", [True, False], ids=["norm", "plain"])
def test_an_operand_of_gate_and_learners_in_one_that_does_not_fit_is_refused(op, norm, monkeypatch):
    monkeypatch.setattr(cuda, "machine_of", lambda device: cuda.Machine(arch=90, processors=3))
    args, kwargs = gated_call("gated")
    if not norm:
        args, kwargs = args._replace(norm_weight=None, norm_bias=None), kwargs | {"norm_eps": None}
    for name, good in args._asdict().items():
        for wrong in () if good is None else wrong_ones(good):
            if name in (*SCALARS, "norm_weight", "norm_bias") and wrong.dtype != good.dtype:
                continue
            with pytest.raises(UsageError, match=r"^operand \w+ of acm::\w+ does not fit|chooses more learners than"):
                op(*args._replace(**{name: wrong}), **kwargs)
    with pytest.raises(UsageError, match="k up to 4, expected at most 3"):
        op(*args, **kwargs | {"k_min": 1})


def test_an_acm_names_itself_eager_and_compiled():
    torch._dynamo.reset()
    model = stack_of(planned_site("a"), planned_site("b"))
    compiled = torch.compile(model, backend="acm", dynamic=True)
    with torch.no_grad():
        for call in (model, compiled):
            for features in (7, 9, 64):
                with pytest.raises(UsageError, match=r"^a: the input must have as many features.*expected \[..., 8\]"):
                    call(torch.randn(2, 5, features))
            with pytest.raises(UsageError, match=r"^a: .*type.*found float64, expected float32"):
                call(torch.randn(2, 5, 8, dtype=torch.float64))
            assert call(torch.randn(2, 5, 8)).shape == (2, 5, 8)
    torch._dynamo.reset()


def file_of(compiler: str, name: str) -> str:
    """The path of one of the compiler's libraries; the name alone where it has none."""
    command = [compiler, f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the sanitizers are preloaded as Linux does it")
def test_no_call_reads_or_writes_beyond_its_tensors_or_does_what_is_undefined(tmp_path, monkeypatch):
    compiler = build_cpu.find_compiler()
    # libstdc++ too: the sanitizers look for its exceptions before torch brings it
    preloaded = [file_of(compiler, name) for name in ("libasan.so", "libubsan.so", "libstdc++.so.6")]
    if not all("/" in file for file in preloaded):
        pytest.skip("the compiler has no AddressSanitizer or UndefinedBehaviorSanitizer")
    library, flags = tmp_path / "learners.so", ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    build_cpu.compile_library([*build_cpu.command_for(levels_here()[0]), *flags], library)
    monkeypatch.setenv("LD_PRELOAD", " ".join(preloaded))
    monkeypatch.setenv("ASAN_OPTIONS", "detect_leaks=0")
    monkeypatch.setenv("ACM_KERNEL", "reference")  # the library of other runs stays out
    command = [sys.executable, "-m", "tests.helpers.sanitizer_cases", str(library), "10000"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    counts = [line.split() for line in done.stdout.splitlines()]
    assert len(counts) == 6 and all(int(answered) > 100 and int(refused) > 100 for _, answered, refused in counts)
