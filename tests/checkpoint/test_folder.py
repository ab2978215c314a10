"""The folder of a saved model by files of our own making: all or none, free names, one process at a time."""

import json
import os
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

import acm_compiler as acm
from acm_compiler.checkpoint.folder import (
    LOCK,
    check_own_folder,
    checked_extra,
    holds_model,
    locked,
    save_id,
    write_folder,
)
from acm_compiler.errors import StorageError, UsageError
from acm_compiler.runs.folder import one_run
from tests.helpers import ROOT
from tests.helpers.rewrite_cases import ALL, rewritten


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
    with pytest.raises(UsageError, match="an extra file of a saved model cannot have this name"):
        checked_extra({name: "text"})


def test_extra_files_are_text_or_bytes():
    assert checked_extra(None) == {} and checked_extra({"a": b"1", "b": "2"}) == {"a": b"1", "b": "2"}
    with pytest.raises(UsageError, match=r"json\.dumps"):
        checked_extra({"a": {}})
    with pytest.raises(UsageError, match="a mapping of files"):
        checked_extra(["a"])


_OTHER = """
import sys, time
from pathlib import Path
from acm_compiler.checkpoint.folder import locked
with locked(Path(sys.argv[1]), print):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def other(tmp_path):
    """Another process that holds the lock of the folder `out`."""
    command = [sys.executable, "-c", _OTHER, str(tmp_path / "out")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def machine(rank=0, gathered=None):
    """One process of a launch, to which the first one has told `gathered`."""
    return SimpleNamespace(is_main=rank == 0, gather=lambda value: [value] if rank == 0 else [gathered])


def refused(folder):
    """The error that refuses a run in `folder`."""
    with pytest.raises(UsageError) as caught, one_run(folder, machine(), print):
        pass
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_the_other_process_is_named(other, tmp_path):
    folder = tmp_path / "out"
    facts = json.loads((folder / LOCK).read_text())
    told = refused(folder)
    assert "another process is at work in this folder" in told and "room" not in told
    assert f"process {other.pid} on {socket.gethostname()}, since {facts['since']}" in told
    assert refused(folder) == told  # who is refused leaves the file as it is
    model = rewritten(ALL["parallel"])[2]
    with pytest.raises(UsageError, match=f"process {other.pid}"):
        acm.save(model, folder)
    assert os.listdir(folder) == [LOCK]


def test_the_lock_of_a_killed_process_is_taken_over(other, tmp_path):
    other.send_signal(signal.SIGKILL)
    other.wait()
    said = []
    with locked(tmp_path / "out", said.append):
        assert json.loads((tmp_path / "out" / LOCK).read_text())["pid"] == os.getpid()
        acm.save(rewritten(ALL["parallel"])[2], tmp_path / "out")  # this process works there
    assert len(said) == 1 and "was killed" in said[0] and f"process {other.pid}" in said[0]
    assert LOCK not in os.listdir(tmp_path / "out")


def test_a_lock_left_on_another_machine_is_taken_over_with_a_word(tmp_path):
    (tmp_path / LOCK).write_text(json.dumps({"pid": 1, "host": "elsewhere", "since": "2026-01-01 00:00:00"}))
    said = []
    with locked(tmp_path, said.append):
        pass
    assert "process 1 on elsewhere" in said[0] and "Make sure that it has ended" in said[0]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": "x", "host": 1, "since": 2}', "[" * 100_000], ids=range(5))
def test_a_lock_that_names_nobody_is_no_obstacle(text, tmp_path):
    (tmp_path / LOCK).write_text(text)
    with locked(tmp_path, pytest.fail):
        pass


def test_nothing_is_left_of_a_run_that_wrote_nothing(tmp_path):
    (tmp_path / "notes.txt").write_text("of the user")
    with pytest.raises(StorageError, match="not ours"), one_run(tmp_path, machine(), print):
        pass
    assert os.listdir(tmp_path) == ["notes.txt"]
    with pytest.raises(KeyError), one_run(tmp_path / "a" / "new", machine(), print):
        raise KeyError
    assert os.listdir(tmp_path / "a") == []


def test_the_processes_of_one_launch_are_one_run(tmp_path):
    with one_run(tmp_path / "out", machine(0), print), one_run(tmp_path / "out", machine(1), print):
        assert os.listdir(tmp_path / "out") == [LOCK]
    refusal = UsageError("another process is at work in this folder")
    with pytest.raises(UsageError, match="another process"), one_run(tmp_path, machine(1, refusal), print):
        pass
