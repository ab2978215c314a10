"""Files are written whole or not at all; what is missing is said in words."""

import importlib.util
import os
import resource
import stat
import subprocess
import sys
from contextlib import contextmanager

import pytest
from typer.testing import CliRunner

from acm_compiler import env
from acm_compiler.cli import app
from acm_compiler.errors import StorageError
from acm_compiler.files import dump, parse_json, size_text, whole_file, write_file


@contextmanager
def full_disk():
    """No file may grow beyond a few bytes."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


def test_a_full_disk_keeps_the_old_file(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("old")
    with full_disk(), pytest.raises(StorageError, match=r"plan\.json: the file cannot be written(.|\n)*make room"):
        write_file(path, "new" * 1000)
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["plan.json"]


def test_an_interrupt_keeps_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), whole_file(path) as beside:
        beside.write_text("half of the n")
        raise KeyboardInterrupt
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file"]


def test_permissions_and_links_stay(tmp_path):
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to("file")
    write_file(link, "new")
    assert link.is_symlink() and path.read_text() == "new" and stat.S_IMODE(path.stat().st_mode) == 0o640
    umask = os.umask(0o027)
    try:
        write_file(tmp_path / "other", "new")
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "other").stat().st_mode) == 0o640


def test_what_is_no_ordinary_file_is_written_to():
    with pytest.raises(StorageError, match="make room"):
        write_file("/dev/full", "text")
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)


def test_a_missing_folder_is_no_matter_of_room(tmp_path):
    with pytest.raises(StorageError, match="choose a folder that exists"):
        write_file(tmp_path / "none/file", "text")
    with pytest.raises(StorageError, match="choose a folder that exists"):
        write_file(tmp_path, "text")


@pytest.mark.parametrize(
    "command", [["plan", "digits_vit", "--out"], ["recipes", "copy", "digits_vit", "--force"]], ids=lambda c: c[0]
)
def test_the_command_line_keeps_the_old_file(command, tmp_path):
    path = tmp_path / "file.json"
    path.write_text("old")
    with full_disk():
        result = CliRunner().invoke(app, [*command, str(path)])
    assert result.exit_code == 1 and "make room" in result.stderr
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file.json"]


def test_a_dump_is_whole(tmp_path, monkeypatch):
    monkeypatch.setenv(env.DUMP, str(tmp_path))
    dump("sites.txt", lambda: "old")
    with full_disk(), pytest.raises(StorageError, match="no dump can be written"):
        dump("sites.txt", lambda: "new" * 1000)
    assert (tmp_path / "sites.txt").read_text() == "old"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (41_512, "41.5 kB"), (999_600, "1 MB"), (2e9, "2 GB"), (5e15, "5e+03 TB")],
)
def test_sizes_show_what_there_is(count, text):
    assert size_text(int(count)) == text


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "{", "", b"\xff\xfe\xff"], ids=range(5))
def test_what_is_no_json_is_a_value_error(text):
    with pytest.raises(ValueError):
        parse_json(text)


@pytest.mark.parametrize("rooms", ["sites", "all"])
def test_the_log_of_a_room_is_shown_where_it_was_asked_for(rooms):
    command = [sys.executable, "-m", "acm_compiler", "plan", "shipped:digits_vit"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "ACM_LOG": rooms})
    assert "acm_compiler.passes.survey: 20 sites" in done.stderr


def test_every_room_that_has_a_short_name_is_there():
    from acm_compiler.files import _ROOMS

    for name in _ROOMS.values():
        assert importlib.util.find_spec(f"acm_compiler.{name}")
