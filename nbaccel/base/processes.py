"""Processes from outside: their names, what they use and what they died of. And held interrupts."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

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


_LONGEST_COMMAND = 80  # characters: what fits beside the rest of a message


def describe_process(process_id: int) -> str:
    """Name a process so that a user finds it."""
    try:
        facts = psutil.Process(process_id).as_dict(["cmdline", "name"])
    except psutil.NoSuchProcess:
        return f"process {process_id}"
    # A process has no command line for a moment after it was started, and as a zombie; that of
    # another user may be hidden.
    command = " ".join(facts["cmdline"] or ())[:_LONGEST_COMMAND] or facts["name"]
    return f"process {process_id} ({command})" if command else f"process {process_id}"


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """What a process uses: bytes in its machine's memory, and seconds of processor time so far."""

    rss_bytes: int
    cpu_s: float


def process_use(pid: int) -> ProcessUse | None:
    """What a process of this machine uses now; None for one that has gone."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        with process.oneshot():
            times = process.cpu_times()
            return ProcessUse(
                rss_bytes=int(process.memory_info().rss), cpu_s=float(times.user + times.system)
            )
    return None
