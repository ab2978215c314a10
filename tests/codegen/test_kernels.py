"""The Triton kernels without a GPU: in the interpreter, and compiled ahead of time for the architectures they serve."""

import contextlib
import itertools
import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version

import pytest

pytest.importorskip("triton")

import numpy as np
import torch
from torch._inductor.virtualized import V
from triton.runtime.errors import OutOfResources
from typer.testing import CliRunner

from acm_compiler.acm import ops
from acm_compiler.acm.reference import choose_k
from acm_compiler.backend import choose_implementation
from acm_compiler.cli import app
from acm_compiler.codegen import gpu as cuda
from acm_compiler.codegen.gpu import gate_not_covered, not_covered, take_over
from acm_compiler.codegen.gpu.ahead import forward
from acm_compiler.codegen.gpu.ahead.build import build
from acm_compiler.codegen.gpu.ahead.forward import gate_kernels_of, kernels_of
from acm_compiler.codegen.gpu.calls import operators
from acm_compiler.codegen.gpu.calls.traced import stays_whole
from acm_compiler.codegen.gpu.gate_spec import Cut, GateSpec, cut_of
from acm_compiler.codegen.gpu.spec import KernelSpec, spec_of_site
from acm_compiler.codegen.gpu.stages import (
    Machine,
    build_options,
    loads_of,
    permutes_rows,
    products_of,
    puts_fences,
    takes_turns_on,
)
from acm_compiler.codegen.gpu.start import Launcher
from acm_compiler.codegen.gpu.tiles import TABLE, bucket_of, choose_tiles, tile_of
from acm_compiler.passes.lower.verify import Call, GateCall
from acm_compiler.site import ACTIVATIONS
from benchmarks.first_gpu_run.speed import GATE_CUTS
from tests.helpers import ROOT, ttir
from tests.helpers.build import plan_of, planned_site, sliced_site
from tests.helpers.gradient_kernels import gradient_kernels
from tests.helpers.sanitizer_cases import gate_call, learners_call

TOKENS = 128 * 197
VIT = KernelSpec(
    form="mlp",
    act="gelu",
    learners=4,
    width=768,
    head=1,
    d_in=768,
    d_out=768,
    dtype="bf16",
    bias_in=True,
    second="shared",
    residual=True,
    tf32=False,
)
PROJECTION = replace(VIT, form="linear", act="identity", width=96, bias_in=False)
SWIGLU = replace(VIT, form="gated", act="silu", d_in=2048, width=1024, d_out=2048, bias_in=False)
ROWS = replace(VIT, form="rows", act="identity", width=192, head=16, bias_in=False, second="none")
COLS = replace(ROWS, form="cols")


def interpret(cases: str, *options: str) -> None:
    """Run a file of tests/helpers where triton runs in its interpreter, which is decided at its import."""
    command = [sys.executable, "-m", "pytest", f"tests/helpers/{cases}.py", "-q", "-x", *options]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_kernels_equal_the_reference_in_the_interpreter():
    interpret("interpreter_cases", "-m", "not slow")


@pytest.mark.slow
def test_all_kernels_equal_the_reference_in_the_interpreter():
    interpret("interpreter_cases", "-m", "slow")


def require_products_in_flight(built) -> None:
    """No product of wgmma's waits for the one before: an arrival and a wait around each would be two for one."""
    assert built.instructions["WARPGROUP"] <= built.instructions["HGMMA"], built


# instructions that a Triton adds where wgmma's sums fill all registers (sm_90): 3.6 beside a residual, 3.9 beside a
# gathered operand
SPILLS = {"3.6": {"layer2 w_out": 6}, "3.9": {"layer1": 27}}.get(version("triton")[:3], {})


