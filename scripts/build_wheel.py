"""Build a wheel that carries the CPU kernel, so that installing it needs no C++ compiler.

    python scripts/build_wheel.py [--out dist] [--levels amx avx512-bf16 avx512-vnni avx512 avx2]

One library for each level of instructions, compiled for the torch that is installed here: another torch (in its second
number) ignores them and compiles at first use, as an installation from source does. Build once on each kind of machine
(x86-64; aarch64, whose levels are plain, neon-dot and neon-bf16) and for each torch, on the oldest Linux that you
support: the tag of the wheel names this machine's C library.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from acm_compiler.codegen.cpu import build

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("acm_compiler", "recipes", "setup.py", "pyproject.toml", "README.md", "LICENSE")


def main() -> None:
    """Compile the libraries and build the wheel around them."""
    known = {level.name: level for level in build.LEVELS}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("dist"))
    parser.add_argument("--levels", nargs="+", choices=known, default=[*known])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "source"
        copy.mkdir()
        for part in map(ROOT.joinpath, PARTS):
            if part.is_dir():
                shutil.copytree(part, copy / part.name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(part, copy)
        folder = copy / build.FOLDER.relative_to(ROOT)
        folder.mkdir()
        for name in options.levels:
            file = folder / build.file_name(known[name], build.digest())
            build.compile_library(build.command_for(known[name]), file)
            sys.stdout.write(f"{file.name}: {file.stat().st_size / 1e6:.1f} MB\n")
        tag = f"manylinux_{platform.libc_ver()[1].replace('.', '_')}_{platform.machine()}"
        setting = f"--config-settings=--build-option=--plat-name={tag}"
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", setting, f"--wheel-dir={options.out}"]
        subprocess.run([*pip, str(copy)], check=True)


if __name__ == "__main__":
    main()
