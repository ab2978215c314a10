"""The content of a run's folder when another model takes the place of its own."""

from acm_compiler.runs.folder import drop_measured, other_file


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
