"""A script as what a worker runs: as ``python script.py`` would, in a process that is already warm.

    nbaccel launch script.py --lr 0.1   ─► Script ─► run_script(Script) in each worker
                                             │
              sys.argv, sys.path[0] and __main__ are the script's while it runs

`__main__` is replaced and not only its names filled in, so that classes of the script are pickled
(`torch.save`, DataLoader workers) by the name under which they are found again.
"""

from __future__ import annotations

import contextlib
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nbaccel.workers import exit_functions
from nbaccel.workers.failure import FailureRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """What is to be run.

    Attributes:
        kind: ``file``, ``module`` (``python -m``) or ``program`` (no Python).
        target: The file's path, the module's name or the program.
        arguments: What it finds in ``sys.argv`` after its own name.
    """

    kind: Literal["file", "module", "program"]
    target: str
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptEnd:
    """How a script ended in this very process.

    Attributes:
        exit_status: Its exit status.
        record: What it raised; None where it ended by itself.
    """

    exit_status: int = 0
    record: FailureRecord | None = None


def run_script(script: Script) -> None:
    """Run a script, module or program in this process."""
    try:
        _run_in_main(script)
    finally:
        # Scripts count on it; and semaphores of `multiprocessing` would stay in /dev/shm.
        exit_functions.run()


def _run_in_main(script: Script) -> None:
    if script.kind == "program":
        completed = subprocess.run([script.target, *script.arguments], check=False)
        # As a shell says that a signal ended it.
        status = completed.returncode
        raise SystemExit(status if status >= 0 else 128 - status)
    with _names_of_script(script):
        if script.kind == "module":
            runpy.run_module(script.target, run_name="__main__", alter_sys=True)
        else:
            # Absolute, as `__file__` of Python's own scripts: they may change the folder.
            runpy.run_path(str(Path(script.target).absolute()), run_name="__main__")


def run_script_here(script: Script) -> ScriptEnd:
    """Run it as the only process, and tell its end from a mistake that nbaccel found."""
    try:
        _run_in_main(script)
    except SystemExit as exit_:
        return ScriptEnd(exit_status=exit_status_of(exit_.code))
    except Exception as error:  # the user's code may raise anything
        record = FailureRecord.of_error(0, error, failure_time=time.monotonic())
        return ScriptEnd(exit_status=1, record=record)
    return ScriptEnd()


def exit_status_of(exit_code: object) -> int:
    """The status that Python exits with for an argument of ``sys.exit``; text is printed."""
    if exit_code is None or isinstance(exit_code, int):
        return int(exit_code or 0)
    print(exit_code, file=sys.stderr)  # noqa: T201  # as Python does
    return 1


@contextlib.contextmanager
def _names_of_script(script: Script) -> Iterator[None]:
    """``sys.argv`` and ``sys.path`` as the script expects them, within the block."""
    argv_before = sys.argv[:]
    path_before = sys.path[:]
    sys.argv[:] = [script.target, *script.arguments]
    # `python -P` and PYTHONSAFEPATH put no folder in front.
    if not getattr(sys.flags, "safe_path", False):
        folder = Path.cwd() if script.kind == "module" else Path(script.target).resolve().parent
        # The first entry is the folder of the command `nbaccel` itself.
        sys.path[:1] = [str(folder)]
    try:
        yield
    finally:
        sys.argv[:] = argv_before
        sys.path[:] = path_before
