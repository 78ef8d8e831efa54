"""The end of a worker process, for whoever forked it, and of all that the worker has started.

A process that a worker starts may leave its process group (`setsid`, `Popen(process_group=0)`) or
its parent (a daemon, forked twice). Worker and template are therefore *subreapers*
(prctl(2), PR_SET_CHILD_SUBREAPER): whatever loses its parent becomes their child, and is found.

    worker ends by itself ─► it ends its own descendants, and names those that had left its group
    worker is killed ─► they become the template's children, which ends what is no worker of its own
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import psutil

from nbaccel.launch.wire import Ended

_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
_PATIENCE_S = 2.0  # a killed process that does not end sits in a driver: it is not waited for
_PAUSE_S = 0.002


def adopt_orphans() -> None:
    """Let descendants of this process whose parent ends become its children."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_descendants(keep: Collection[int] = ()) -> list[str]:
    """Kill and collect everything that this process has started, or adopted.

    Args:
        keep: Children that live on, with all that is theirs.

    Returns:
        The commands of those that had left the process group, for the user to be told.
    """
    told: dict[int, str] = {}
    until = time.monotonic() + _PATIENCE_S
    # Again and again: what is being ended may start another one, and grandchildren become ours.
    while left := [p for child in _children(os.getpid(), keep) for p in _with_children(child)]:
        for pid in left:
            told.setdefault(pid, _stray(pid))
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for pid in left:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > until:
            break
        time.sleep(_PAUSE_S)
    return [name for name in told.values() if name]


def _with_children(pid: int) -> Iterator[int]:
    for child in _children(pid):
        yield from _with_children(child)
    yield pid


def _children(pid: int, keep: Collection[int] = ()) -> list[int]:
    try:
        # What psutil would find by reading about every process of the machine.
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        found = [int(n) for task in tasks for n in (task / "children").read_text().split()]
    except OSError:  # it has ended, or this kernel has no such file
        with contextlib.suppress(psutil.Error):
            return [p.pid for p in psutil.Process(pid).children() if p.pid not in keep]
        return []
    return [child for child in found if child not in keep]


def _stray(pid: int) -> str:
    """The command of a living process outside this one's group; empty for any other."""
    with contextlib.suppress(psutil.Error, ProcessLookupError):
        process = psutil.Process(pid)
        if os.getpgid(pid) != os.getpgid(0) and process.status() != psutil.STATUS_ZOMBIE:
            return f"{' '.join(process.cmdline())[:60] or process.name()} (process {pid})"
    return ""


def reap(pid: int) -> Ended | None:
    """Collect a child that has ended, with everything it started; None if it still runs.

    Its process group goes first, while the dead leader still holds the number: DataLoader workers
    and subprocesses of a killed worker would live on otherwise.
    """
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return Ended(pid, -signal.SIGKILL, 0)  # somebody else collected it: its status is lost
    if found is None:
        return None
    end_group(pid)
    _, status, usage = os.wait4(pid, 0)
    return Ended(pid, os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024)


def end_group(pid: int) -> None:
    """Kill a worker and everything it started that has not left its process group."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
