"""The library of the CPU kernel: the wheel's own, or compiled once by the compiler that Inductor needs too.

Libraries are made for levels of instructions, of which each processor runs some.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from acm_compiler.errors import KernelUnavailable

FOLDER = Path(__file__).with_name("prebuilt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Instructions that go together: `needs`, by torch's names, beside those of torch's vectors of that `capability`.

    flags: of the compiler, GCC or Clang. has_bytes: products of bytes are among them, which int8 needs.
    """

    name: str
    flags: tuple[str, ...] = ()
    capability: str = ""
    needs: tuple[str, ...] = ()
    has_bytes: bool = True

    @property
    def options(self) -> list[str]:
        """The compiler's options."""
        if not self.capability:
            return [*self.flags]
        return [*self.flags, f"-DCPU_CAPABILITY={self.capability}", f"-DCPU_CAPABILITY_{self.capability}"]

    def runs(self) -> bool:
        """True if this processor has them; on x86 torch's ATEN_CPU_CAPABILITY is an upper bound."""
        vectors = torch.backends.cpu.get_cpu_capability()
        has_vectors = self.capability in ("", vectors) or vectors == "AVX512"
        return has_vectors and all(torch.cpu.get_capabilities().get(name, False) for name in self.needs)


_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw")
_VNNI = (*_AVX512, "-mavx512vnni")
_BF16 = (*_VNNI, "-mavx512bf16")
_AMX = (*_BF16, "-mamx-tile", "-mamx-int8", "-mamx-bf16")
_DOT = "-march=armv8.2-a+fp16+dotprod"
PLAIN = Level(name="plain", has_bytes=False)
# the better one later
X86 = (
    Level(name="avx2", capability="AVX2", flags=_AVX2),
    Level(name="avx2-vnni", capability="AVX2", flags=(*_AVX2, "-mavxvnni"), needs=("avx_vnni",)),
    Level(name="avx512", capability="AVX512", flags=_AVX512),
    Level(name="avx512-vnni", capability="AVX512", flags=_VNNI, needs=("avx512_vnni",)),
    Level(name="avx512-bf16", capability="AVX512", flags=_BF16, needs=("avx512_vnni", "avx512_bf16")),
    Level(name="amx", capability="AVX512", flags=_AMX, needs=("avx512_vnni", "avx512_bf16", "amx_tile")),
)
ARM = (
    PLAIN,
    Level(name="neon-dot", flags=(_DOT,), needs=("fp16_arith", "dot")),
    Level(name="neon-bf16", flags=(f"{_DOT}+bf16+i8mm",), needs=("fp16_arith", "dot", "bf16", "i8mm")),
)
LEVELS = {"x86_64": X86, "aarch64": ARM}.get(platform.machine(), (PLAIN,))


def levels_here() -> list[Level]:
    """The levels that this processor runs, the best first."""
    return [level for level in LEVELS[::-1] if level.runs()] or [PLAIN]


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


SOURCE = Path(__file__).with_name("learners.cpp")
_HEADERS = tuple(sorted(SOURCE.parent.rglob("*.h")))
_COMPILERS = ("g++", "clang++", "c++")
_TIMEOUT_S = 900
_LOG = logging.getLogger("acm_compiler.backend")


def library_file() -> Path:
    """The shared library of the CPU kernel for this torch and this processor, compiled if it is not there yet.

    The wheel's own, if it has one for all that this processor can, or where there is no compiler.
    KernelUnavailable when there is none, or it fails.
    """
    carried = carried_library()
    if carried is not None:
        return carried[1]
    command = command_for(levels_here()[0])
    text = "\n".join([_sources(), f"{torch.__version__} {torch.version.git_version}", *command])
    target = _cache() / f"learners-{hashlib.sha256(text.encode()).hexdigest()[:20]}.so"
    if not target.is_file():
        with _alone(target):
            if not target.is_file():
                compile_library(command, target)
    return target


def carried_library() -> tuple[Level, Path] | None:
    """The wheel's library, with its level, where it is used: there is no better one, or no compiler to make one."""
    found = find_prebuilt(digest())
    is_used = found is not None and (found[0] is levels_here()[0] or find_compiler() is None)
    return found if is_used else None


@functools.cache
def built_from() -> str:
    """The version that the operators of packages check: this package's, and a digest of the kernel's sources."""
    return f"acm_compiler {importlib.metadata.version('acm_compiler')} (kernel {digest()})"


@functools.cache
def digest() -> str:
    """A digest of the kernel's sources."""
    return hashlib.sha256(_sources().encode()).hexdigest()[:8]


def _sources() -> str:
    return "\n".join(file.read_text() for file in (SOURCE, *_HEADERS))


def find_compiler() -> str | None:
    """The C++ compiler that is used: the one in CXX, else the first known one on the path; None without any."""
    for name in (os.environ.get("CXX"), *_COMPILERS):
        path = shutil.which(name) if name else None
        if path is not None:
            return path
    return None


def command_for(level: Level) -> list[str]:
    """The compiler call without files. KernelUnavailable without a compiler."""
    compiler = find_compiler()
    if compiler is None:
        raise KernelUnavailable(
            "no C++ compiler was found",
            expected=f"one of {', '.join(_COMPILERS)} on the path, or CXX",
            fix="install one, for example the package g++",
        )
    home = Path(torch.__file__).parent
    command = [compiler, "-std=c++20", "-O3", "-fno-strict-aliasing", "-shared", "-fPIC", "-w"]
    if sys.platform != "darwin":
        command.append("-fopenmp")
    command += [*level.options, f'-DACM_BUILT="{built_from()}"']
    command += [f"-I{home / 'include'}", f"-I{home / 'include/torch/csrc/api/include'}"]
    return [*command, f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10"]


def _cache() -> Path:
    """Folder of the libraries: the user's cache, or a private one of this process where that cannot be written."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "acm_compiler"
    try:
        base.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="acm_compiler-"))
    return base if os.access(base, os.W_OK) else Path(tempfile.mkdtemp(prefix="acm_compiler-"))


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """While open, no other process makes `target`; one that takes too long, or cannot lock, is not waited for."""
    file = target.with_suffix(".lock")
    with ExitStack() as held:
        with suppress(Timeout, OSError, NotImplementedError):  # as on file systems without locks
            held.enter_context(FileLock(file, timeout=_TIMEOUT_S))
            held.callback(file.unlink, missing_ok=True)
        yield


def compile_library(command: list[str], target: Path) -> None:
    """Compile the sources by that call to `target`, whole or not at all. KernelUnavailable when that fails."""
    _LOG.warning("compiling the CPU kernel, once for this machine: it takes half a minute")  # somebody waits
    start = time.monotonic()
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        try:
            call = [command[0], str(SOURCE), *command[1:], "-o", str(made)]
            done = subprocess.run(call, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise _failed(command[0], str(error)) from error
        if done.returncode:
            raise _failed(command[0], done.stderr)
        # where nothing could be locked another process may have been as far: either library will do
        made.replace(target)
    _LOG.info("compiled the CPU kernel in %.0f seconds: %s", time.monotonic() - start, target)


def _failed(compiler: str, output: str) -> KernelUnavailable:
    lines = [line for line in output.splitlines() if "error" in line] or output.splitlines() or ["no message"]
    return KernelUnavailable(
        "the CPU kernel could not be compiled",
        where=compiler,
        found=lines[0].strip(),
        fix="use a compiler that knows C++20 (CXX=...), or go on without: ACM_KERNEL=reference",
    )
