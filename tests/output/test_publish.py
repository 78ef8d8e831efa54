"""What the ranks' cells end with, folded."""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest

from nbaccel.output import publish
from nbaccel.output.publish import WaitingLine
from tests.programs import run_program


def plain(text: str) -> dict[str, Any]:
    return {"data": {"text/plain": text}, "metadata": {}}


def rich(text: str, html: str) -> dict[str, Any]:
    return {"data": {"text/plain": text, "text/html": html}, "metadata": {}}


def shown(results: Mapping[int, Mapping[str, Any] | None]) -> list[str]:
    """Each output's text; rich ones with their HTML."""
    found: list[str] = []

    def note(bundle: Mapping[str, Any]) -> None:
        data = bundle["data"]
        found.append(data["text/plain"] + (f" {data['text/html']}" if "text/html" in data else ""))

    with mock.patch.object(publish, "publish_display", note):
        publish.show_results(results)
    return found


def test_equal_results_are_shown_once() -> None:
    assert shown({0: plain("5"), 1: plain("5")}) == ["5"]
    assert shown({1: rich("t", "<b>")}) == ["t <b>"]


def test_nothing_is_shown_for_no_results() -> None:
    assert shown({}) == []
    assert shown({0: None, 1: None}) == []


def test_one_line_results_share_an_output() -> None:
    results = {0: plain("0.9"), 1: plain("0.8"), 2: plain("0.9"), 3: plain("0.9")}
    assert shown(results) == ["[0,2-3] 0.9\n[1] 0.8"]


def test_rich_and_long_results_stand_below_their_label() -> None:
    results = {0: rich("a", "<a>"), 1: plain("x"), 2: rich("b", "<b>"), 3: plain("y\nz")}
    assert shown(results) == ["[0]", "a <a>", "[1] x\n[2]", "b <b>", "[3]", "y\nz"]


def test_the_same_text_with_another_form_or_metadata_is_another_result() -> None:
    assert len(shown({0: rich("t", "<a>"), 1: rich("t", "<b>")})) == 4
    wide = plain("5") | {"metadata": {"width": 3}}
    assert shown({0: plain("5"), 1: wide}) == ["[0] 5\n[1] 5"]


def test_in_a_terminal_the_text_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    publish.show_results({0: rich("text", "<b>"), 1: None})
    assert capsys.readouterr().out == "[0]\ntext\n"


def test_showing_needs_neither_torch_nor_ipython() -> None:
    code = (
        "import sys\n"
        "from nbaccel import RunConfig, resolve\n"
        "from nbaccel.output import publish\n"
        "from nbaccel.output.panel.display import Dashboard\n"
        "publish.show_results({0: {'data': {'text/plain': 'x'}, 'metadata': {}}})\n"
        "Dashboard([0], plan=resolve(RunConfig(num_processes=1, device='cpu'))).finish()\n"
        "print(sorted({'torch', 'IPython'} & set(sys.modules)))"
    )
    done = run_program([sys.executable, "-c", code])
    assert done.stdout == "x\n[]\n"


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
