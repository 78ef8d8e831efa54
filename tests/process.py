"""What this process, or another, holds right now."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil


def descriptors() -> dict[int, str]:
    """Open descriptors of this process and what they lead to."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one of this very listing
            found[int(entry.name)] = str(entry.readlink())
    return found


def memory_files() -> int:
    """How many of nbaccel's memory files this process has open."""
    return sum("/memfd:nbaccel" in target for target in descriptors().values())


def lives(pid: int) -> bool:
    """Whether a process runs: a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def forked(action: Callable[[], None]) -> int:
    """Run in a child process; returns its pid."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
        finally:
            os._exit(0)
    return pid


@contextlib.contextmanager
def stop_pressed_when(
    is_so: Callable[[], object], *, after_s: float = 0.0, times: int = 1
) -> Iterator[None]:
    """A block in which Stop is pressed as soon as something is so."""
    is_over = threading.Event()

    def press() -> None:
        while not is_over.wait(0.02):
            if is_so():
                break
        for _ in range(times):
            # A press after the block would be for the test run.
            if not is_over.wait(after_s):
                os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    try:
        yield
    finally:
        is_over.set()
        presser.join()
