"""The end of a worker process, for whoever forked it."""

from __future__ import annotations

import contextlib
import os
import signal

from nbaccel.launch.wire import Ended


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
