"""The end of a worker process, for whoever forked it, and of all that the worker has started.

A process that a worker starts may leave its process group (`setsid`, `Popen(process_group=0)`) or
its parent (a daemon, forked twice). Worker and template are therefore *subreapers*
(prctl(2), PR_SET_CHILD_SUBREAPER): whatever loses its parent becomes their child, and is found.

A worker leaves by ``os._exit``, and does by itself what Python does at the end of a process:
trackers finish their runs, log files are flushed, temporary folders go. It is a fork, so what its
parent has registered is left to the parent.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import multiprocessing.util
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NoReturn

import psutil

from nbaccel.workers import time_limits

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
WORKER_NAME = "nbaccel-worker"
_REAP_PAUSE_S = 0.002


def take_name(name: str) -> None:
    """Be shown under this name by `ps` and `top`, also in a fork of a process with another one."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def end_with_parent() -> None:
    """Have this process killed when the thread that forked it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Let descendants of this process whose parent ends become its children."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_descendants(kept_ids: Collection[int] = ()) -> list[str]:
    """Kill and collect everything that this process has started, or adopted."""
    commands: dict[int, str] = {}
    deadline = time.monotonic() + time_limits.DESCENDANTS_S
    # Repeated, because a process may start another before it dies, and orphans become children.
    while pids := [
        pid
        for child in child_processes(os.getpid())
        if child not in kept_ids
        for pid in _with_children(child)
    ]:
        for pid in pids:
            # Before the kill: a dead process has no command line.
            commands.setdefault(pid, _stray_process(pid))
            # It has ended already, or runs as another user (sudo).
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            # A grandchild is not waited for here; it becomes a child once its parent is gone.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > deadline:
            break
        time.sleep(_REAP_PAUSE_S)
    return [command for command in commands.values() if command]


def _with_children(pid: int) -> Iterator[int]:
    for child in child_processes(pid):
        yield from _with_children(child)
    yield pid


def child_processes(pid: int) -> list[int]:
    """Children of a process, those that have ended and were not waited for included."""
    try:
        # psutil would read about every process of the machine to find them.
        return [
            int(child)
            for folder in list(Path(f"/proc/{pid}/task").iterdir())
            for child in (folder / "children").read_text().split()
        ]
    # It has ended, or this kernel is built without /proc/…/children.
    except OSError:
        with contextlib.suppress(psutil.Error):
            return [child.pid for child in psutil.Process(pid).children()]
        return []


def _stray_process(pid: int) -> str:
    """The command of a living process outside this one's group; empty for any other."""
    with contextlib.suppress(psutil.Error, ProcessLookupError):
        process = psutil.Process(pid)
        if os.getpgid(pid) != os.getpgid(0) and process.status() != psutil.STATUS_ZOMBIE:
            return f"{' '.join(process.cmdline())[:60] or process.name()} (process {pid})"
    return ""


def forget_inherited() -> None:
    """Leave to the parent what it has registered, such as the end of its temporary folders."""
    # Else locks of queues stay as they were, and ranks would speak to a manager by one connection.
    multiprocessing.util._run_after_forkers()  # type: ignore[attr-defined]
    atexit._clear()
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    # Those that Python registers once in a process, and that now have work of this one only.
    atexit.register(weakref.finalize._exitfunc)  # type: ignore[attr-defined]
    atexit.register(multiprocessing.util._run_finalizers)  # type: ignore[attr-defined]
    atexit.register(logging.shutdown)


def run_exit_functions(limit_s: float = 0, exit_status: int = 0) -> None:
    """Wait for threads and call what was registered in this process, at most so long."""

    def give_up(_number: int, _frame: Any) -> NoReturn:
        sys.stderr.write(
            f"nbaccel: what libraries do at a process's end took more than {limit_s:g} s, and was "
            "given up: some may not be written. End trackers and writers in the function itself.\n"
        )
        os._exit(exit_status)

    if limit_s:
        signal.signal(signal.SIGALRM, give_up)
        signal.setitimer(signal.ITIMER_REAL, limit_s)
    for step in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]
        # They report their own errors, which must not cost the result.
        with contextlib.suppress(Exception):
            step()
    if limit_s:
        # What follows is not theirs.
        signal.setitimer(signal.ITIMER_REAL, 0)
