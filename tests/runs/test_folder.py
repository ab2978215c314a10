"""The content of a run's folder when another model takes the place of its own."""

import json

from acm_compiler.evaluation.results import Evaluation, MetricResult, save_evaluation
from acm_compiler.runs.folder import drop_measured, load_measured, other_file, subject_of
from acm_compiler.runs.given import Given


def test_a_model_that_is_replaced_takes_along_what_was_exported_and_measured_elsewhere(tmp_path):
    (tmp_path / "export/pt2").mkdir(parents=True)
    (tmp_path / "export/pt2/model.pt2").write_text("of the first model")
    other = other_file("python:my.data:held_out", "save:0123456789abcdef")
    for name in ("eval.json", other, "plan.json"):
        (tmp_path / name).write_text("{}")
    said = []
    drop_measured(tmp_path, said.append, evaluated=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["eval.json", "plan.json"]
    assert said == [
        "removed what was measured on or exported from the model that was here: "
        "export, eval-my_data_held_out-01234567.json"
    ]


def test_what_a_folder_was_measured_at_is_of_its_model_and_of_the_data_that_were_named(tmp_path):
    def measured(given, n):
        metric = MetricResult(name="accuracy", dense=0.9)
        subject = subject_of(tmp_path, given.data, given.task)
        return Evaluation(
            metric=metric, budgets=(), n=n, groups=n, masked=False, model="m", dense_macs=1.0, date="", subject=subject
        )

    (tmp_path / "model.json").write_text(json.dumps({"save": "first"}))
    own = Given.read("classify", "{kind: imagefolder, root: own}", None)
    other = Given.read("classify", "{kind: imagefolder, root: other}", None)
    save_evaluation(tmp_path, measured(own, 1))
    assert load_measured(tmp_path, other, None).n == 1  # for want of one on those
    file = other_file(other.data.kind, subject_of(tmp_path, other.data, other.task))
    save_evaluation(tmp_path, measured(other, 2), file)
    assert [load_measured(tmp_path, given, None).n for given in (own, other, Given())] == [1, 2, 1]
    (tmp_path / "model.json").write_text(json.dumps({"save": "second"}))
    assert load_measured(tmp_path, own, None) is None
