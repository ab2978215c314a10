"""Levels of instructions that the CPU kernel is compiled for, and the libraries of it that a wheel carries."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

FOLDER = Path(__file__).with_name("prebuilt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Instructions that go together. capability: as torch's vectors call it; flags: of the compiler, GCC or Clang.

    runs: tells whether this processor has what it adds to the level below.
    """

    name: str
    capability: str
    flags: tuple[str, ...]
    runs: Callable[[], bool] = lambda: True

    @property
    def options(self) -> list[str]:
        """The compiler's options."""
        if not self.capability:
            return []
        return [*self.flags, f"-DCPU_CAPABILITY={self.capability}", f"-DCPU_CAPABILITY_{self.capability}"]


_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw")
_VNNI = (*_AVX512, "-mavx512vnni")
_BF16 = (*_VNNI, "-mavx512bf16")
_AMX = (*_BF16, "-mamx-tile", "-mamx-int8", "-mamx-bf16")
PLAIN = Level(name="plain", capability="", flags=())
# in the order of what they have
X86 = (
    Level(name="avx2", capability="AVX2", flags=_AVX2),
    Level(name="avx512", capability="AVX512", flags=_AVX512),
    Level(name="avx512-vnni", capability="AVX512", flags=_VNNI, runs=torch.cpu._is_vnni_supported),
    Level(name="avx512-bf16", capability="AVX512", flags=_BF16, runs=torch.cpu._is_avx512_bf16_supported),
    Level(name="amx", capability="AVX512", flags=_AMX, runs=torch.cpu._is_amx_tile_supported),
)


def levels_here() -> list[Level]:
    """The levels that this processor runs, the highest first; torch's ATEN_CPU_CAPABILITY is an upper bound."""
    capability = torch.backends.cpu.get_cpu_capability()
    found: list[Level] = []
    for level in X86:
        if level.capability == capability and not level.runs():
            break
        if capability in (level.capability, "AVX512"):
            found.insert(0, level)
    return found or [PLAIN]


def file_name(level: Level, digest: str) -> str:
    """Name of the library of that level for this torch, from sources of that digest.

    Its version counts as far as the second number: C++ interfaces of torch do not change behind it.
    """
    version = re.match(r"\d+\.\d+", torch.__version__)
    assert version is not None
    return f"learners-{digest}-torch{version[0]}-{level.name}.so"


def find_prebuilt(digest: str) -> tuple[Level, Path] | None:
    """The library in this installation of the highest level that runs here, or None."""
    for level in levels_here():
        file = FOLDER / file_name(level, digest)
        if file.is_file():
            return level, file
    return None
