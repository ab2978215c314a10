"""How far long work has come, on a terminal and off it. No test waits: the clock is the test's own."""

import pytest

from acm_compiler import progress
from acm_compiler.progress import Progress, telling, telling_parts


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


def test_off_a_terminal_a_line_is_said_every_half_minute(clock):
    said: list[str] = []
    with Progress("distill", 100, say=said.append) as work:
        for step in range(1, 41):
            clock.now += 2
            work.advance(f"loss {step / 2}")
    assert said == ["distill: step 15 of 100, loss 7.5, 3 min left", "distill: step 30 of 100, loss 15.0, 2 min left"]


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
    assert said == [
        f"distill: step {step} of 6, loss {step - 1}, 2.4 examples/s, 30% of the time waiting for data, {left} s left"
        for step, left in ((3, 30), (6, 0))
    ]


def test_waiting_that_is_too_short_to_matter_is_not_told(clock):
    said: list[str] = []
    with Progress("evaluate", 10, unit="batch", say=said.append) as work:
        for _ in work.fed(range(2)):
            clock.now += 16
            work.advance(examples=128)
    assert said == ["evaluate: batch 2 of 10, 8 examples/s, 2 min left"]


def test_short_work_and_hidden_work_say_nothing(clock):
    said: list[str] = []
    for shown, seconds in ((True, 29), (False, 300)):
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


def test_what_is_asked_to_tell_is_told_everything(clock):
    said: list[str] = []
    with telling("calibrate", said.append) as say:
        say("one")
        say("two")
        clock.now += 7
        say.done("both")
    assert said == ["one", "two", "calibrate: both, 7 s"]


def test_parts_are_told_with_their_time_and_steps_now_and_then(clock):
    said: list[str] = []
    with telling_parts("calibrate", said.append) as whole, telling("calibrate", whole) as say:
        for number in range(40):
            clock.now += 1
            say(f"read {number} batches")
        say.done("read all")
        clock.now += 120
        say.done("fitted")
    assert said == ["calibrate, read 29 batches", "calibrate: read all, 40 s", "calibrate: fitted, 2.0 min"]


def test_on_a_terminal_parts_stay_above_the_bar(clock, monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    said: list[str] = []
    with telling_parts("calibrate", said.append) as say:
        say("read 1 batch")
        say.done("read all")
    assert said == ["calibrate: read all, 0 s"]
    assert "read 1 batch" in capsys.readouterr().err


def test_where_nobody_asked_the_log_hears_the_latest_now_and_then(clock, caplog):
    with caplog.at_level("INFO", logger="acm_compiler.progress"), telling("calibrate", None) as say:
        for number in range(40):
            clock.now += 1
            say(f"read {number} batches")
    assert caplog.messages == ["calibrate, read 29 batches"]


def test_where_not_even_the_log_listens_stderr_shows_that_work_goes_on(clock, capsys):
    with telling("calibrate", None) as say:
        for number in range(40):
            clock.now += 1
            say(f"read {number} batches")
    assert capsys.readouterr().err == "calibrate, read 29 batches\n"
