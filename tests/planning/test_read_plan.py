"""A plan's JSON is checked as values: what does not fit is refused by its key, before anything is built."""

import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import acm_compiler as acm
from acm_compiler.errors import StorageError, UsageError
from acm_compiler.planning.plan import Plan
from acm_compiler.recipe.document import show_path
from tests.helpers.rewrite_cases import ALL, planned

NOTHING = object()


@pytest.fixture(scope="module")
def document():
    """A valid plan as plain data, of sites of every kind."""
    found = [json.loads(planned(ALL[name])[2].to_json()) for name in ("swiglu", "parallel")]
    found[0]["sites"] += found[1]["sites"]
    for i, site in enumerate(found[0]["sites"]):
        _rename(site, f"part{i}")
    return json.loads(Plan.from_json(json.dumps(without_derived(found[0]))).to_json())


def without_derived(document):
    """The document without what follows from the rest of it."""
    made = {key: value for key, value in document.items() if key not in ("totals", "budget_range")}
    costs = ("dense_macs", "learner_macs", "gate_macs", "dense_params", "acm_params")
    made["sites"] = [{key: value for key, value in site.items() if key not in costs} for site in made["sites"]]
    return made


def _rename(site, name):
    """Give a site another name, and its graft."""
    place = 0 if site["graft"]["kind"] == "W" else -1
    site["name"], site["pair"] = name, None
    site["graft"]["modules"] = list(site["graft"]["modules"])
    site["graft"]["modules"][place] = name


def changed(document, path, value):
    """A copy of the document with `value` at `path`, or nothing there."""
    made = copy.deepcopy(document)
    owner = made
    for part in path[:-1]:
        owner = owner[part]
    if value is NOTHING:
        del owner[path[-1]]
    else:
        owner[path[-1]] = value
    return json.dumps(made)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("learners", "twelve", "a whole number"),
        ("learners", None, "a whole number"),
        ("learners", True, "a whole number"),
        ("learners", 4.0, "a whole number"),
        ("learners", 0, "at least 1"),
        ("learners", 10**30, "at most"),
        ("learners", 10**6, "at most 64"),
        ("width", 10**6, "at most 64, by the size of the site"),
        ("gate_width", 10**6, "at most 64, by the size of the site"),
        ("width", float("nan"), "a whole number"),
        ("width", -3, "at least 1"),
        ("width", 1, "learners that hold"),
        ("k_min", -1, "at least 0"),
        ("k_min", 99, "at most the site's learners"),
        ("gate_width", 0, "at least 1"),
        ("kind", "convolution", "'mlp', 'gated_mlp' or 'linear'"),
        ("state", "asleep", "'dense' or 'learners'"),
        ("act", "import os", "an activation"),
        ("name", "../../etc", "names of modules joined by dots"),
        ("name", "/etc/passwd", "names of modules joined by dots"),
        ("name", "", "names of modules joined by dots"),
        ("name", "blocks.7.mlp", "the module that is grafted, part"),
        ("first", [], "1 for the kind mlp"),
        ("last", None, "null for the kind linear, and only there"),
        ("pair", {"partner": "gone", "heads": 2}, "the name of a site"),
        ("layout", {"batch_axis": 0, "folds": -1}, "at least 0"),
        ("graft", {"kind": "W", "modules": [], "dropout": 0.0, "stash_width": 0}, "the modules that become part"),
        ("last", {"weight": "../x", "bias": None, "transposed": False, "rows": None}, "the name of a parameter"),
        ("graft", {"kind": "W", "modules": ["x"], "dropout": 2.0, "stash_width": 0}, "at most 1"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_by_its_key(document, key, value, expected):
    i = next(i for i, site in enumerate(document["sites"]) if site["kind"] == "mlp")
    with pytest.raises(StorageError) as caught:
        Plan.from_json(changed(document, ("sites", i, key), value))
    assert f"sites[{i}].{key}" in str(caught.value) and expected in str(caught.value), caught.value


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("totals",), None),
        (("totals", "learner_macs"), 10**400),
        (("totals", "gflops"), 1),
        (("budget_range",), "0 to 1"),
        (("budget_range", 0), 0.9),
        (("sites", 0, "gate_macs"), -5),
        (("sites", 0, "acm_params"), True),
    ],
    ids=str,
)
def test_what_follows_from_the_rest_cannot_say_otherwise(document, path, value):
    with pytest.raises(StorageError, match=r"which follows from the rest") as caught:
        Plan.from_json(changed(document, path, value))
    assert show_path(path) in str(caught.value)


