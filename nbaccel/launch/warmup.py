"""Starting the template process: standard library only, so that it can be done at load time."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from typing import Any

from nbaccel.launch import folder

_BOOT = (
    "import sys; sys.path[:] = {path!r}; "
    "from nbaccel.launch.template_server import serve; "
    "serve({fd}, {parent}, in_notebook={in_notebook})"
)


@dataclass(kw_only=True)
class Boot:
    """A template process that has been started."""

    process: subprocess.Popen[bytes]
    socket: socket.socket
    errors: int
    """Memory file that collects its stderr: the reason, if it cannot start."""
    owner: int
    """The process that started it: a fork of that process must not use or end it."""
    ready: bool = False
    """Whether it has said that its imports are done."""
    ended: dict[int, Any] = field(default_factory=dict)
    """Its workers → how they ended, or None; a launch and a pool hear of each other's here."""
    status: int | None = None
    """As `subprocess` gives it, if it has ended by itself: negative for a signal."""
    hearing: threading.Lock = field(default_factory=threading.Lock)
    """Held by whoever reads its messages."""

    def is_running(self) -> bool:
        """Whether it runs and belongs to this very process."""
        return self.owner == os.getpid() and self.process.poll() is None

    def error_text(self) -> str:
        """What it has written to stderr."""
        if self.socket.fileno() < 0:
            return ""
        return os.pread(self.errors, 1 << 20, 0).decode(errors="replace")

    def end(self) -> None:
        """Hang up, wait for it to leave, kill it if it does not."""
        if self.socket.fileno() < 0:
            return
        self.status = self.process.poll()
        self.socket.close()
        os.close(self.errors)
        try:
            self.process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class _Slot:
    """The one template process of this process, if there is one: a resource like a heap."""

    boot: Boot | None = None


def start() -> Boot:
    """Start the template process unless it runs already; returns at once."""
    boot = _Slot.boot
    if boot is not None and boot.is_running():
        return boot
    stop()
    errors = os.memfd_create("nbaccel-template-errors", os.MFD_CLOEXEC)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    code = _BOOT.format(
        path=folder.installed_first(),
        fd=theirs.fileno(),
        parent=os.getpid(),
        in_notebook="IPython" in sys.modules,
    )
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C in a terminal is for the notebook process to judge
        )
    _Slot.boot = Boot(process=process, socket=ours, errors=errors, owner=os.getpid())
    atexit.register(stop)
    return _Slot.boot


def start_ahead() -> None:
    """Start the template process before it is needed, where that can be done.

    Where it cannot (a system without memory files, no room for a process), importing nbaccel must
    work all the same: a launch says what is missing, and one process needs none of it.
    """
    with contextlib.suppress(OSError, AttributeError):
        start()


def stop() -> None:
    """End the template process, if this process has one. Safe to call at any time."""
    atexit.unregister(stop)
    boot, _Slot.boot = _Slot.boot, None
    if boot is not None and boot.owner == os.getpid():
        boot.end()


def current() -> Boot | None:
    """The running template process, if this process has one."""
    boot = _Slot.boot
    return boot if boot is not None and boot.is_running() else None


def current_pid() -> int | None:
    """Process id of the running template process, if any."""
    boot = current()
    return boot.process.pid if boot is not None else None
