"""What this process, or another, holds right now."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
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
