"""Notes about the runs that go on, a file each, which `nbaccel status` reads.

The folder is nobody else's: it belongs to the user, and only the user may enter it. Where that
cannot be had there are no notes, and no run is kept from training. The note of a process that was
killed is removed by the next one that looks.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os
import signal
import stat
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from nbaccel.base import env, frames
from nbaccel.base.errors import ConfigError
from nbaccel.output.panel.facts import RunBoard, mean, most_left, steps_in_all
from nbaccel.output.panel.live_html import epoch_of

_INTERVAL_S = 2.0
_SAME_START_S = 1.0  # the start of a process is known to a hundredth, and a clock may be set
_NUMBERS = itertools.count(1)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunNote:
    """A run that goes on; its times are in seconds since 1970."""

    id: str
    pid: int
    process_began: float  # another process may get its number later
    name: str  # a notebook or a script, and a function or a cell
    began: float
    num_workers: int
    step: int | None
    steps_in_all: int | None
    epoch: str
    loss: float | None
    left_s: float | None
    left_of: str  # `epoch` or `loop`, where it is not that of the whole run
    seen: float
    is_stoppable: bool


class NoteFile:
    """The note about one run, written by the process that has begun it."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._path: Path | None = None
        self._next = 0.0

    def write(self, board: RunBoard) -> None:
        """Note how far it is, if that has not been noted for a while."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _INTERVAL_S
        # A full disk, or a folder that is gone, must not end a training.
        with contextlib.suppress(OSError):
            if self._path is None:
                noted_runs()  # which removes those of killed processes
                if (folder := _own_folder(makes=True)) is None:
                    return
                self._path = folder / f"{os.getpid()}-{next(_NUMBERS)}.json"
            note = _note_of(board, self._path.stem, self._title)
            # Readers see the old note or the new one.
            written = self._path.with_suffix(".part")
            written.write_text(json.dumps(asdict(note)), encoding="utf-8")
            written.replace(self._path)

    def remove(self) -> None:
        """The run is over."""
        if self._path is not None:
            for path in (self._path, self._path.with_suffix(".part")):
                with contextlib.suppress(OSError):
                    path.unlink()
        self._path = None
        self._next = math.inf


def noted_runs() -> list[RunNote]:
    """The runs that go on; files of processes that are gone are removed."""
    notes = []
    folder = _own_folder()
    for path in sorted(folder.iterdir()) if folder is not None else ():
        pid = path.name.partition("-")[0]
        if path.suffix == ".part" and pid.isdecimal() and psutil.pid_exists(int(pid)):
            continue
        # It may have ended, and its note be gone, since the folder was read.
        with contextlib.suppress(OSError):
            note = _read(path)
            if note is None or _process_of(note) is None:
                path.unlink()
            else:
                notes.append(note)
    return notes


def interrupt_run(name: str) -> RunNote:
    """Do what the Stop button does."""
    notes = noted_runs()
    note = next((note for note in notes if name in (note.id, str(note.pid))), None)
    if note is None:
        known = ", ".join(note.id for note in notes) or "none"
        raise ConfigError(
            f"--stop {name}: no run of yours has this number now, so nothing was stopped: it may "
            f"have ended. Runs that go on: {known}. nbaccel status shows them."
        )
    process = _process_of(note)
    if process is None or not note.is_stoppable:
        raise ConfigError(
            f"--stop {name}: its process was not interrupted, because the run is in a thread that "
            "no interrupt reaches. End the process itself, or wait for the run."
        )
    process.send_signal(signal.SIGINT)
    return note


def _own_folder(*, makes: bool = False) -> Path | None:
    """Where this user's notes are; None where something stands there that others may change."""
    folder = Path(tempfile.gettempdir()) / f"nbaccel-{os.geteuid()}"
    with contextlib.suppress(OSError):
        if makes:
            folder.mkdir(mode=0o700, exist_ok=True)
        # Not of what a link leads to: among temporary files anybody can make one.
        found = folder.lstat()
        is_own = found.st_uid == os.geteuid() and not found.st_mode & 0o077
        return folder if stat.S_ISDIR(found.st_mode) and is_own else None
    return None


def _read(path: Path) -> RunNote | None:
    try:
        return RunNote(**json.loads(path.read_text(encoding="utf-8")))
    except (TypeError, ValueError):  # of another version of nbaccel, or no note at all
        return None


def _process_of(note: RunNote) -> psutil.Process | None:
    try:
        process = psutil.Process(note.pid)
        is_same = abs(process.create_time() - note.process_began) < _SAME_START_S
        is_own = process.uids().real == os.getuid()
        return process if is_same and is_own and process.is_running() else None
    except psutil.Error:
        return None


def _note_of(board: RunBoard, note_id: str, title: str) -> RunNote:
    leading = board.leading_rank
    loss = mean(facts.loss.last for facts in board.ranks.values() if facts.loss.last is not None)
    left = most_left(board.ranks.values(), board.now)
    return RunNote(
        id=note_id,
        pid=os.getpid(),
        process_began=psutil.Process().create_time(),
        name=" · ".join(filter(None, (_program_name(), title))),
        began=board.began_on.timestamp(),
        num_workers=len(board.ranks),
        step=leading.told.steps if leading is not None else None,
        steps_in_all=steps_in_all(leading, board.now) if leading is not None else None,
        epoch=epoch_of(leading, board.now) if leading is not None else "",
        # JSON has no other numbers.
        loss=loss if loss is not None and math.isfinite(loss) else None,
        left_s=left.seconds if left is not None else None,
        left_of=left.of_what if left is not None else "",
        seen=time.time(),
        is_stoppable=threading.current_thread() is threading.main_thread(),
    )


@functools.cache
def _program_name() -> str:
    """The notebook's file name as far as the front end tells it, or the script's."""
    if frames.running_shell() is None:
        name = Path(sys.argv[0]).name
        # Of `nbaccel launch`, the title is the script.
        return "" if name in ("nbaccel", "__main__.py") else name
    return Path(env.read("JPY_SESSION_NAME") or env.read("__vsc_ipynb_file__") or "notebook").name
