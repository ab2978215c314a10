"""What the README and the docs show is what the package does."""

import ast
import inspect
import re
from pathlib import Path

import pytest
import torch

import acm_compiler as acm
from acm_compiler import errors
from acm_compiler.cli.app import VERBS
from tests import tour_model

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.fixture
def users_own(tmp_path, monkeypatch):
    """What the README takes for granted: a trained model, an example, and batches."""
    monkeypatch.chdir(tmp_path)
    model, example_inputs = tour_model.model()
    x = torch.stack([tour_model.data()[i]["tokens"] for i in range(96)])
    return {"model": model, "example_inputs": example_inputs, "x": x, "batches": x.split(16)}


def test_the_first_example_runs_as_it_stands(users_own, tmp_path):
    exec(PYTHON[0], users_own)
    usage = users_own["usage"]
    assert 0.3 < usage.budget < 0.5
    assert len(usage.shares) == len(usage.macs) == 96 and float(usage.shares.mean()) == pytest.approx(usage.budget)
    assert acm.set_budget(acm.load("out/", base_model=tour_model.model()[0]), 0.4) == pytest.approx(0.4)


def test_the_three_lines_for_the_users_own_loop_run_as_they_stand(users_own):
    model = acm.rewrite(users_own["model"], acm.plan(users_own["model"], users_own["example_inputs"], init="random"))
    before, forward, after = PYTHON[2].partition("extra")
    names = users_own | {"acm": acm, "model": model.train()}
    exec(before, names)
    names["task_loss"] = names["model"](users_own["x"]).square().mean()
    exec(forward + after, names)
    names["loss"].backward()
    assert all(a.gate.outer.weight.grad is not None for a in acm.sites(model).values())


def test_the_list_of_calls_names_their_arguments_and_defaults():
    calls = [call for call in ast.walk(ast.parse(PYTHON[1])) if isinstance(call, ast.Call)]
    assert len(calls) > 8
    for call in calls:
        parameters = inspect.signature(getattr(acm, call.func.attr)).parameters
        positional = [name for name, p in parameters.items() if p.kind is not p.KEYWORD_ONLY]
        assert [arg.id for arg in call.args if isinstance(arg, ast.Name)] == positional[: len(call.args)] or (
            call.func.attr == "set_budget"
        )
        for keyword in call.keywords:
            assert parameters[keyword.arg].default == ast.literal_eval(keyword.value), (call.func.attr, keyword.arg)


def test_every_verb_of_the_readme_exists():
    verbs = set(re.findall(r"^acmc ([a-z]+)", README, re.MULTILINE))
    assert verbs and verbs <= set(VERBS)


def test_every_error_is_documented_with_its_exit_code():
    table = (ROOT / "docs/errors.md").read_text()
    documented = {name: int(code) for name, code in re.findall(r"^\| `(\w+)` \| (\d+) \|", table, re.MULTILINE)}
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.AcmError)]
    assert documented == {kind.__name__: kind.exit_code for kind in kinds if kind is not errors.AcmError}


def test_links_lead_somewhere():
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