def require_good(spec: KernelSpec, arch: int, tokens: int, *, turns: bool = False) -> None:
    """Nothing spills, CTAs share a multiprocessor as the tiles say, tensor cores and asynchronous copies are used."""
    for kernel in kernels_of(spec, arch, tokens, turns=turns):
        built = build(kernel, spec.dtype, arch)
        assert built.spills <= SPILLS.get(kernel.name, 0), built
        if kernel.tile is None:
            continue
        assert built.resident >= kernel.tile.resident, built
        found = {name for name, count in built.instructions.items() if count}
        exact = spec.dtype == "fp32" and not spec.tf32
        if kernel.name.startswith("one"):
            assert not found, built  # neither matrix products nor copies into shared memory
            continue
        few = kernel.name.startswith("few")  # of which 32 rows at a time are too few for the newest
        assert ("HMMA" if few else {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}[arch]) in found or exact, built
        # without fences what no descriptor can load is not copied ahead of wgmma: slices by columns
        waits = arch == 90 and not puts_fences() and (spec.form, kernel.name) == ("cols", "layer2 w_in")
        assert found & {"UTMALDG", "LDGSTS"} or waits, built
        require_products_in_flight(built)


@pytest.mark.parametrize("arch", [80, 90])
def test_the_kernels_of_a_vit_are_built_as_designed(arch):
    require_good(VIT, arch, TOKENS)
    layer1, layer2 = (kernel for kernel in kernels_of(VIT, arch, TOKENS, turns=False) if kernel.tile)
    if arch == 90:
        assert layer1.tile.resident == layer2.tile.resident == 2
        gathered, bulk = build(layer1, "bf16", 90).instructions, build(layer2, "bf16", 90).instructions
        assert gathered["UTMALDG"] and bool(gathered["LDGSTS"]) == puts_fences()  # x through the permutation
        assert bulk["UTMALDG"] and not bulk["LDGSTS"]


IN_TURNS = (
    VIT,
    replace(VIT, residual=False),
    replace(VIT, dtype="fp16", act="relu", bias_in=False),
    SWIGLU,
    replace(PROJECTION, width=256),
)


# kept values come on top of an epilogue that fills all registers
SPILLS_IN_TURNS = {"reached": 12, "layer1 kept": 30}


def require_turns(kernels, dtype: str) -> None:
    """Kernels whose groups of warps take turns, of bulk copies alone: little spills, no product waits for the last."""
    for kernel in kernels:
        built = build(kernel, dtype, 90)
        assert built.spills <= SPILLS_IN_TURNS.get(kernel.name, 0) and built.resident == 1, built
        assert built.instructions["UTMALDG"] and not built.instructions["LDGSTS"]
        require_products_in_flight(built)


@pytest.mark.parametrize("spec", IN_TURNS[:1] + IN_TURNS[3:4], ids=str)
def test_groups_of_warps_take_turns_on_sm_90(spec):
    kernels = [kernel for kernel in kernels_of(spec, 90, TOKENS) if kernel.tile]
    assert all(kernel.tile.turns for kernel in kernels) and len(kernels) == 2
    require_turns(kernels, spec.dtype)


@pytest.mark.slow
@pytest.mark.parametrize("spec", IN_TURNS, ids=str)
def test_all_kernels_that_take_turns_are_built_as_designed(spec):
    for act in ACTIVATIONS if spec is VIT else (spec.act,):
        one = replace(spec, act=act)
        kernels = [*kernels_of(one, 90, TOKENS), *gradient_kernels(replace(one, residual=False), 90, TOKENS)]
        turns = [kernel for kernel in kernels if kernel.tile and kernel.tile.turns]
        assert turns or act in ("softplus", "mish")
        require_turns(turns, spec.dtype)


def test_turns_are_taken_where_wgmma_is_and_tiles_fill_the_device():
    assert choose_tiles(VIT, 90, 4096, turns=True).layer1.turns
    assert not choose_tiles(VIT, 90, 2048, turns=True).layer1.turns
    assert not choose_tiles(VIT, 90, 4096).layer1.turns
    others = {"dtype": "fp32"}, {"act": "mish"}, {"d_in": 771}, {"second": "top"}, {"second": "per_k"}, {"width": 96}
    for change in others:
        assert not choose_tiles(replace(VIT, **change), 90, TOKENS, turns=True).layer1.turns, change
    assert takes_turns_on(90) and not takes_turns_on(80) and not takes_turns_on(100)


def test_large_calls_stay_operators_in_graphs_unless_no_python_is_there(monkeypatch):
    monkeypatch.setattr(cuda, "machine_of", lambda device: Machine(arch=90, processors=132, turns=True))
    x = torch.empty(TOKENS, VIT.d_in, device="meta")
    assert stays_whole(VIT, x)
    assert not stays_whole(VIT, x[:4096])
    assert not stays_whole(replace(VIT, dtype="fp32"), x)
    with V.set_aot_compilation(True):
        assert not stays_whole(VIT, x)


