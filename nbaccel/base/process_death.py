"""What the system says about a worker's death."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

from nbaccel.base.units import format_bytes


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay a KeyboardInterrupt until the end of this block and of all blocks around it."""
    in_main = threading.current_thread() is threading.main_thread()
    # Python runs signal handlers in the main thread only, so other threads are not interrupted.
    if not in_main or isinstance(signal.getsignal(signal.SIGINT), _HeldInterrupt):
        yield
        return
    interrupt = _HeldInterrupt()
    handler_before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler_before)
    # After the handler is restored, and only if the block raised nothing: its error counts more.
    if interrupt.pressed:
        raise KeyboardInterrupt


class _HeldInterrupt:
    """A handler that remembers an interrupt."""

    def __init__(self) -> None:
        self.pressed = False

    def __call__(self, signal_number: int, frame: object) -> None:
        self.pressed = True


def oom_kills(folder: Path = Path("/proc")) -> int:
    """How many processes the kernel has killed for lack of memory since it started."""
    try:
        vmstat_lines = (folder / "vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next(
        (
            int(vmstat_line.split()[1])
            for vmstat_line in vmstat_lines
            if vmstat_line.startswith("oom_kill ")
        ),
        0,
    )


def explain_kill(exit_status: int, kills_before: int) -> str:
    """Evidence for why a process died from this signal; empty if there is none."""
    if exit_status != -signal.SIGKILL:
        return ""
    num_kills = oom_kills() - kills_before
    if num_kills <= 0:
        return ""
    import psutil

    free_bytes = format_bytes(psutil.virtual_memory().available)
    return (
        f"The system ran out of memory and killed {num_kills} process(es) during this launch "
        f"(oom_kill count); {free_bytes} are free now."
    )
