"""Processes from outside: names, use, causes of death; held interrupts; ports where they meet."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from nbaccel.base import env
from nbaccel.base.errors import PortTaken
from nbaccel.base.units import format_bytes


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay an interrupt (SIGINT) until the end of this block and of all blocks around it."""
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
        signal.raise_signal(signal.SIGINT)


class _HeldInterrupt:
    def __init__(self) -> None:
        self.pressed = False

    def __call__(self, signal_number: int, frame: object) -> None:
        self.pressed = True


def take_held_interrupt(handler: object) -> bool:
    """Whether a handler of SIGINT is that of `uninterrupted` and holds one, which it gives up."""
    was_pressed = isinstance(handler, _HeldInterrupt) and handler.pressed
    if isinstance(handler, _HeldInterrupt):
        handler.pressed = False
    return was_pressed


def oom_kills(folder: Path = Path("/proc")) -> int:
    """How many processes the kernel has killed for lack of memory since it started."""
    counts = re.search(r"^oom_kill (\d+)", env.read_file(folder / "vmstat"), re.MULTILINE)
    return int(counts[1]) if counts else 0


def explain_kill(exit_status: int, kills_before: int) -> str:
    """Evidence for why a process died from this signal; empty if there is none."""
    if exit_status != -signal.SIGKILL:
        return ""
    num_kills = oom_kills() - kills_before
    if num_kills <= 0:
        return ""
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
    # One that was just started, a zombie, or of another user has no command line.
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
            return ProcessUse(process.memory_info().rss, times.user + times.system)
    return None


LOOPBACK_ADDRESSES = ("127.0.0.1", "::1")  # of version 4, and of version 6

_LISTEN_BACKLOG = 4096  # connections that may wait for the store: all workers of all nodes


def loopback(host_address: str) -> str:
    """The address to use for one: version 6's where this machine has no other."""
    if host_address != LOOPBACK_ADDRESSES[0]:
        return host_address
    for address, family in zip(LOOPBACK_ADDRESSES, (socket.AF_INET, socket.AF_INET6), strict=True):
        # Raised where this machine has no such address, or no such family.
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
            return address
    return host_address


def listen(
    host: str, port: int | None, *, setting: str = "use_port", waiters: str = "the workers"
) -> socket.socket:
    """A listening socket for the store: who connects before the store serves it waits."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        # Without it a port is unusable for minutes after a store on it has closed (TIME_WAIT).
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port or 0))
        listener.listen(_LISTEN_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno != errno.EADDRINUSE:
            raise
        raise PortTaken(
            f"{setting}={port} is taken by {_describe_holder(port or 0)}, so {waiters} could not "
            f"find each other there. Leave {setting} out: a free port is found and reserved.",
            port=port,
        ) from error
    return listener


def _describe_holder(port: int) -> str:
    process_id = None
    with contextlib.suppress(psutil.AccessDenied):
        for one in psutil.net_connections("tcp"):
            if one.laddr and one.laddr.port == port and one.status == psutil.CONN_LISTEN:
                process_id = process_id or one.pid
    if process_id is None:
        return "another process"
    if process_id == os.getpid():
        return f"this very process ({process_id})"
    return describe_process(process_id)


def store_options(listener: int) -> dict[str, Any]:
    """What makes torch's `TCPStore` serve on a socket that is bound already."""
    torch_release = tuple(int(part) for part in re.findall(r"\d+", version("torch"))[:2])
    # Before 2.9 its libuv server may refuse one, as that of 2.6 does; the older server takes it.
    options = {"use_libuv": False} if torch_release < (2, 9) else {}
    return {"master_listen_fd": listener, **options}
