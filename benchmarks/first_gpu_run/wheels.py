"""Wheels of what the package needs and a machine with torch and Triton may lack, for a machine without a network.

    python -m benchmarks.first_gpu_run.wheels FOLDER [--python 3.12] [--also triton==3.7.0]

The package's own requirements, without what comes with torch or is large, and what they need in turn: some 5 MB.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
THERE = ("torch", "torchvision", "numpy", "pillow", "networkx")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
MOST_BYTES = 20_000_000


def requirements() -> list[str]:
    """The package's requirements that are fetched."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [text for text in project["dependencies"] if re.split(r"[<>=! ]", text)[0] not in THERE]


def download(folder: Path, python: str, wanted: list[str]) -> list[str]:
    """The command of pip's that fetches wheels and what they need."""
    target = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    target += [text for platform in PLATFORMS for text in ("--platform", platform)]
    return [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder), *target, *wanted]


def main() -> None:
    """Fetch them, and what was asked for besides."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12")
    parser.add_argument("--also", nargs="*", default=[], metavar="REQUIREMENT", help="such as another Triton")
    chosen = parser.parse_args()
    subprocess.run(download(chosen.folder, chosen.python, requirements()), check=True)
    size = sum(path.stat().st_size for path in chosen.folder.glob("*.whl"))
    if size > MOST_BYTES:
        raise SystemExit(f"{size / 1e6:.0f} MB is too much to carry: what is large belongs to THERE")
    for wanted in chosen.also:
        subprocess.run([*download(chosen.folder, chosen.python, [wanted]), "--no-deps"], check=True)
    print(f"{len(list(chosen.folder.glob('*.whl')))} wheels, {size / 1e6:.1f} MB without --also, in {chosen.folder}")


if __name__ == "__main__":
    main()
