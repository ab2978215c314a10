"""Levels of instructions of the CPU kernel, and the libraries that a wheel carries."""

import itertools
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from acm_compiler.codegen.cpu import build
from acm_compiler.errors import KernelUnavailable

ROOT = Path(__file__).parents[2]
NAMES = [level.name for level in build.X86]
X86_HAS = {name for level in build.X86 for name in level.needs}
ARM_HAS = build.ARM[-1].needs


def processor(monkeypatch, capability, *instructions, levels=build.X86):
    """A processor with torch's vectors of this capability and these instructions, by torch's names."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(instructions, True))
    monkeypatch.setattr(build, "LEVELS", levels)


@pytest.mark.parametrize(
    ("capability", "instructions", "expected"),
    [
        ("DEFAULT", X86_HAS, ["plain"]),
        ("AVX2", (), ["avx2"]),
        ("AVX2", X86_HAS, ["avx2-vnni", "avx2"]),
        ("AVX512", (), ["avx512", "avx2"]),
        ("AVX512", ("avx512_vnni",), ["avx512-vnni", "avx512", "avx2"]),
        ("AVX512", X86_HAS, NAMES[::-1]),
        ("AVX512", ("amx_tile",), ["avx512", "avx2"]),  # nothing has that
    ],
)
def test_a_processor_runs_its_level_and_those_below(monkeypatch, capability, instructions, expected):
    processor(monkeypatch, capability, *instructions)
    assert [level.name for level in build.levels_here()] == expected


@pytest.mark.parametrize("capability", ["DEFAULT", "SVE256"])
@pytest.mark.parametrize(
    ("instructions", "expected"),
    [((), ["plain"]), (("dot", "fp16_arith"), ["neon-dot", "plain"]), (ARM_HAS, ["neon-bf16", "neon-dot", "plain"])],
)
def test_an_arm_processor_runs_its_level_and_those_below(monkeypatch, capability, instructions, expected):
    processor(monkeypatch, capability, *instructions, levels=build.ARM)
    assert [level.name for level in build.levels_here()] == expected


def test_each_level_has_all_that_the_one_below_has():
    for levels in (build.X86[:2], build.X86[:1] + build.X86[2:]):
        for below, above in itertools.pairwise(levels):
            assert set(below.flags) < set(above.flags) and set(below.needs) <= set(above.needs)
    assert build.ARM[2].flags[0].startswith(build.ARM[1].flags[0]) and set(build.ARM[1].needs) < set(build.ARM[2].needs)


@pytest.fixture
def carried(monkeypatch, tmp_path):
    """A function that lets the installation carry libraries of these levels, and its folder."""
    monkeypatch.setattr(build, "FOLDER", tmp_path)

    def carry(*names):
        for level in build.X86:
            if level.name in names:
                (tmp_path / build.file_name(level, build.digest())).touch()

    return carry


def test_the_wheels_library_is_taken_for_all_that_the_processor_has(monkeypatch, carried, tmp_path):
    processor(monkeypatch, "AVX512", "avx512_vnni")
    carried("avx2", "avx512-vnni", "amx")
    assert build.library_file() == tmp_path / build.file_name(build.X86[3], build.digest())


def test_a_lower_one_is_taken_where_there_is_no_compiler(monkeypatch, carried, tmp_path):
    processor(monkeypatch, "AVX512", *X86_HAS)
    carried("avx2", "avx512")
    compiled = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "compile_library", lambda command, target: compiled.append(command) or target.touch())
    assert build.library_file().parent == tmp_path / "cache/acm_compiler" and "-mamx-bf16" in compiled[0]
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    assert build.library_file() == tmp_path / build.file_name(build.X86[2], build.digest())


@pytest.mark.parametrize("other", ["sources", "torch"])
def test_one_of_other_sources_or_another_torch_is_not(monkeypatch, carried, other):
    processor(monkeypatch, "AVX2")
    carried("avx2")
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    if other == "torch":
        monkeypatch.setattr(torch, "__version__", "2.99.1+cpu")
    else:
        monkeypatch.setattr(build, "digest", lambda: "00000000")
    with pytest.raises(KernelUnavailable, match="no C\\+\\+ compiler"):
        build.library_file()


ASK = """
import logging, torch
from acm_compiler.acm import ops
from acm_compiler.codegen.cpu import build
from tests.codegen.test_cpu_kernel import drawn, draw_k, D
assert build.find_compiler() is None
with torch.no_grad():
    ops.learners(torch.randn(9, D), draw_k(9, "mixed"), drawn("mlp", torch.float32))
print(build.library_file(), torch._C._dispatch_has_kernel_for_dispatch_key("acm::learners", "CPU"))
"""


@pytest.mark.slow
def test_an_installed_wheel_needs_no_compiler(tmp_path):
    level = build.levels_here()[-1].name
    script = [sys.executable, str(ROOT / "scripts/build_wheel.py"), "--out", str(tmp_path), "--levels", level]
    subprocess.run(script, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith(".whl") and "-py3-none-manylinux_" in wheel.name
    with zipfile.ZipFile(wheel) as files:
        files.extractall(tmp_path / "site")
    assert len(list((tmp_path / "site/acm_compiler/codegen/cpu/prebuilt").iterdir())) == 1
    (tmp_path / "site/tests").symlink_to(ROOT / "tests")
    env = {"PATH": str(tmp_path), "HOME": str(tmp_path), "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run([sys.executable, "-c", ASK], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    file, native = done.stdout.split()
    assert file.startswith(str(tmp_path / "site")) and native == "True"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("level", "products"),
    [("plain", set()), ("neon-dot", {"sdot"}), ("neon-bf16", {"sdot", "smmla", "bfdot", "bfmmla"})],
)
def test_levels_of_arm_compile_and_multiply_by_their_instructions(level, products, tmp_path, monkeypatch):
    """A cross compiler takes them; nothing runs (scripts/emulate_arm.sh does that)."""
    compiler = shutil.which("aarch64-linux-gnu-g++")
    if compiler is None:
        pytest.skip("needs the package g++-aarch64-linux-gnu")
    monkeypatch.setattr(build, "find_compiler", lambda: compiler)
    (level,) = [one for one in build.ARM if one.name == level]
    options = [o for o in build.command_for(level) if not o.startswith(("-L", "-l", "-shared"))]
    made = tmp_path / "learners.s"
    done = subprocess.run([*options, "-S", str(build.SOURCE), "-o", str(made)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert set(re.findall(r"^\t(sdot|smmla|bfdot|bfmmla)\t", made.read_text(), re.M)) == products