def test_a_k_that_does_not_exist_is_caught_on_the_device():
    count = kernels_of(VIT, 90, TOKENS)[0]
    assert "__assertfail" in build(count, "bf16", 90).ptx


GATE = GateSpec(d_in=768, width=64, columns=5, k_min=0, rule="damage", dtype="bf16", gate_dtype="bf16")


@pytest.mark.parametrize("arch", [80, 90])
def test_a_gate_is_built_as_designed(arch):
    built = build(gate_kernels_of(GATE, arch, TOKENS)[0], "bf16", arch)
    assert built.spills == 0 and built.resident >= (4 if arch == 80 else 3)
    found = {name for name, count in built.instructions.items() if count}
    assert found == (
        {"HMMA", "LDGSTS"} if arch == 80 else {"HGMMA", "UTMALDG", "WARPGROUP"}
    )  # whether there are fences or not


@pytest.mark.parametrize("fold", [ttir.from_left, ttir.from_right, ttir.by_halves])
def test_the_compiled_choice_of_a_gate_is_legal_whatever_its_utilities_are(fold):
    """A compiled argmax over NaN gives any column, those that pad it among them."""
    text = build(gate_kernels_of(replace(GATE, k_min=1), 90, TOKENS)[0], "bf16", 90).ttir
    name, rows = ttir.utility_of(text), np.random.default_rng(0).standard_normal((64, 16)).astype(np.float32)
    rows[0], rows[1, 2], rows[2, :5], rows[3, 5:], rows[4] = np.nan, np.nan, np.nan, np.nan, -np.inf
    loads = dict(zip(("k_lo", "k_hi"), re.findall(r"(%\w+) = tt.load %k_(?:lo|hi) ", text), strict=True))
    for low, high in ((1, 5), (2, 4), (4, 2), (-3, 99)):
        k = ttir.stored(text, {name: rows, loads["k_lo"]: np.int32(low), loads["k_hi"]: np.int32(high)}, fold)
        bounds = (torch.tensor(bound, dtype=torch.int32) for bound in (low, high))
        assert k.tolist() == choose_k(torch.from_numpy(rows)[:, :5], *bounds, 1).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("d_in", [64, 1024, 4096, 8192, 16384])
def test_copies_of_rows_of_every_width_are_built_without_spills(d_in):
    """Calls of more tokens than a sort copies rows of."""
    kernels = kernels_of(replace(VIT, d_in=d_in), 90, 1 << 17)
    assert [kernel.name for kernel in kernels] == ["count", "place", "permute", "layer1", "layer2 w_out"]
    assert build(kernels[2], "bf16", 90).spills == 0


@pytest.mark.parametrize("arch", [80, 90])
def test_the_wide_gates_of_a_llama_are_built_as_designed(arch):
    """Many programs take a part of the first product each, for any number of tokens, and others add them up."""
    llama = replace(GATE, d_in=4096, width=432)
    for tokens in (1, 512, 8192):
        parts, sums = gate_kernels_of(llama, arch, tokens)
        assert (parts.name, sums.name) == ("gate parts", "gate sum")
        product, added = (build(kernel, "bf16", arch) for kernel in (parts, sums))
        assert product.spills == added.spills == 0
        bulk = arch == 90 and tokens > 64
        assert bool(product.instructions["HGMMA"]) == bool(product.instructions["UTMALDG"]) == bulk
        assert bool(product.instructions["LDGSTS"]) == (not bulk and tokens > 1)
    assert gate_kernels_of(GATE, arch, 1)[0].name == "gate"  # a small gate is one launch


