"""Where a launch that is stopped keeps its function's state; and scripts as launched functions.

A script runs as ``python script.py`` would, in a process that is already warm. `__main__` is
replaced and not only its names filled in, so that classes of the script are pickled (`torch.save`,
DataLoader workers) by the name under which they are found again.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nbaccel.base.errors import ConfigError, LaunchInterrupted
from nbaccel.config.call_arguments import Script
from nbaccel.config.capabilities import engine_row
from nbaccel.config.given_values import RESUME_HERE
from nbaccel.plan import Plan
from nbaccel.workers.failure import FailureRecord

_FOLDERS: dict[str, str] = {}  # module and name of a function → its folder, until this process ends


def resume_folder(plan: Plan, function: Callable[..., Any]) -> Path | None:
    """The folder for launches of this function, by the setting `resume`; None without it."""
    config = plan.config
    if not config.resume:
        return None
    if config.num_nodes > 1:
        raise ConfigError(
            f"resume={config.resume!r} with num_nodes={config.num_nodes}: notebooks that meet stop "
            "in no common step to go on from. Leave it out, and call accelerator.save_state."
        )
    if config.resume != RESUME_HERE:
        return Path(config.resume).absolute()
    if engine_row(plan.engine).runs_on_hosts:
        raise ConfigError(
            f"resume=True with engine={plan.engine!r}: what is kept would lie on this host, where "
            "the other hosts' workers do not find it. Give a folder that all hosts see."
        )
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"
    if name not in _FOLDERS:
        _FOLDERS[name] = tempfile.mkdtemp(prefix="nbaccel-resume-")
        atexit.register(_remove, os.getpid(), _FOLDERS[name])
    return Path(_FOLDERS[name])


def note_end(
    folder: Path | None, stopped: LaunchInterrupted | None, *, has_ended: bool = False
) -> None:
    """A launch was stopped, or its functions have ended: whether the next one can go on."""
    kept = list(folder.glob("*/position.json")) if folder is not None else []
    if stopped is None or has_ended:
        for position in kept:
            shutil.rmtree(position.parent, ignore_errors=True)
    elif kept:
        stopped.args = (f"{stopped}; run it again to go on from there",)
    elif folder is None:
        stopped.args = (f"{stopped}; with resume=True the next launch would go on from there",)


def _remove(process_id: int, folder: str) -> None:
    # A process that was forked from this one has the function, too.
    if os.getpid() == process_id:
        shutil.rmtree(folder, ignore_errors=True)


def run_script(script: Script) -> None:
    """Run a script, module or program in this process."""
    # Here, because it imports numpy: the command line has an answer before.
    from nbaccel.workers.reaping import run_exit_functions

    try:
        _run_in_main(script)
    finally:
        # Scripts count on it; and semaphores of `multiprocessing` would stay in /dev/shm.
        run_exit_functions()


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


def run_script_here(script: Script) -> int | FailureRecord:
    """Its exit status, or what it has raised: raised here, that would look like nbaccel's."""
    try:
        _run_in_main(script)
    except SystemExit as exit_:
        return exit_status_of(exit_.code)
    except Exception as error:  # the user's code may raise anything
        return FailureRecord.of_error(0, error, failure_time=time.monotonic())
    return 0


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
