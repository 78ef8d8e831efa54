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
from tests.clock import Clock
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


ONE_LINE = {0: plain("0.9"), 1: plain("0.8"), 2: plain("0.9"), 3: plain("0.9")}
LONG = {0: rich("a", "<a>"), 1: plain("x"), 2: rich("b", "<b>"), 3: plain("y\nz")}


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ({0: plain("5"), 1: plain("5")}, ["5"]),
        ({1: rich("t", "<b>")}, ["t <b>"]),
        ({}, []),
        ({0: None, 1: None}, []),
        # Results of one line share an output; others stand below their label.
        (ONE_LINE, ["[0,2-3] 0.9\n[1] 0.8"]),
        (LONG, ["[0]", "a <a>", "[1] x\n[2]", "b <b>", "[3]", "y\nz"]),
        # The same text with another form or metadata is another result.
        ({0: rich("t", "<a>"), 1: rich("t", "<b>")}, ["[0]", "t <a>", "[1]", "t <b>"]),
        ({0: plain("5"), 1: plain("5") | {"metadata": {"width": 3}}}, ["[0] 5\n[1] 5"]),
    ],
)
def test_equal_results_are_shown_once(results, expected):
    assert shown(results) == expected


def test_in_a_terminal_the_text_is_printed_without_torch_or_ipython(capsys):
    publish.show_results({0: rich("text", "<b>"), 1: None})
    assert capsys.readouterr().out == "[0]\ntext\n"

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


def screen(terminal: io.StringIO) -> str:
    """What a terminal shows of one line."""
    return terminal.getvalue().rpartition("\x1b[K")[2]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_long_start_is_told_and_changes_and_goes_away(monkeypatch, is_terminal):
    clock, terminal = Clock(), io.StringIO()
    terminal.isatty = lambda: is_terminal  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", terminal)
    line = WaitingLine(2, read_clock=clock)
    if is_terminal:
        assert line.due_in() == publish.SHOWN_AFTER_S
    clock.now += publish.SHOWN_AFTER_S - 0.01
    line.say("importing torch")
    assert terminal.getvalue() == ""
    clock.now += 10.0
    if not is_terminal:
        line.say("importing torch")
        line.close()
        assert terminal.getvalue() == ""
        return
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
