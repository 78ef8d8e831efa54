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

from nbaccel.workers import working_folder

_TEMPLATE_CODE = (
    "import sys; sys.path[:] = {path!r}; "
    "from nbaccel.workers.template_server import serve; "
    "serve({fd}, {parent}, in_notebook={in_notebook})"
)


@dataclass(kw_only=True)
class TemplateBoot:
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
    """Its workers → how they ended, or None; a launch and a pool read each other's reports."""
    status: int | None = None
    """As `subprocess` gives it, if it has ended by itself: negative for a signal."""
    hearing: threading.Lock = field(default_factory=threading.Lock)
    """Held by whoever reads its messages."""

    def is_running(self) -> bool:
        """Whether it runs and belongs to this very process."""
        return self.owner == os.getpid() and self.process.poll() is None

    def error_text(self) -> str:
        """What it has written to stderr."""
        # `end` has closed the descriptors.
        if self.socket.fileno() < 0:
            return ""
        return os.pread(self.errors, 1 << 20, 0).decode(errors="replace")

    def end(self) -> None:
        """Hang up, wait for it to leave, kill it if it does not."""
        if self.socket.fileno() < 0:
            return
        # Before hanging up: afterwards it ends because of this process, not by itself.
        self.status = self.process.poll()
        self.socket.close()
        os.close(self.errors)
        try:
            self.process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class _TemplateSlot:
    """The one template process of this process, if there is one."""

    boot: TemplateBoot | None = None


def start() -> TemplateBoot:
    """Start the template process unless it runs already; returns at once."""
    template_boot = _TemplateSlot.boot
    if template_boot is not None and template_boot.is_running():
        return template_boot
    stop()
    # A file, not a pipe: it is read only after the template has ended, and a full pipe would block.
    error_file = os.memfd_create("nbaccel-template-errors", os.MFD_CLOEXEC)
    own_socket, template_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    template_code = _TEMPLATE_CODE.format(
        path=working_folder.installed_first(),
        fd=template_socket.fileno(),
        parent=os.getpid(),
        in_notebook="IPython" in sys.modules,
    )
    with template_socket:
        template_process = subprocess.Popen(
            [sys.executable, "-c", template_code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=error_file,
            pass_fds=[template_socket.fileno()],
            # Ctrl-C in a terminal must reach the notebook process only.
            start_new_session=True,
        )
    _TemplateSlot.boot = TemplateBoot(
        process=template_process, socket=own_socket, errors=error_file, owner=os.getpid()
    )
    atexit.register(stop)
    return _TemplateSlot.boot


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
    template_boot, _TemplateSlot.boot = _TemplateSlot.boot, None
    # A fork inherits the slot, and must not end its parent's template.
    if template_boot is not None and template_boot.owner == os.getpid():
        template_boot.end()


def current() -> TemplateBoot | None:
    """The running template process, if this process has one."""
    template_boot = _TemplateSlot.boot
    return template_boot if template_boot is not None and template_boot.is_running() else None


def current_pid() -> int | None:
    """Process id of the running template process, if any."""
    template_boot = current()
    return template_boot.process.pid if template_boot is not None else None
