"""Parts of each command in order of importance, and rows as they are written: nothing here needs torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Part:
    """Function `run` of a file beside this one yields the rows, called with the device and `given`.

    seconds: its limit. vital: correctness has not passed without it. interpreted: a dry run needs Triton's interpreter.
    differentiates: it runs with gradients on. processes: so many at once, each for a share of the work. beside: nothing
    of it is timed, so that it runs at once with those before and behind it that are so, too.
    """

    name: str
    run: str
    seconds: int
    given: tuple[str, ...] = ()
    vital: bool = False
    interpreted: bool = True
    differentiates: bool = False
    processes: int = 1
    beside: bool = False


_UNTIMED: Any = {"vital": True, "beside": True}
PARTS = {
    "correctness": (
        Part(name="forms", run="correctness.forms", seconds=150, processes=8, **_UNTIMED),
        Part(name="nan", run="correctness.not_a_number", seconds=40, **_UNTIMED),
        Part(name="gates", run="correctness.gates", seconds=40, **_UNTIMED),
        Part(name="one_k", run="correctness.one_k", seconds=55, interpreted=False, processes=3, **_UNTIMED),
        Part(name="gradients", run="gradients.exact", seconds=120, differentiates=True, processes=4, **_UNTIMED),
        Part(name="tests", run="sanitizer.tests", seconds=240, interpreted=False, beside=True),
        Part(name="answers", run="correctness.answers", seconds=135, vital=True, processes=4),
        Part(name="memcheck", run="sanitizer.sanitized", given=("memcheck",), seconds=120),
        Part(name="initcheck", run="sanitizer.sanitized", given=("initcheck",), seconds=120),
    ),
    "speed": (
        Part(name="ceilings", run="speed.ceilings", seconds=40, interpreted=False),
        Part(name="build", run="speed.build", seconds=120, processes=8),
        Part(name="vit", run="speed.ratios", given=("ViT-B",), seconds=90),
        Part(name="llama", run="speed.ratios", given=("Llama-8B",), seconds=120),
        Part(name="xlsr", run="speed.ratios", given=("XLS-R",), seconds=80),
        Part(name="line", run="speed.line", seconds=80),
        Part(name="d2dmoe_build", run="speed.build_experts", seconds=120, processes=8),
        Part(name="d2dmoe", run="speed.experts", seconds=90),
        Part(name="decode", run="speed.decode", seconds=90),
        Part(name="kernels", run="speed.kernels", seconds=40),
        Part(name="tiles", run="speed.tiles", seconds=180),
        Part(name="more", run="speed.more", seconds=90),
    ),
    "models": (
        Part(name="step", run="steps.sites", seconds=90, differentiates=True),
        Part(name="build", run="models.build", seconds=120, interpreted=False, processes=8),
        Part(name="vit", run="models.whole", given=("ViT-B",), seconds=180, interpreted=False),
        Part(name="training", run="models.training", seconds=60, interpreted=False, differentiates=True),
        Part(name="package", run="models.package", seconds=90, interpreted=False),
        Part(name="host", run="models.host", seconds=60, interpreted=False),
        Part(name="llama", run="models.whole", given=("Llama-8B, 4 layers",), seconds=120, interpreted=False),
        Part(name="calibration", run="models.calibration", seconds=300, interpreted=False, differentiates=True),
    ),
}


def write_row(path: Path, row: Row) -> None:
    """Add one line of JSON, at once: what an interrupted run has measured stays."""
    with path.open("a", encoding="utf-8") as out:
        out.write(json.dumps(row) + "\n")


def rows_of(path: Path) -> list[Row]:
    """The rows of a file, none where there is no file; a line that a killed process left unfinished is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows
