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
    """Let a KeyboardInterrupt wait until the block is through, and all blocks around it."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or isinstance(signal.getsignal(signal.SIGINT), _Held):
        yield
        return
    held = _Held()
    before = signal.signal(signal.SIGINT, held)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if held.pressed:
        raise KeyboardInterrupt


class _Held:
    """A handler that remembers an interrupt."""

    def __init__(self) -> None:
        self.pressed = False

    def __call__(self, signum: int, frame: object) -> None:
        self.pressed = True


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
