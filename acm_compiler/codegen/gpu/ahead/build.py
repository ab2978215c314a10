"""Compile a kernel for an architecture without a GPU, and read what came out of the binary."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from acm_compiler.codegen.gpu.tiles import Tile
from acm_compiler.errors import PackageMissing

_INDICES = ("perm", "counts", "k", "histogram", "k_of")
_NUMBERS = ("T", "D_IN", "ROWS", "PER", "SPAN", "stride_x", "stride_a", "stride_w", "stride_r")
_UNALIGNED = ("T", "ROWS", "PER", "cost", "knob", "k_lo", "k_hi")
_SHARED_BYTES = {80: 164 << 10, 86: 100 << 10, 89: 100 << 10, 90: 228 << 10, 100: 228 << 10, 120: 100 << 10}
_REGISTERS = 65536
_WARPS_IN_TURNS = 12  # two groups of four, and four for the one that reads
_INSTRUCTIONS = ("UTCHMMA", "HGMMA", "HMMA", "UTMALDG", "LDGSTS", "WARPGROUP")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel to be built: its function, what its operands are, its constants and options.

    odd: numbers that are no multiples of 16.
    """

    name: str
    function: Any
    constants: dict[str, Any]
    options: dict[str, Any]
    operands: dict[str, str] = field(default_factory=dict)
    odd: tuple[str, ...] = ()
    tile: Tile | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """Use of a multiprocessor by a compiled kernel; `resident` CTAs fit at once. Spills are instructions."""

    name: str
    arch: int
    registers: int
    spills: int
    shared_bytes: int
    resident: int
    size: int
    instructions: dict[str, int]
    ttir: str = field(repr=False)
    ptx: str = field(repr=False)


def build(kernel: Kernel, dtype: str, arch: int) -> Built:
    """Compile one kernel, for operands whose addresses and row strides are multiples of 16, but for odd ones."""
    names, unaligned = kernel.function.arg_names, (*_UNALIGNED, *kernel.odd)
    signature = {name: _type_of(name, kernel, dtype) for name in names}
    aligned = [
        index
        for index, name in enumerate(names)
        if signature[name] != "constexpr" and name not in unaligned and "tensordesc" not in signature[name]
    ]
    source = _source_of(kernel.function)(
        kernel.function,
        signature=signature,
        constexprs=kernel.constants,
        attrs={(index,): [["tt.divisibility", 16]] for index in aligned},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=dict(kernel.options))
    return _read_binary(kernel, arch, compiled.asm, compiled.metadata.shared)


def _source_of(function: Any) -> Any:
    """The class of what Triton compiles a function from."""
    if not function.is_gluon():
        return ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource


def _type_of(name: str, kernel: Kernel, dtype: str) -> str:
    if name in kernel.constants:
        return "constexpr"
    if name in kernel.operands:
        return kernel.operands[name].replace("{dtype}", dtype)
    if name in _NUMBERS:
        return "i32"
    return "*i32" if name in _INDICES else f"*{dtype}"


def _read_binary(kernel: Kernel, arch: int, texts: dict[str, Any], shared_bytes: int) -> Built:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "kernel.cubin"
        path.write_bytes(texts["cubin"])
        usage, text = _dump(path, "--dump-resource-usage"), _dump(path, "-sass")
    match = re.search(r"REG:(\d+)", usage)
    registers = int(match.group(1)) if match else 0
    operations = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", text)

    def count(*heads: str) -> int:
        return sum(operation.split(".")[0] in heads for operation in operations)

    threads = 32 * (_WARPS_IN_TURNS if kernel.function.is_gluon() else kernel.options["num_warps"])
    by_registers = _REGISTERS // (max(8, -(-registers // 8) * 8) * threads)
    by_memory = _SHARED_BYTES.get(arch, 100 << 10) // (shared_bytes + 1024)
    return Built(
        name=kernel.name,
        arch=arch,
        registers=registers,
        spills=count("STL", "LDL"),
        shared_bytes=shared_bytes,
        resident=min(by_registers, by_memory, 2048 // threads),
        size=len(operations),
        instructions={name: count(name) for name in _INSTRUCTIONS},
        ttir=texts["ttgir" if kernel.function.is_gluon() else "ttir"],
        ptx=texts["ptx"],
    )


def _dump(path: Path, what: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    found = str(tool) if tool.exists() else shutil.which("cuobjdump")
    if found is None:
        raise PackageMissing(
            "cuobjdump is not there, so registers and spills cannot be read",
            fix="install triton from its wheel, which brings it, or the CUDA toolkit",
        )
    return subprocess.run([found, what, str(path)], capture_output=True, text=True, check=True, timeout=120).stdout
