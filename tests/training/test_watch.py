"""Warnings at the end of a phase, and signals during it."""

import logging
import os
import signal
import threading

import pytest

from acm_compiler.training.phase import Figures
from acm_compiler.training.watch import WINDOW, Interrupts, Watch, warn_of_collapse, warn_of_missed_budget


def seen(*steps: Figures) -> Watch:
    """A watch that saw these steps."""
    watch = Watch()
    for figures in steps:
        watch.see(figures)
    return watch


def chose(reached: float | None = None, **counts: list[float]) -> Figures:
    """Figures of a step in which each site made so many of each choice."""
    return Figures(terms={"loss": 0.0}, reached=reached, choices=counts)


def test_only_a_site_with_a_choice_that_never_varies_has_collapsed():
    watch = seen(chose(a=[0.0, 9.0], b=[5.0, 4.0], c=[9.0], d=[0.0, 0.0]), chose(a=[0.0, 1.0], b=[9.0, 0.0]))
    assert watch.collapsed() == {"a": 1}


def test_what_lies_before_the_last_steps_does_not_count():
    steps = [chose(0.9, a=[1.0, 0.0])] + [chose(0.5, a=[0.0, 1.0])] * WINDOW
    assert seen(*steps).collapsed() == {"a": 1} and seen(*steps).reached == pytest.approx(0.5)
    assert seen(*steps[:-1]).collapsed() == {}
    assert seen().reached is None and seen(chose()).reached is None


def test_the_warning_names_k_and_the_remedy(caplog):
    with caplog.at_level(logging.WARNING):
        warn_of_collapse(seen(chose(a=[0.0, 9.0])), "gate", {"a": 1, "b": 0}, remedy="distill for longer")
        warn_of_collapse(seen(chose(a=[4.0, 5.0])), "gate", {"a": 1}, remedy="nothing")
    (record,) = caplog.records
    assert "1 of 2 gates run the same k for every token: a (k = 2)" in record.getMessage()
    assert "distill for longer" in record.getMessage()


@pytest.mark.parametrize(("reached", "warns"), [(0.6, False), (0.609, False), (0.62, True), (None, False)])
def test_a_missed_budget_is_warned_of(reached, warns, caplog):
    with caplog.at_level(logging.WARNING):
        warn_of_missed_budget(seen(chose(reached)), 0.6)
    assert bool(caplog.records) == warns


def test_the_first_signal_is_remembered_and_the_second_is_not_held_back():
    interrupts, before = Interrupts(), signal.getsignal(signal.SIGINT)
    with interrupts.watched():
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.received is signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_paused_a_signal_has_its_usual_effect():
    interrupts = Interrupts()
    with interrupts.watched():
        with pytest.raises(KeyboardInterrupt), interrupts.paused():
            os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.received is None
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.received is signal.SIGINT


def test_in_another_thread_nothing_changes():
    before, during = signal.getsignal(signal.SIGINT), []

    def watch():
        with Interrupts().watched():
            during.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    assert during == [before]
