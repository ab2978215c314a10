"""The page about exports: its commands run, on quick conversions of the models that it names."""

import json
import re
import shlex
from importlib.util import find_spec

import pytest
from typer.testing import CliRunner

from acm_compiler.cli import app
from tests.helpers import ROOT

PAGE = (ROOT / "docs/export.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
LINES = [line for language, block in BLOCKS if not language for line in block.splitlines()]
EXPORTS = [shlex.split(line)[1:] for line in LINES if line.startswith("acmc export ")]
QUICK = {
    "runs/digits": ["data.eval.count=50", "schedule=[{phase: calibrate, tokens: 4000, batch: 50}]", "expect=null"],
    "runs/llama": ["data.eval.count=20", "schedule=[{phase: calibrate, tokens: 2000, batch: 32}]", "expect=null"],
}


def ran(words):
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output


@pytest.mark.slow
@pytest.mark.parametrize("run", QUICK)
def test_the_commands_of_the_page_run_one_after_the_other(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = "digits_vit" if run == "runs/digits" else "llama_docs"
    ran(["rewrite", "--recipe", recipe, "--out", run, *(word for value in QUICK[run] for word in ("--set", value))])
    exports = [words for words in EXPORTS if words[1] == run]
    assert len(exports) == (4 if recipe == "digits_vit" else 1)
    for words in exports:
        if "onnx" in words and not all(map(find_spec, ("onnx", "onnxruntime", "onnxscript"))):
            continue
        ran(words)
        facts = json.loads((tmp_path / words[-1] / "export.json").read_text())
        assert facts["kind"] == words[words.index("--format") + 1] and facts["relative_error"] < 1e-4
