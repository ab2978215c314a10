"""Every public function refuses, in words, what is no model, no plan and no path."""

import inspect

import pytest
import torch

import acm_compiler as acm
from acm_compiler.errors import AcmError, StorageError, UsageError
from acm_compiler.evaluation.results import Evaluation, MetricResult
from tests.helpers import tour_model


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(model, example, plan, rewritten model, folder it is saved in)."""
    model, example = tour_model.model()
    plan = acm.plan(model, example)
    copied, folder = acm.rewrite(model, plan), tmp_path_factory.mktemp("wrong") / "out"
    acm.save(copied, folder)
    return model, example, plan, copied, folder


MODELS = {
    "batch": lambda odd, made: acm.batch(odd).__enter__(),
    "calibrate": lambda odd, made: acm.calibrate(odd, [made[1]]),
    "evaluate": lambda odd, made: acm.evaluate(odd, [made[1]], metric=lambda *_: 0),
    "explain": lambda odd, made: acm.explain(odd),
    "export": lambda odd, made: acm.export(odd, made[4].parent / "exported", made[1]),
    "finalize": lambda odd, made: acm.finalize(odd),
    "generate": lambda odd, made: acm.generate(odd, draft=0.5),
    "load": lambda odd, made: acm.load(made[4], base_model=odd),
    "losses": lambda odd, made: acm.losses(odd, budget=0.5),
    "measure_sparsity": lambda odd, made: acm.measure_sparsity(odd, [made[1]]),
    "meter": lambda odd, made: acm.meter(odd),
    "plan": lambda odd, made: acm.plan(odd, made[1]),
    "quantize": lambda odd, made: acm.quantize(odd),
    "recalibrate": lambda odd, made: acm.recalibrate(odd, [made[1]]),
    "record": lambda odd, made: acm.record(odd).__enter__(),
    "relax": lambda odd, made: acm.relax(odd, temperature=0.8),
    "report": lambda odd, made: acm.report(odd, None, made[4]),
    "revert": lambda odd, made: acm.revert(odd),
    "rewrite": lambda odd, made: acm.rewrite(odd, made[2]),
    "save": lambda odd, made: acm.save(odd, made[4]),
    "sensitivity": lambda odd, made: acm.sensitivity(odd),
    "set_budget": lambda odd, made: acm.set_budget(odd, 0.5),
    "set_k": lambda odd, made: acm.set_k(odd, 2),
    "set_sparsity": lambda odd, made: acm.set_sparsity(odd, 0.3),
    "sites": lambda odd, made: acm.sites(odd),
    "status": lambda odd, made: acm.status(odd),
}
OTHERS = {
    "plan's inputs": lambda odd, made: acm.plan(made[0], odd),
    "meter's plan": lambda odd, made: acm.meter(made[3], plan=odd),
    "rewrite's plan": lambda odd, made: acm.rewrite(made[0], odd),
    "calibrate's batches": lambda odd, made: acm.calibrate(made[3], odd),
    "recalibrate's batches": lambda odd, made: acm.recalibrate(made[3], odd),
    "measure_sparsity's batches": lambda odd, made: acm.measure_sparsity(made[3], odd),
    "set_sparsity's share": lambda odd, made: acm.set_sparsity(made[3], odd),
    "set_budget's budget": lambda odd, made: acm.set_budget(made[3], odd),
    "save's folder": lambda odd, made: acm.save(made[3], odd),
    "load's folder": lambda odd, made: acm.load(odd),
    "a plan's text": lambda odd, made: acm.Plan.from_json(odd),
}


def evaluated(made, batches=(), **options):
    return acm.evaluate(made[3], batches, **{"metric": lambda *_: 0} | options)


def saved(made, extra):
    acm.save(made[3], made[4], extra=extra)


# arguments of a kind: what is given, and the words that refuse it
ARGUMENTS = {
    "evaluate's dense": (lambda odd, made: evaluated(made, dense=odd), "dense: a model must be"),
    "evaluate's budgets": (lambda odd, made: evaluated(made, budgets=odd), "budget.*found"),
    "evaluate's task": (lambda odd, made: evaluated(made, metric=None, task=odd), "task"),
    "report's evaluation": (lambda odd, made: acm.report(made[3], odd, made[4]), "evaluation must be what"),
    "report's folder": (lambda odd, made: acm.report(made[3], EVALUATION, odd), "a folder must be a path"),
    "plan's source": (lambda odd, made: acm.plan(made[0], made[1], source=odd), "source must be a mapping"),
    "save's extra": (lambda odd, made: saved(made, odd), "extra"),
    "save's extra file": (lambda odd, made: saved(made, {"notes": odd}), "an extra file must be text or bytes"),
}
NO_FAULT = {
    *(("plan's source", "a dict"), ("plan's source", "a state dict"), ("save's extra", "a dict")),
    *(("report's folder", "a text"), ("save's extra file", "a text")),
}
EVALUATION = Evaluation(
    metric=MetricResult(name="m", dense=None), budgets=(), n=1, groups=1, masked=False, model="m", dense_macs=1, date=""
)
ODD = {
    "a dict": {},
    "a number": 3,
    "a class": tour_model.Classifier,
    "a state dict": torch.nn.Linear(2, 2).state_dict(),
    "a list": [torch.nn.Linear(2, 2)],
    "a function": len,
}
ODDER = ODD | {"a text": "x", "a tensor": torch.zeros(2, 2)}


# calls with one wrong value, and the words that refuse it
VALUES = {
    "a rule's key": (lambda made: acm.SiteRule(match="mlp", learnrs=2), "learnrs: unknown key"),
    "a rule's value": (lambda made: acm.SiteRule(match="mlp", learners=-2), "learners: found -2, expected at least 1"),
    "a gate's size": (lambda made: acm.GateConfig(hidden="x"), "hidden: found 'x', expected a whole number"),
    "plan's learners": (
        lambda made: acm.plan(made[0], made[1], learners=0),
        "sites: learners: found 0, expected",
    ),
    "plan's inputs": (lambda made: acm.plan(made[0], None), "^inputs must be a tensor"),
    "rewrite's offload": (lambda made: acm.rewrite(made[0], made[2], offload="cuda:0"), "expected 'disk', a folder"),
    "gradient_tokens": (
        lambda made: acm.calibrate(made[3], [made[1]], gradient_tokens=0),
        "^gradient_tokens must count tokens",
    ),
    "evaluate's fixed_k": (lambda made: evaluated(made, fixed_k=2), "fixed_k must be True, False or None"),
    **{
        f"{name}'s {key}": (call, f"{key}.*(must be True or False.*|)found 'yes'")
        for (name, key), call in {
            ("plan", "lossless"): lambda made: acm.plan(made[0], made[1], lossless="yes"),
            ("rewrite", "inplace"): lambda made: acm.rewrite(made[0], made[2], inplace="yes"),
            ("quantize", "rest"): lambda made: acm.quantize(made[3], rest="yes"),
            ("record", "macs"): lambda made: acm.record(made[3], macs="yes"),
            ("batch", "skip_padding"): lambda made: acm.batch(made[3], skip_padding="yes").__enter__(),
            ("evaluate", "lower_is_better"): lambda made: evaluated(made, lower_is_better="yes"),
            ("save", "among_others"): lambda made: acm.save(made[3], made[4], among_others="yes"),
            ("load", "allow_code"): lambda made: acm.load(made[4], allow_code="yes"),
            ("export", "per_example"): lambda made: acm.export(made[3], made[4], made[1], per_example="yes"),
        }.items()
    },
    "a task's key": (
        lambda made: evaluated(made, metric=None, task={"kind": "classify", "foo": 1}),
        r"classify\.foo: unknown key",
    ),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_wrong_value_is_refused_by_name(name, made):
    call, words = VALUES[name]
    with pytest.raises(UsageError, match=words):
        call(made)


def test_what_was_found_is_shown_in_short(made):
    with pytest.raises(UsageError, match="tensor") as caught:
        acm.set_budget(made[3], [torch.rand(30, 30)] * 20)
    assert len(str(caught.value)) < 700


def test_no_public_function_is_left_out():
    functions = {name for name in acm.__all__ if inspect.isroutine(getattr(acm, name))}
    taking = {
        name for name in functions if {"model", "base_model"} & set(inspect.signature(getattr(acm, name)).parameters)
    }
    assert taking == set(MODELS)


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("name", MODELS)
def test_what_is_no_model_is_refused_in_words(name, odd, made):
    with pytest.raises(UsageError, match="a model must be") as caught:
        MODELS[name](ODD[odd], made)
    told = {"a class": "make one of it: Classifier", "a state dict": "model.load_state_dict"}
    assert told.get(odd, "a torch.nn.Module") in str(caught.value)


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("name", OTHERS)
def test_other_wrong_objects_are_refused_in_words(name, odd, made):
    with pytest.raises(AcmError):
        OTHERS[name](ODD[odd], made)


@pytest.mark.parametrize(("name", "odd"), [(n, o) for n in ARGUMENTS for o in ODDER if (n, o) not in NO_FAULT])
def test_arguments_of_another_kind_are_refused_in_words(name, odd, made):
    call, words = ARGUMENTS[name]
    with pytest.raises(UsageError, match=words):
        call(ODDER[odd], made)


@pytest.mark.parametrize(
    "budgets", [0.5, -1, True, "60%", [None], [True], ["x"], {0.5: 1}, torch.tensor(0.5)], ids=repr
)
def test_budgets_are_a_list_of_budgets(budgets, made):
    with pytest.raises(UsageError, match=r"budget.*found"):
        evaluated(made, budgets=budgets)


@pytest.mark.parametrize("metric", ["accuracy", 5, [len], {}], ids=repr)
def test_a_metric_is_a_function(metric, made):
    with pytest.raises(UsageError, match=r"metric must be a function \(found"):
        evaluated(made, metric=metric)


@pytest.mark.parametrize("batches", [None, 5, {}, torch.zeros(2, 2), tour_model.Classifier], ids=repr)
@pytest.mark.parametrize("name", ["evaluate", "calibrate"])
def test_batches_are_an_iterable_of_batches(name, batches, made):
    with pytest.raises(UsageError, match="batches must be an iterable"):
        evaluated(made, batches) if name == "evaluate" else acm.calibrate(made[3], batches)


def test_a_page_of_another_kind_is_not_written_over(made, tmp_path):
    (tmp_path / "index.html").write_text("<html>mine</html>")
    with pytest.raises(StorageError, match=r"index\.html: this page was not written by a report"):
        acm.report(made[3], EVALUATION, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["index.html"]


def test_a_report_of_nothing_is_refused(made):
    with pytest.raises(UsageError, match=r"must be what acm\.evaluate returned \(found NoneType"):
        acm.report(made[3], None, made[4])
