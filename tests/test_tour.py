"""The tour: plan, rewrite, calibrate, the three phases, save, load, compile, on a two-block model."""

import json

import pytest
import torch

import acm_compiler as acm
from acm_compiler.recipe import load_recipe
from acm_compiler.runs.folder import RunOptions
from acm_compiler.runs.run_recipe import run_recipe
from tests.helpers import tour_model

RECIPE = """
acm: 1
name: tour
model: {source: python, name: "tests.helpers.tour_model:model", weights: null}
task: {kind: classify}
data:
  train: {kind: "python:tests.helpers.tour_model:data"}
  eval: {kind: "python:tests.helpers.tour_model:data", args: {count: 32}}
sites:
  - {match: mlp, learners: 4}
  - {match: attn, learners: 2, init: random}
budgets: {train: 0.6, report: [0.5, 1.0]}
schedule:
  - {phase: distill, steps: 12, batch: 16}
  - {phase: gate, steps: 6, batch: 16}
  - {phase: finetune, steps: 6, batch: 16}
"""


def examples(count: int) -> torch.Tensor:
    return torch.stack([tour_model.data()[i]["tokens"] for i in range(count)])


def test_the_whole_way_in_python(tmp_path):
    model, example = tour_model.model()
    original = model.eval()(examples(4))
    plan = acm.plan(model, example)
    assert [site.kind for site in plan.sites].count("mlp") == 2 and len(plan.sites) == 10
    assert acm.Plan.from_json(plan.to_json()) == plan

    converted = acm.rewrite(model, plan)
    assert type(converted) is type(model)
    torch.testing.assert_close(converted(examples(4)), original)
    with pytest.raises(acm.AcmError, match="dense region"):
        acm.set_k(converted, 1)

    batches = list(examples(96).split(16))
    acm.calibrate(converted, batches, tokens=600)
    for budget in (0.5, 0.8):
        acm.set_budget(converted, budget)
        with torch.no_grad(), acm.record(converted) as usage:
            converted(examples(96))
        assert usage.budget == pytest.approx(budget, abs=0.06)

    acm.set_budget(converted, 0.5)
    acm.save(converted, tmp_path / "out")
    loaded = acm.load(tmp_path / "out", base_model=model)
    acm.set_budget(loaded, 0.5)
    assert torch.equal(loaded(examples(4)), converted(examples(4)))
    assert "0.500" in str(acm.status(loaded))

    acm.relax(converted.train(), 0.8)
    loss = converted(examples(8)).square().mean() + sum(acm.losses(converted, budget=0.6).values())
    loss.backward()
    assert all(a.gate.outer.weight.grad.abs().sum() > 0 for a in acm.sites(converted).values())
    acm.relax(converted, None)

    reverted = acm.revert(converted).eval()
    torch.testing.assert_close(reverted(examples(4)), original)


def test_the_whole_way_by_recipe(tmp_path):
    (tmp_path / "tour.yaml").write_text(RECIPE)
    said: list[str] = []
    directory = tmp_path / "run"
    found = run_recipe(load_recipe(tmp_path / "tour.yaml"), RunOptions(directory=directory), say=said.append)
    assert found is not None and [round(b.asked, 2) for b in found.budgets] == [0.5, 1.0]
    assert any("share of the dense model" in text for text in said)
    files = {path.name for path in directory.iterdir()}
    assert files == {
        "plan.json", "recipe.yaml", "model.safetensors", "model.json", "budgets.json", "metrics.jsonl", "eval.json"
    }  # fmt: skip
    phases = [json.loads(line)["phase"] for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert list(dict.fromkeys(phases)) == ["distill", "gate", "finetune"]
    kept = json.loads((directory / "budgets.json").read_text())["budgets"]
    assert [(b["asked"], b["reached"], b["metric"]) for b in kept] == [
        (b.asked, b.reached, b.metric) for b in found.budgets
    ]
    loaded = acm.load(directory, allow_code=True)
    assert acm.set_budget(loaded, None) == pytest.approx(0.6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_converted_model_compiles_by_name():
    model, example = tour_model.model()
    converted = acm.rewrite(model, acm.plan(model, example, init="random")).eval()
    compiled = torch.compile(converted, backend="acm")
    with torch.no_grad():
        for k in (4, 2):
            acm.set_k(converted, k)
            torch.testing.assert_close(compiled(examples(4)), converted(examples(4)))
