"""The backward of the Triton kernels without a GPU: in the interpreter, and compiled ahead of time."""

from dataclasses import replace

import pytest

pytest.importorskip("triton")

from acm_compiler.codegen.gpu.ahead import build
from acm_compiler.codegen.gpu.gradients.ahead import gradient_kernels
from acm_compiler.codegen.gpu.gradients.launch import gradient_tile
from acm_compiler.codegen.gpu.stages import puts_fences
from tests.codegen.test_kernels import PROJECTION, SWIGLU, VIT, interpret

SPECS = {
    f"{spec.form} {dtype}": replace(spec, residual=False, dtype=dtype.removeprefix("t"), tf32=dtype == "tfp32")
    for spec in (VIT, SWIGLU, PROJECTION)
    for dtype in ("bf16", "fp32", "tfp32")
}


def test_gradients_equal_float64_in_the_interpreter():
    interpret("gradient_cases", "-m", "not slow")


@pytest.mark.slow
def test_all_gradients_equal_float64_in_the_interpreter():
    interpret("gradient_cases", "-m", "slow")


@pytest.mark.parametrize("name", SPECS)
def test_blocks_read_only_what_was_written(name):
    spec = SPECS[name]
    hidden, tokens, weights = (gradient_tile(spec, kernel) for kernel in ("hidden", "tokens", "weights"))
    assert hidden.m % tokens.m == 0 and hidden.n % tokens.k == 0 and hidden.n % weights.m == 0


def require_good(spec, arch: int, kernels) -> None:
    """Nothing spills, CTAs share a multiprocessor as tiles say, tensor cores are used where products may round."""
    for kernel in kernels:
        built = build(kernel, spec.dtype, arch)
        assert built.spills == 0 and built.resident >= kernel.tile.resident, built
        if kernel.name == "bias":  # sums, no products
            continue
        # without fences nothing is copied ahead of wgmma
        assert built.instructions["LDGSTS"] or (built.instructions["HGMMA"] and not puts_fences()), built
        found = {name for name, count in built.instructions.items() if count}
        assert found & {"HMMA", "HGMMA"} or (spec.dtype == "fp32" and not spec.tf32), built


@pytest.mark.parametrize("arch", [80, 90])
def test_the_backward_of_a_vit_is_built_without_spills(arch):
    require_good(SPECS["mlp bf16"], arch, gradient_kernels(SPECS["mlp bf16"], arch)[1:4])


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("name", SPECS)
def test_every_backward_is_built_without_spills(name, arch):
    require_good(SPECS[name], arch, gradient_kernels(SPECS[name], arch))
