"""The folder of a saved model by files of our own making: all or none, and only names that are free."""

import json

import pytest

from acm_compiler.checkpoint.folder import check_own_folder, checked_extra, holds_model, save_id, write_folder
from acm_compiler.errors import StorageError, UsageError


def writes(text):
    return lambda path: path.write_text(text)


def test_files_are_all_there_or_none_is(tmp_path):
    folder = tmp_path / "out"
    write_folder(folder, {"plan.json": writes("1"), "model.json": writes("{}")}, size_bytes=3)

    def fails(path):
        path.write_text("half")
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        write_folder(folder, {"plan.json": writes("2"), "model.json": fails}, size_bytes=3)
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"plan.json": "1", "model.json": "{}"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_later_writer_reads_what_an_earlier_one_wrote(tmp_path):
    def repeat(path):
        path.write_text(path.with_name("plan.json").read_text() * 2)

    write_folder(tmp_path / "out", {"plan.json": writes("ab"), "model.json": repeat}, size_bytes=3)
    assert (tmp_path / "out/model.json").read_text() == "abab"


def test_weights_of_a_former_save_go_and_other_files_of_ours_stay(tmp_path):
    for name in ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "recipe.yaml"):
        (tmp_path / name).write_text("old")
    write_folder(tmp_path, {"model.safetensors": writes("new"), "model.json": writes("{}")}, size_bytes=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.json", "model.safetensors", "recipe.yaml"]


def test_files_of_others_are_refused_and_those_that_the_last_save_listed_are_not(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(StorageError, match=r"not ours .found notes\.txt"):
        check_own_folder(tmp_path)
    (tmp_path / "model.json").write_text(json.dumps({"files": ["notes.txt"], "save": "abc"}))
    check_own_folder(tmp_path)
    assert save_id(tmp_path) == "abc" and holds_model(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"save": 3}'])
def test_a_save_that_cannot_be_read_has_no_identifier(text, tmp_path):
    assert save_id(tmp_path) is None and not holds_model(tmp_path)
    (tmp_path / "model.json").write_text(text)
    assert save_id(tmp_path) is None


@pytest.mark.parametrize("name", ["model.json", "model-00001-of-00002.safetensors", "..", "a/b", ""])
def test_names_that_are_taken_or_lead_elsewhere_are_refused(name):
    with pytest.raises(UsageError, match="no name for an extra file"):
        checked_extra({name: "text"})


def test_extra_files_are_text_or_bytes():
    assert checked_extra(None) == {} and checked_extra({"a": b"1", "b": "2"}) == {"a": b"1", "b": "2"}
    with pytest.raises(UsageError, match=r"json\.dumps"):
        checked_extra({"a": {}})
    with pytest.raises(UsageError, match="a mapping of files"):
        checked_extra(["a"])
