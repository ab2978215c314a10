"""Progress of long work, on a terminal and off it. No test waits: the clock is the test's own."""

import pytest

from acm_compiler import progress
from acm_compiler.progress import Progress, progress_of


class Clock:
    """Seconds that pass when the test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(progress, "monotonic", made)
    return made


def test_off_a_terminal_a_line_is_said_every_ten_seconds(clock):
    said: list[str] = []
    with Progress("distill", 100, say=said.append) as work:
        for step in range(1, 14):
            clock.now += 2
            work.advance(f"loss {step / 2}")
    assert said == ["distill: step 5 of 100, loss 2.5, 3 min left", "distill: step 10 of 100, loss 5.0, 3 min left"]


def test_the_time_left_of_a_continued_run_follows_the_steps_it_made_itself(clock):
    said: list[str] = []
    with Progress("gate", 100, done=90, say=said.append) as work:
        clock.now += 30
        work.advance()
    assert said == ["gate: step 91 of 100, 4 min left"]


def test_examples_are_told_per_second_and_how_long_the_work_waited_for_them(clock):
    said: list[str] = []

    def slow():
        for item in range(6):
            clock.now += 3
            yield item

    with Progress("distill", 6, say=said.append) as work:
        for item in work.fed(slow()):
            clock.now += 7
            work.advance(f"loss {item}", examples=24)
    pace = "2.4 examples/s, 30% of the time waiting for data"
    assert said == [
        f"distill: step {step} of 6, loss {step - 1}, {pace}, {60 - 10 * step} s left" for step in range(1, 7)
    ]


def test_waiting_that_is_too_short_to_matter_is_not_told(clock):
    said: list[str] = []
    with Progress("evaluate", 10, unit="batch", say=said.append) as work:
        for _ in work.fed(range(2)):
            clock.now += 8
            work.advance(examples=64)
    assert said == ["evaluate: batch 2 of 10, 8 examples/s, 64 s left"]


def test_short_work_and_hidden_work_say_nothing(clock):
    said: list[str] = []
    for shown, seconds in ((True, 9), (False, 300)):
        with Progress("x", 2, say=said.append, shown=shown) as work:
            clock.now += seconds
            work.advance()
    assert said == []


def test_a_terminal_gets_a_bar_and_no_lines(clock, monkeypatch, capsys):
    said: list[str] = []
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with Progress("distill", 4, say=said.append) as work:
        for _ in range(4):
            clock.now += 60
            work.advance("loss 1")
    assert said == []
    assert "distill" in capsys.readouterr().err


def test_who_asked_hears_every_step_and_part(clock):
    said: list[str] = []
    with progress_of("calibrate", said.append) as work:
        work.part("site", 60, done=4)
        for name in ("a", "b"):
            clock.now += 7
            work.advance(name)
        work.finish("sites fitted")
        work.part("budget", 6)
        clock.now += 1
        work.advance(to=3)
    assert said == [
        "calibrate: site 5 of 60, a, 6 min left",
        "calibrate: site 6 of 60, b, 6 min left",
        "calibrate: sites fitted, 14 s",
        "calibrate: budget 3 of 6, 1 s left",
    ]


def test_parts_of_a_run_are_told_with_their_time_and_steps_now_and_then(clock):
    said: list[str] = []
    with Progress("calibrate", say=said.append) as whole, progress_of("calibrate", whole) as work:
        work.part("token", 2000)
        for number in range(1, 21):
            clock.now += 1
            work.advance(f"{number} batches", to=100 * number)
        work.finish("read all")
        clock.now += 120
        work.finish("fitted")
    assert said == [
        "calibrate: token 1,000 of 2,000, 10 batches, 10 s left",
        "calibrate: token 2,000 of 2,000, 20 batches, 0 s left",
        "calibrate: read all, 20 s",
        "calibrate: fitted, 2.0 min",
    ]


def test_on_a_terminal_parts_stay_above_the_bar(clock, monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    said: list[str] = []
    with Progress("calibrate", say=said.append) as work:
        work.part("site", 60)
        work.advance("blocks.0.mlp", to=7)
        work.finish("read all")
    assert said == ["calibrate: read all, 0 s"]
    shown = capsys.readouterr().err
    assert "7/60" in shown and "blocks.0.mlp" in shown


def test_where_nobody_asked_the_log_hears_the_latest_now_and_then(clock, caplog):
    with caplog.at_level("INFO", logger="acm_compiler.progress"), progress_of("calibrate", None) as work:
        work.part("site", 15)
        for _ in range(15):
            clock.now += 1
            work.advance()
        work.finish("fitted")
    assert caplog.messages == ["calibrate: site 10 of 15, 5 s left", "calibrate: fitted, 15 s"]


def test_where_not_even_the_log_listens_stderr_shows_that_work_goes_on(clock, capsys):
    with progress_of("calibrate", None) as work:
        work.part("site", 15)
        for _ in range(15):
            clock.now += 1
            work.advance()
        work.finish("fitted")
    assert capsys.readouterr().err == "calibrate: site 10 of 15, 5 s left\n"