def test_what_follows_from_the_rest_may_be_left_out(document):
    assert json.loads(Plan.from_json(json.dumps(without_derived(document))).to_json()) == document


@pytest.mark.parametrize("options", [{}, {"learners": 12}, {"lossless": True}, {"init": "random"}], ids=repr)
@pytest.mark.parametrize("name", ALL)
def test_what_the_planner_makes_goes_round(name, options):
    plan = planned(ALL[name], **options)[2]
    assert Plan.from_json(plan.to_json()) == plan


def test_the_planner_refuses_the_sizes_that_no_plan_may_have():
    model, x, _ = planned(ALL["parallel"])
    with pytest.raises(UsageError, match=r"width is too large for this site .*expected at most 64"):
        acm.plan(model, x, sites={"match": "mlp", "width": 10**6})
    with pytest.raises(UsageError, match="learners: found 1000000, expected at most 64"):
        acm.plan(model, x, learners=10**6)
    with pytest.raises(UsageError, match="gate_width is too large for this site"):
        acm.plan(model, x, gate={"hidden": 10**6})


def test_a_site_that_stands_there_twice_is_refused(document):
    twice = copy.deepcopy(document)
    twice["sites"].append(twice["sites"][0])
    with pytest.raises(StorageError, match="a name that no other site has"):
        Plan.from_json(json.dumps(twice))


@pytest.mark.parametrize("owner", [(), ("model",), ("sites", 0), ("sites", 0, "graft"), ("kept", 0)], ids=str)
def test_an_unknown_key_is_refused(document, owner):
    path = (*owner, "widht")
    with pytest.raises(StorageError, match=r"an unknown key \(found [\w.\[\]]*widht"):
        Plan.from_json(changed(document, path, 3))


@pytest.mark.parametrize("path", [("sites",), ("kept",), ("model", "class"), ("sites", 0, "learners")], ids=str)
def test_a_missing_key_is_refused(document, path):
    with pytest.raises(StorageError, match="a key is missing"):
        Plan.from_json(changed(document, path, NOTHING))


@pytest.mark.parametrize("text", ["[" * 100_000, '{"schema": 1, "sites": ' + "[" * 100_000, None, 7], ids=range(4))
def test_what_nests_too_deeply_or_is_no_text_is_refused(text):
    with pytest.raises(StorageError, match="this is not a plan"):
        Plan.from_json(text)


def paths(value, path=()):
    """Every place in a document."""
    if path:
        yield path
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from paths(item, (*path, key))


ODD = st.one_of(
    st.sampled_from([NOTHING, None, True, "", "..", "/etc", "twelve", "linear", "R", "gelu", [], {}, [[]], [0, 0]]),
    st.sampled_from([0, 1, -1, 2, 10**40, 0.5, float("nan"), float("inf"), "\ud800", "\0", "a" * 1000]),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.recursive(st.none(), lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner)),
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_plan_changed_anywhere_is_refused_or_goes_round(document, data):
    path = data.draw(st.sampled_from(list(paths(document))))
    try:
        plan = Plan.from_json(changed(document, path, data.draw(ODD)))
        written = plan.to_json()
        assert str(plan) and Plan.from_json(written) == plan and acm.Plan.from_json(written).to_json() == written
    except StorageError as error:
        assert str(error)
