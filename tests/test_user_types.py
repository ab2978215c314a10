"""Types that a checker sees in a user's script."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = """
import torch
import acm_compiler as acm

model = torch.nn.Linear(8, 8)
reveal_type(acm.plan(model, torch.randn(2, 8)))
reveal_type(acm.sites(model))
reveal_type(acm.calibrate(model, []))
acm.set_budget(model, [1])
acm.misspelt
"""


@pytest.mark.slow
def test_a_type_checker_knows_what_a_user_calls(tmp_path):
    pytest.importorskip("mypy")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    # the cache of the project's own checks: torch is not read again
    command = [sys.executable, "-m", "mypy", "--ignore-missing-imports", "--cache-dir", str(ROOT / ".mypy_cache")]
    done = subprocess.run(
        [*command, str(script)],
        cwd=tmp_path,
        env=os.environ | {"MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert re.findall(r'Revealed type is "([^"]+)"', done.stdout) == [
        "acm_compiler.planning.plan.Plan",
        "dict[str, acm_compiler.acm.module.ACM]",
        "acm_compiler.planning.plan.Plan",
    ]
    assert 'No overload variant of "set_budget" matches argument types "Linear", "list[int]"' in done.stdout
    assert 'Module has no attribute "misspelt"' in done.stdout
