"""The backward of the Triton kernels without a GPU: in the interpreter, and compiled ahead of time."""

from dataclasses import replace
from importlib.metadata import version

import pytest

pytest.importorskip("triton")

from acm_compiler.codegen.gpu.ahead.build import build
from acm_compiler.codegen.gpu.gradients.stages import parts_of, weights_loads
from acm_compiler.codegen.gpu.stages import Loads, Machine, loads_of, puts_fences
from tests.codegen.test_kernels import (
    PROJECTION,
    SWIGLU,
    VIT,
    interpret,
    require_products_in_flight,
    require_turns,
)
from tests.helpers.gradient_kernels import gradient_kernels

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


def test_parts_of_a_sum_fill_the_last_wave_where_there_are_rows_enough_to_pay_for_them():
    assert parts_of(264, 264, 25216) == 1
    assert parts_of(144, 264, 25216) > 1
    assert parts_of(144, 264, 64) == 1


# hidden was timed with 12; kept values come on top of an epilogue that fills all registers
SPILLS = {"hidden": 24 if version("triton").startswith("3.9") else 12, "layer1 kept": 56}


def require_good(spec, arch: int, kernels) -> None:
    """Little spills, CTAs share a multiprocessor as tiles say, tensor cores are used where products may round."""
    for kernel in kernels:
        built = build(kernel, spec.dtype, arch)
        assert built.spills <= SPILLS.get(kernel.name, 0), built
        if kernel.tile is None:  # sums and activations, no products
            continue
        exact = spec.dtype == "fp32" and not spec.tf32  # too many programs are started there, and wait
        assert built.resident >= (1 if exact else kernel.tile.resident), built
        # without fences nothing is copied ahead of wgmma but in bulk
        found = {name for name, count in built.instructions.items() if count}
        assert found & {"LDGSTS", "UTMALDG"} or ("HGMMA" in found and not puts_fences()), built
        assert found & {"HMMA", "HGMMA"} or exact, built
        if spec.width % kernel.tile.m == 0 or not kernel.name.startswith("weights"):
            require_products_in_flight(built)


@pytest.mark.parametrize("arch", [80, 90])
def test_the_backward_of_a_vit_is_built_without_spills(arch):
    spec = SPECS["mlp bf16"]
    kernels = gradient_kernels(spec, arch, 25216, turns=False)
    kernels = [kernel for kernel in kernels if not kernel.name.startswith("layer")]
    require_good(spec, arch, kernels)


def test_a_kept_first_layer_and_what_reaches_it_take_turns_on_sm_90():
    spec = SPECS["mlp bf16"]
    kernels = {kernel.name: kernel for kernel in gradient_kernels(spec, 90, 25216)}
    require_turns([kernels["layer1 kept"], kernels["reached"]], spec.dtype)


@pytest.mark.parametrize("spec", [SPECS["mlp bf16"], SPECS["gated bf16"]], ids=["mlp", "gated"])
@pytest.mark.parametrize("fenced", [True, False])
def test_products_of_sixteen_bits_are_read_in_bulk_on_hopper(spec, fenced):
    machine = Machine(arch=90, processors=132, fenced=fenced)
    bulk = Loads(gather=False, a_desc=True, w_desc=True)
    assert weights_loads(spec, machine, spec.d_in) == loads_of(spec, machine, None, in_order=True) == bulk
    assert not weights_loads(spec, machine, spec.d_in + 1).a_desc


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("name", SPECS)
def test_every_backward_is_built_without_spills(name, arch):
    for tokens in (300, 25216):
        require_good(SPECS[name], arch, gradient_kernels(SPECS[name], arch, tokens, turns=False))
