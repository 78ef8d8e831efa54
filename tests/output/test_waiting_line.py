"""What a start of workers waits for: one line, after half a second, that goes away."""

from __future__ import annotations

import io
import sys

import pytest

from nbaccel.output import publish
from nbaccel.output.publish import WaitingLine


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


class Terminal(io.StringIO):
    """A stream that is one."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock() -> Clock:
    return Clock()


def open_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """In the test itself: pytest puts its own stream back after the fixtures."""
    found = Terminal()
    monkeypatch.setattr(sys, "stderr", found)
    return found


def screen(terminal: Terminal) -> str:
    """What a terminal shows of one line."""
    return terminal.getvalue().rpartition("\x1b[K")[2]


def test_a_short_start_leaves_no_trace(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    line = WaitingLine(2, read_clock=clock)
    assert line.due_in() == publish.SHOWN_AFTER_S
    line.say("importing torch")
    clock.seconds += publish.SHOWN_AFTER_S - 0.01
    line.say("importing torch")
    line.close()
    assert terminal.getvalue() == ""


def test_a_long_one_is_told_and_changes_and_goes_away(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = open_terminal(monkeypatch)
    line = WaitingLine(2, read_clock=clock)
    clock.seconds += 0.6
    assert line.due_in() == 0.0
    line.say("importing torch")
    assert screen(terminal) == "nbaccel: starting 2 workers: importing torch …"
    assert line.due_in() == float("inf")
    written = len(terminal.getvalue())
    line.say("importing torch")
    assert len(terminal.getvalue()) == written, "the same again"
    line.say("")
    assert screen(terminal) == "nbaccel: starting 2 workers …"
    line.close()
    assert screen(terminal) == ""
    line.say("importing torch")
    assert screen(terminal) == "", "it is over"
    assert "\n" not in terminal.getvalue()


def test_a_file_gets_nothing(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    found = io.StringIO()
    monkeypatch.setattr(sys, "stderr", found)
    line = WaitingLine(1, read_clock=clock)
    clock.seconds += 10.0
    line.say("importing torch")
    line.close()
    assert found.getvalue() == ""
