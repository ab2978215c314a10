"""Write the folders of one commit: `python -m tests.compatibility.write COMMIT`; run once, before a change of layout.

saved/: `acm.save` of a calibrated model; expected.json: its outputs; run/: a run of recipe.yaml, stopped after distill.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import acm_compiler as acm
from tests.compatibility.model import examples, model

HERE = Path(__file__).parent


def write(commit: str) -> None:
    """Make HERE/commit/saved and HERE/commit/run."""
    folder = HERE / commit
    dense, example = model()
    converted = acm.rewrite(dense.eval(), acm.plan(dense, example))
    acm.calibrate(converted, list(examples(48).split(16)), tokens=240)
    acm.save(converted, folder / "saved")
    expected = {}
    for budget in (0.5, 0.75, 1.0):
        acm.set_budget(converted, budget)
        expected[str(budget)] = converted(examples(4)).tolist()
    (folder / "expected.json").write_text(json.dumps(expected))
    command = ["rewrite", "--recipe", str(HERE / "recipe.yaml"), "--out", str(folder / "run"), "--until", "distill"]
    subprocess.run([sys.executable, "-m", "acm_compiler", *command], check=True)


if __name__ == "__main__":
    write(sys.argv[1])