def test_the_parts_of_a_gate_fill_the_device():
    """Few rows: the product is split over more features; rows that bulk copies cannot read come by pointers."""
    llama, hopper = replace(GATE, d_in=4096, width=432), Machine(arch=90, processors=132)
    for tokens in (128, 512, 2048, 8192, 1 << 20):
        cut = cut_of(llama, tokens, hopper)
        programs = -(-tokens // cut.tile.m) * -(-432 // cut.tile.n) * -(-4096 // cut.span)
        assert cut.bulk and (programs >= 64 or cut.span == 512)
        assert tokens > 8192 or programs <= 132 * cut.tile.resident
    odd, askew = cut_of(replace(llama, d_in=4098), 2048, hopper), cut_of(llama, 2048, hopper, aligned=False)
    assert not odd.bulk and not askew.bulk and odd.tile.m == askew.tile.m == 32  # too few rows for wgmma


GATE_TYPES = {"bf16": ("bf16", "bf16"), "mixed": ("bf16", "fp32"), "turned": ("fp32", "bf16"), "fp32": ("fp32", "fp32")}


def gates_of(types: str, sizes, counts) -> list[tuple[GateSpec, int]]:
    """Gates of every size with how many tokens they serve, of 4 and of 16 learners."""
    dtype, gate_dtype = GATE_TYPES[types]
    return [
        (replace(GATE, dtype=dtype, gate_dtype=gate_dtype, width=width, d_in=d_in, columns=columns), tokens)
        for (width, d_in), columns, tokens in itertools.product(sizes, (17, 5), counts)
    ]


def require_no_spills(gates, arch: int) -> int:
    """Nothing spills in any kernel of these gates, and of more than 16 choices next to nothing.

    How many different kernels there are: sizes are but numbers to most.
    """
    seen = set()
    for spec, tokens in gates:
        for kernel in gate_kernels_of(spec, arch, tokens):
            blocks = kernel.constants.get("G", 0) > kernel.constants.get("GP", 0)  # a loop over them, or none
            rest = {name: value for name, value in kernel.constants.items() if name not in ("G", "C", "SLOTS", "ROW")}
            if (kind := str((kernel.name, rest, kernel.odd, blocks))) in seen:
                continue
            seen.add(kind)
            built = build(kernel, spec.dtype, arch)
            assert built.spills <= (10 if kernel.name == "gate" and spec.columns > 16 else 0), (spec, tokens, built)
            # fp32 gates stay off wgmma, whose operands in registers old versions of ptxas get wrong
            assert not (built.instructions["HGMMA"] and spec.gate_dtype == "fp32")
    return len(seen)


@pytest.mark.parametrize("arch", [80, 90])
def test_gates_that_once_spilled_are_built_without_spills(arch):
    mixed, turned, exact = (GATE_TYPES[name] for name in ("mixed", "turned", "fp32"))
    hard = ((432, mixed, 32, 768), (256, turned, 1, 768), (432, exact, 1, 768), (432, ("bf16", "bf16"), 32, 777))
    for width, (dtype, gate_dtype), tokens, d_in in hard:
        spec = replace(GATE, width=width, dtype=dtype, gate_dtype=gate_dtype, d_in=d_in)
        assert require_no_spills([(spec, tokens)], arch) == (1 if width == 256 else 2)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize(("tile", "span"), GATE_CUTS)
def test_gates_of_one_token_cut_in_other_ways_are_built_without_spills(tile, span, arch, monkeypatch):
    monkeypatch.setattr(forward, "cut_of", lambda *_: Cut(tile=tile_of(tile), bulk=False, span=span))
    for kernel in gate_kernels_of(replace(GATE, d_in=4096, width=432), arch, 1):
        built = build(kernel, "bf16", arch)
        assert built.spills == 0 and built.resident >= 2, built


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("types", GATE_TYPES)
def test_gates_of_every_size_are_built_without_spills(types, arch):
    """Their registers do not hang on d_in, if it fills steps and aligns rows or does not; widths are rounded up."""
    sizes = itertools.product((16, 32, 64, 128, 256, 257, 1000), (64, 777, 4096, 16384, 16399))
    assert require_no_spills(gates_of(types, list(sizes), (1, 32, 64, TOKENS)), arch) > 80


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("spec", [PROJECTION, SWIGLU, ROWS, COLS], ids=lambda spec: spec.form)
def test_every_form_is_built_as_designed(spec, arch):
    for second in ("shared", "top", "per_k") if spec.second != "none" else ("none",):
        require_good(replace(spec, second=second), arch, TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("row", TABLE, ids=str)
def test_every_row_of_the_table_holds_what_it_says(row):
    dtype, tf32 = {"16": ("bf16", False), "tf32": ("fp32", True), "fp32": ("fp32", False)}[row.dtype]
    kinds = {
        "plain": (VIT,),
        "narrow": (PROJECTION,),
        "gated": (SWIGLU,),
        "sliced": (ROWS, COLS),
        "one": (VIT, SWIGLU, PROJECTION),
        "few": (VIT, PROJECTION),
        "few-gated": (SWIGLU,),
    }
    for spec in (replace(spec, dtype=dtype, tf32=tf32) for spec in kinds[row.kind]):
        if row.tiles.sorts:
            counts = [TOKENS, 2048, 1024, 512, 256]
            turns = row.tiles.layer1.turns
            tokens = next(count for count in counts if choose_tiles(spec, row.arch, count, turns=turns) == row.tiles)
        else:
            assert row.tokens
            tokens, turns = row.tokens, False
        require_good(spec, row.arch, tokens, turns=turns)
        if row.dtype == "16":
            require_good(replace(spec, dtype="fp16"), row.arch, tokens, turns=turns)


def test_old_triton_never_feeds_wgmma_from_gathered_rows():
    """Before 3.7 nothing orders cp.async before wgmma: rows are permuted first, other pointers are not pipelined."""
    old = Machine(arch=90, processors=132, fenced=False)
    assert permutes_rows(VIT, old) and not permutes_rows(VIT, replace(old, fenced=True))
    tile = choose_tiles(VIT, 90, TOKENS).layer1
    loads = loads_of(VIT, old, None)
    assert not loads.gather and loads.a_desc and build_options(VIT, tile, loads, old)["num_stages"] == tile.stages
    odd = replace(VIT, d_in=771)  # rows that no bulk copy takes
    for spec, product in ((odd, None), (COLS, products_of(COLS)[0])):
        loads = loads_of(spec, old, product)
        assert loads.gather and build_options(spec, tile, loads, old)["num_stages"] == 1
    assert build_options(odd, tile, loads, replace(old, arch=80))["num_stages"] == tile.stages


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("second", ["top", "per_k"])
def test_few_tokens_of_every_second_layer_are_two_kernels_or_three(second, arch):
    spec = replace(VIT, second=second)
    assert [kernel.name for kernel in kernels_of(spec, arch, 1)] == ["few1", "few2"]
    kernels = kernels_of(spec, arch, 64)
    assert [kernel.name for kernel in kernels] == ["few1", "few2", "few sum"]
    for kernel in kernels:
        built = build(kernel, "bf16", arch)
        assert built.spills == 0 and built.resident >= 2
        # with any Triton copies run ahead of products, so none may be wgmma's
        assert kernel.tile is None or (built.instructions["LDGSTS"] and not built.instructions["HGMMA"])


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("spec", [VIT, SWIGLU, PROJECTION], ids=lambda spec: spec.form)
def test_one_token_is_weights_times_a_vector_read_sixteen_bytes_at_a_time(spec, arch):
    kernels = kernels_of(spec, arch, 1)
    assert [kernel.name for kernel in kernels] == ["one1", "one2"]
    kernels += gate_kernels_of(replace(GATE, d_in=4096, width=432), arch, 1)[:1]
    for kernel in kernels:
        built = build(kernel, "bf16", arch)
        assert built.spills == 0 and built.resident >= 5 and not built.instructions["HMMA"]
        of_weights = re.findall(r"ld\.global[\w.:]*evict_first[\w.:]*", built.ptx)
        assert of_weights and all(".v4.b32" in load for load in of_weights)
    assert bucket_of(1) != bucket_of(2) == bucket_of(16)


def test_few_tokens_get_small_tiles_and_are_not_sorted():
    few, some, many = (choose_tiles(VIT, 90, tokens) for tokens in (20, 2048, 4096))
    assert (few.sorts, some.sorts) == (False, True)
    assert few.layer1.m == 32 < some.layer1.m < many.layer1.m
    assert all(not choose_tiles(replace(VIT, second=second), 90, 20).sorts for second in ("per_k", "top"))
    assert choose_tiles(ROWS, 90, 20).sorts


LLAMA = replace(VIT, form="gated", act="silu", width=3584, d_in=4096, d_out=4096, bias_in=False)


@pytest.mark.parametrize("tokens", [2, 17, 33, 64])
@pytest.mark.parametrize("spec", [VIT, LLAMA, SWIGLU, PROJECTION], ids=lambda spec: spec.form)
def test_few_tokens_keep_the_whole_device_busy(spec, tokens):
    """Programs of few tokens are about as many as processors, or what each of them reads is little."""
    tiles = choose_tiles(spec, 90, tokens, 132)
    one, two = tiles.layer1, tiles.layer2
    programs = -(-spec.d_out // two.n) * tiles.splits
    short = (two.n + two.m) * spec.learners * spec.width * spec.itemsize <= 256 << 10
    assert programs >= 110 or (tiles.splits == 1 and short)
    assert -(-spec.learners * spec.width // one.n) >= 110 or one.n <= max(16, one.m // 2)
    assert tiles.splits == 1 or programs <= 132


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("second", ["shared", "top", "per_k"])
@pytest.mark.parametrize("form", ["mlp", "gated", "linear"])
@pytest.mark.parametrize("dtype", ["bf16", "tf32", "fp32"])
def test_few_tokens_are_built_without_spills_and_fit_small_devices(dtype, form, second, arch):
    """Devices with 99 KB of shared memory for a program take the same tiles."""
    kind = {"dtype": "bf16" if dtype == "bf16" else "fp32", "tf32": dtype == "tf32", "form": form, "second": second}
    for base, tokens in itertools.product((VIT, LLAMA, replace(VIT, d_in=771, width=200, d_out=770)), (1, 32, 64)):
        spec = replace(base, **kind)
        for kernel in kernels_of(spec, arch, tokens):
            built = build(kernel, spec.dtype, arch)
            assert built.spills == 0 and built.shared_bytes <= 99 << 10, (spec, built)


def test_tiles_are_small_where_large_ones_would_not_fill_the_device():
    """Tiles are counted, so wide sites have large ones sooner, and so do smaller devices."""
    wide = replace(VIT, d_in=4096, width=3584, d_out=4096)
    assert choose_tiles(wide, 90, 512).layer1.m == 64 < choose_tiles(wide, 90, 1024).layer1.m
    assert choose_tiles(VIT, 90, 2048, processors=66) == choose_tiles(VIT, 90, 4096) != choose_tiles(VIT, 90, 2048)
    assert (
        choose_tiles(replace(COLS, d_out=4096), 90, 1024)
        == choose_tiles(COLS, 90, 8192)
        != choose_tiles(COLS, 90, 1024)
    )


@pytest.mark.parametrize(
    ("site", "expected"),
    [
        (planned_site(), "mlp 8 -> 4 x 8 -> 8 gelu bf16"),
        (planned_site(second_layer="shared_top"), "mlp top 8 -> 4 x 8 -> 8 gelu bf16"),
        (planned_site(second_layer="per_k"), "mlp per_k 8 -> 4 x 8 -> 8 gelu bf16"),
        (sliced_site(), "rows 8 -> 4 x 2 -> 8 identity bf16"),
        (sliced_site(role="o"), "cols 8 -> 4 x 2 -> 8 identity bf16"),
    ],
)
def test_a_planned_site_has_the_spec_of_its_calls(site, expected):
    assert str(spec_of_site(site, "bf16")) == expected


def test_acmc_kernels_shows_tiles_and_what_was_built(tmp_path):
    table = CliRunner().invoke(app, ["kernels"])
    assert table.exit_code == 0 and all(str(row) in table.stdout for row in TABLE)
    plan = tmp_path / "plan.json"
    plan.write_text(plan_of(planned_site("a"), planned_site("b")).to_json())
    refused = CliRunner().invoke(app, ["kernels", str(plan), "--arch", "12"])
    assert refused.exit_code == 2 and "'--arch': found '12', expected at least 80" in refused.stderr
    listed = CliRunner().invoke(app, ["kernels", str(plan), "--arch", "90"])
    assert listed.exit_code == 0 and "not built" in listed.stdout and "2 x mlp 8 -> 4 x 8" in listed.stdout
    assert CliRunner().invoke(app, ["kernels", str(plan), "--dtype", "bf61"]).exit_code == 2
    missing = CliRunner().invoke(app, ["kernels", str(tmp_path / "none.json")])
    assert missing.exit_code == 2 and "acmc plan" in missing.stderr


def test_what_kernels_do_not_cover_is_said_in_words():
    covered = {"form": "mlp", "act": "gelu", "dtype": torch.bfloat16, "shape": (4, 8, 8), "arch": 90}
    assert not_covered(**covered) is None
    for changes, words in (
        ({"arch": 75}, "sm_75"),
        ({"act": "mul(x, sigmoid(x))"}, "mul"),
        ({"dtype": torch.float64}, "float64"),
    ):
        assert words in not_covered(**covered | changes)
    gate = {"dtypes": (torch.bfloat16, torch.float32), "width": 64, "arch": 80}
    assert gate_not_covered(**gate) is None
    assert gate_not_covered(**gate | {"width": 3000}) is None
    assert "float64" in gate_not_covered(**gate | {"dtypes": (torch.bfloat16, torch.float64)})


def test_a_gate_without_a_kernel_is_told_apart_from_its_learners(monkeypatch):
    monkeypatch.setattr(cuda, "current_machine", lambda: Machine(arch=90, processors=3))
    monkeypatch.setattr(ops, "load_kernels", lambda device: False)
    monkeypatch.setattr(ops, "has_kernels", lambda device: True)
    gate = GateCall(dtype=torch.bfloat16, width=300)
    call = Call(form="mlp", act="gelu", dtype=torch.bfloat16, device="cuda", shape=(4, 8, 8), gate=gate)
    assert choose_implementation(call) == choose_implementation(replace(call, gate=None)) == ("triton", None)
    found, reason = choose_implementation(replace(call, gate=replace(gate, dtype=torch.float64)))
    assert found == "triton, gate by reference" and "its gate: " in reason and "not float64" in reason


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OutOfResources(300_000, 101_376, "shared memory"), "out of resource"),
        (RuntimeError("PassManager::run failed"), "P"),
    ],
)
def test_kernels_that_cannot_be_built_make_room_for_the_reference_and_say_why(error, words, monkeypatch, caplog):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(cuda, "UNBUILT", {})
    monkeypatch.setattr(cuda, "machine_of", lambda device: Machine(arch=90, processors=3))
    monkeypatch.setattr(operators, "on_device_of", lambda x: contextlib.nullcontext())
    monkeypatch.setattr(Launcher, "__call__", fail)
    args, kwargs = learners_call("mlp")
    with caplog.at_level("INFO", logger="acm_compiler.backend"):
        for _ in range(2):
            torch.testing.assert_close(operators.learners(*args, **kwargs), ops.REFERENCE(*args, **kwargs))
    assert words in caplog.text and "plain torch operations: Triton cannot build" in caplog.text
    facts = {"form": "mlp", "act": "gelu", "dtype": torch.float32, "arch": 90}
    assert words in not_covered(shape=tuple(args.w_in.shape), **facts)
    assert not_covered(shape=(1, 2, 3), **facts) is None
    gate, choices = gate_call()
    assert torch.equal(operators.gate(*gate, **choices), ops.GATE_REFERENCE(*gate, **choices))
    error = RuntimeError("an illegal memory access")  # no matter of building
    with pytest.raises(RuntimeError, match="illegal memory access"):
        operators.learners(*learners_call("gated")[0], **learners_call("gated")[1])


def test_another_kernel_may_be_asked_for(monkeypatch, caplog):
    monkeypatch.setenv("ACM_KERNEL", "reference")
    with caplog.at_level("INFO", logger="acm_compiler.backend"):
        assert not take_over()
    assert "without the Triton kernels" in caplog.text


BARE = """
import os, sys
os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
for package in "pydantic ruamel ruamel.yaml tabulate typer rich accelerate hypothesis safetensors torchvision".split():
    sys.modules[package] = None
import pytest
sys.exit(pytest.main(["-m", "gpu", "--collect-only", "-q", "-p", "no:cacheprovider"]))
"""


def test_the_gpus_tests_are_collected_where_torch_and_triton_are_all_there_is():
    done = subprocess.run([sys.executable, "-c", BARE], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "test_a_captured_graph_follows_k" in done.stdout and "test_cli" not in done.stdout
