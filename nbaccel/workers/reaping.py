"""The end of a worker process, for whoever forked it, and of all that the worker has started.

A process that a worker starts may leave its process group (`setsid`, `Popen(process_group=0)`) or
its parent (a daemon, forked twice). Worker and template are therefore *subreapers*
(prctl(2), PR_SET_CHILD_SUBREAPER): whatever loses its parent becomes their child, and is found.

    worker ends by itself ─► it ends its descendants, and names those that had left its group
    worker is killed ─► they become the template's children, which ends all that are not its workers
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

from nbaccel.workers import time_limits
from nbaccel.workers.messaging import Ended

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
WORKER_NAME = "nbaccel-worker"
_REAP_PAUSE_S = 0.002


def take_name(process_name: str) -> None:
    """Be shown under this name by `ps` and `top`, also in a fork of a process with another one."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, process_name.encode(), 0, 0, 0)


def end_with_parent(*, is_wanted: bool = True) -> None:
    """Have this process killed when the thread that forked it ends."""
    death_signal = signal.SIGKILL if is_wanted else 0
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, death_signal)


def adopt_orphans() -> None:
    """Let descendants of this process whose parent ends become its children."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_descendants(kept_ids: Collection[int] = ()) -> list[str]:
    """Kill and collect everything that this process has started, or adopted."""
    commands_by_id: dict[int, str] = {}
    kill_deadline = time.monotonic() + time_limits.DESCENDANTS_S
    # Repeated, because a process may start another before it dies, and orphans become children.
    while processes_left := [
        descendant_id
        for child_id in child_processes(os.getpid(), kept_ids)
        for descendant_id in _with_children(child_id)
    ]:
        for process_id in processes_left:
            # Before the kill: a dead process has no command line.
            commands_by_id.setdefault(process_id, _stray_process(process_id))
            # It has ended already, or runs as another user (sudo).
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process_id, signal.SIGKILL)
        for process_id in processes_left:
            # A grandchild is not waited for here; it becomes a child once its parent is gone.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process_id, os.WNOHANG)
        if time.monotonic() > kill_deadline:
            break
        time.sleep(_REAP_PAUSE_S)
    return [process_name for process_name in commands_by_id.values() if process_name]


def _with_children(process_id: int) -> Iterator[int]:
    for child_id in child_processes(process_id):
        yield from _with_children(child_id)
    yield process_id


def child_processes(process_id: int, kept_ids: Collection[int] = ()) -> list[int]:
    """Children of a process, those that have ended and were not waited for included."""
    try:
        # psutil would read about every process of the machine to find them.
        task_folders = list(Path(f"/proc/{process_id}/task").iterdir())
        children = [
            int(child_number)
            for task_folder in task_folders
            for child_number in (task_folder / "children").read_text().split()
        ]
    # It has ended, or this kernel is built without /proc/…/children.
    except OSError:
        with contextlib.suppress(psutil.Error):
            return [
                child.pid
                for child in psutil.Process(process_id).children()
                if child.pid not in kept_ids
            ]
        return []
    return [child_id for child_id in children if child_id not in kept_ids]


def _stray_process(process_id: int) -> str:
    """The command of a living process outside this one's group; empty for any other."""
    with contextlib.suppress(psutil.Error, ProcessLookupError):
        stray_process = psutil.Process(process_id)
        if (
            os.getpgid(process_id) != os.getpgid(0)
            and stray_process.status() != psutil.STATUS_ZOMBIE
        ):
            return (
                f"{' '.join(stray_process.cmdline())[:60] or stray_process.name()} (process "
                f"{process_id})"
            )
    return ""


def reap(process_id: int) -> Ended | None:
    """Collect a child that has ended, with everything it started; None if it still runs.

    Its process group goes first, while the dead leader still holds the number: DataLoader workers
    and subprocesses of a killed worker would live on otherwise.
    """
    try:
        result = os.waitid(os.P_PID, process_id, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        # Other code of this process has waited for it: its status is lost.
        return Ended(process_id, -signal.SIGKILL, 0)
    if result is None:
        return None
    end_group(process_id)
    _, exit_status, resource_usage = os.wait4(process_id, 0)
    return Ended(
        process_id, os.waitstatus_to_exitcode(exit_status), resource_usage.ru_maxrss * 1024
    )


def end_group(process_id: int) -> None:
    """Kill a worker and everything it started that has not left its process group."""
    # The process too: one that was just forked may not have made its group yet.
    for function in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            function(process_id, signal.SIGKILL)
