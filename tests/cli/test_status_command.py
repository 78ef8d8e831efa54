"""``nbaccel status``: runs that go on are listed, told apart from dead ones, and stopped."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbaccel.cli import main
from nbaccel.output.panel.facts import RunBoard
from nbaccel.output.panel.run_notes import NoteFile, noted_runs
from tests.output.panel.finished import report

WAIT_S = 100.0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the notes of this test are."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    # What else trains on this machine is noted elsewhere.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"nbaccel-{os.geteuid()}"


def board_at(step: int) -> RunBoard:
    board = RunBoard([0, 1], began_at=0.0)
    for rank in (0, 1):
        board.receive(rank, report(1.0, step, {"loss": 0.25 + rank / 2}))
    board.now = 1.0
    return board


def wait_for_note(process: subprocess.Popen[str]) -> list[str]:
    """Wait until the run of a process is listed."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline and process.poll() is None:
        if ids := [note.id for note in noted_runs() if note.pid == process.pid]:
            return ids
        time.sleep(0.05)
    raise AssertionError("the run was not listed")


@pytest.fixture
def training(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A program that trains, and says how that has ended."""
    program = """
        import time
        from nbaccel import notebook_launcher
        def endless():
            time.sleep(600)
        try:
            notebook_launcher(endless, (), 2)
        except KeyboardInterrupt:
            print("stopped")
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True
    )
    yield process
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        process.wait(WAIT_S)
    assert process.stdout is not None
    process.stdout.close()


def test_without_a_run_or_a_number_it_says_so(folder, capsys):
    assert main(["status"]) == 0
    assert capsys.readouterr().out == "nbaccel: no run goes on\n"
    assert main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert main(["status", "--stop", "123"]) == 2
    assert "--stop 123: no run of yours has this number now" in capsys.readouterr().err


def test_a_run_is_listed_with_how_far_it_is(folder, capsys):
    note = NoteFile("train")
    note.write(board_at(step=412))
    assert main(["status"]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["id", "what", "for", "workers", "progress", "loss", "left"]
    assert " train " in row
    assert row.split()[-5:] == ["2", "step", "412", "0.5", "-"]
    assert main(["status", "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert (told["pid"], told["step"], told["num_workers"]) == (os.getpid(), 412, 2)
    note.remove()
    assert list(folder.iterdir()) == []
    note.write(board_at(step=413))
    assert noted_runs() == [], "after its end nothing is noted"


def test_nobody_else_can_look_or_leave_something_there(folder):
    note = NoteFile("train")
    note.write(board_at(step=1))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert len(noted_runs()) == 1
    # As another user might have made it.
    folder.chmod(0o777)
    assert noted_runs() == []
    folder.chmod(0o700)
    note.remove()


def test_a_link_in_its_place_is_not_followed(folder, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    folder.symlink_to(elsewhere)
    note = NoteFile("train")
    note.write(board_at(step=1))
    assert list(elsewhere.iterdir()) == []
    note.remove()


@pytest.mark.parametrize("change", ["process_began", "pid"])
def test_what_a_process_has_left_that_is_gone_is_removed(folder, change):
    note = NoteFile("train")
    note.write(board_at(step=1))
    (path,) = folder.iterdir()
    told = json.loads(path.read_text())
    # Another process may have got the number, or none has it.
    told[change] = told[change] - 100 if change == "process_began" else 2**22 + 1
    path.write_text(json.dumps(told))
    (folder / "4194305-1.part").write_text("{")
    (folder / "7-2.json").write_text("of another version")
    assert noted_runs() == []
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_a_run_is_stopped_as_by_its_button(training, folder, capsys):
    (note_id,) = wait_for_note(training)
    assert main(["status", "--stop", note_id]) == 0
    assert "has been told to stop" in capsys.readouterr().out
    assert training.communicate(timeout=WAIT_S)[0] == "stopped\n"
    assert list(folder.iterdir()) == [], "nothing is left"
