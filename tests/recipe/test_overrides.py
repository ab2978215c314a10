"""`--set`: where a value goes, and what is said of one that goes nowhere."""

import pytest

from acm_compiler.recipe.document import read_text
from acm_compiler.recipe.overrides import apply_overrides, parse_override

TEXT = "name: x\nmodel: {name: m}\nrun:\nschedule:\n- {phase: distill, epochs: 2}\n- {phase: gate, steps: 5}\n"


def changed(*overrides: str):
    """The document with these overrides, and the problems of those that could not be written."""
    document = read_text(TEXT, source="r.yaml")
    return document, [problem.what for problem in apply_overrides(document, overrides)]


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("schedule[0].lr=1e-4", ("schedule", 0, "lr"), 1e-4),
        (" name = a=b", ("name",), "a=b"),
        ("sites[1].include=[q, k]", ("sites", 1, "include"), ["q", "k"]),
        ("run.offload=null", ("run", "offload"), None),
    ],
)
def test_a_path_and_a_value_of_yaml(text, path, value):
    assert parse_override(text) == (path, value)


def test_values_are_written_in_order_and_sections_that_lack_are_made():
    document, problems = changed("run.seed=1", "run.seed=2", "model.args.depth=3", "schedule[1].lr=0.1")
    assert problems == []
    assert document.data["run"] == {"seed": 2} and document.data["model"] == {"name": "m", "args": {"depth": 3}}
    assert document.data["schedule"][1]["lr"] == 0.1
    assert str(document.place_of_value(("run", "seed"))).startswith("--set run.seed=2")


def test_a_phase_keeps_one_length():
    document, _ = changed("schedule[0].steps=7", "schedule[1].epochs=1")
    assert document.data["schedule"] == [{"phase": "distill", "steps": 7}, {"phase": "gate", "epochs": 1}]
    document, _ = changed("schedule[0].steps=7", "schedule[0].epochs=3")
    assert document.data["schedule"][0] == {"phase": "distill", "steps": 7, "epochs": 3}, "both were asked for"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("name", "expected key.path=value, such as schedule[0].lr=1e-4"),
        ("a..b=1", "'a..b' is not a path of keys, such as schedule[0].lr"),
        ("[0].lr=1", "'[0].lr' is not a path of keys, such as schedule[0].lr"),
        ("schedule[2].lr=1", "schedule has 2 entries, the last is [1]"),
        ("name.first=1", "name is 'x', which has no key 'first'"),
        ("model[0]=1", "which has no entry [0]"),
        ("schedul[0].lr=1", "the recipe has no list schedul"),
        ("sites[0].match=mlp", "set it as a whole: sites=[...]"),
    ],
)
def test_an_override_that_leads_nowhere_says_where_it_ends(text, problem):
    document, problems = changed(text)
    assert len(problems) == 1 and problem in problems[0]
    assert document.data == read_text(TEXT, source="r.yaml").data
