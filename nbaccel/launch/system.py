"""What the system says about a worker's death."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

from nbaccel.units import format_bytes


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Let a KeyboardInterrupt wait until the block is through."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda signum, _: pressed.append(signum))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


def oom_kills(proc: Path = Path("/proc")) -> int:
    """How many processes the kernel has killed for lack of memory since it started."""
    try:
        lines = (proc / "vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def explain_kill(status: int, kills_before: int) -> str:
    """Evidence for why a process died from this signal; empty if there is none."""
    if status != -signal.SIGKILL:
        return ""
    kills = oom_kills() - kills_before
    if kills <= 0:
        return ""
    import psutil

    free = format_bytes(psutil.virtual_memory().available)
    return (
        f"The system ran out of memory and killed {kills} process(es) during this launch (oom_kill "
        f"count); {free} are free now."
    )
