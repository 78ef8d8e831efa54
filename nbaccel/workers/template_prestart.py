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

from nbaccel import env
from nbaccel.workers import working_folder

_TEMPLATE_CODE = (
    "import sys; sys.path[:] = {path!r}; "
    "from nbaccel.workers.template_server import serve; "
    "serve({fd}, {parent}, device={device!r}, in_notebook={in_notebook}, "
    "extends_torch={extends_torch})"
)


# With it, `import torch` imports every package that extends it; torch_tpu takes seconds, also where
# there is no TPU. The template imports those that devices of this machine need, and all unknown.
_AUTOLOAD_VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"


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


# The template processes of this process, by the device whose library is imported in them; empty for
# all devices that need no template of their own.
_BOOTS: dict[str, TemplateBoot] = {}


def start(device: str = "") -> TemplateBoot:
    """Start a template process unless it runs already; returns at once.

    Args:
        device: The device whose library is imported in it; empty for none beside torch.
    """
    template_boot = _BOOTS.get(device)
    if template_boot is not None and template_boot.is_running():
        return template_boot
    stop(device)
    # A file, not a pipe: it is read only after the template has ended, and a full pipe would block.
    error_file = os.memfd_create("nbaccel-template-errors", os.MFD_CLOEXEC)
    own_socket, template_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    template_code = _TEMPLATE_CODE.format(
        path=working_folder.installed_first(),
        fd=template_socket.fileno(),
        parent=os.getpid(),
        device=device,
        in_notebook="IPython" in sys.modules,
        extends_torch=env.read(_AUTOLOAD_VARIABLE) != "0",
    )
    with template_socket:
        template_process = subprocess.Popen(
            [sys.executable, "-c", template_code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=error_file,
            env=env.snapshot() | {_AUTOLOAD_VARIABLE: "0"},
            # Where the own one has been deleted, MKL ends a process that imports torch.
            cwd=working_folder.current_folder(),
            pass_fds=[template_socket.fileno()],
            # Ctrl-C in a terminal must reach the notebook process only.
            start_new_session=True,
        )
    _BOOTS[device] = TemplateBoot(
        process=template_process, socket=own_socket, errors=error_file, owner=os.getpid()
    )
    atexit.register(stop)
    return _BOOTS[device]


def start_ahead(device: str = "") -> None:
    """Start a template process before it is needed, where that can be done.

    Where it cannot (a system without memory files, no room for a process), importing nbaccel must
    work all the same: a launch says what is missing, and one process needs none of it.

    Args:
        device: As for :func:`start`.
    """
    with contextlib.suppress(OSError, AttributeError):
        start(device)


def stop(device: str | None = None) -> None:
    """End template processes, if this process has some. Safe to call at any time.

    Args:
        device: As for :func:`start`; None ends all.
    """
    for name in list(_BOOTS) if device is None else [device]:
        template_boot = _BOOTS.pop(name, None)
        # A fork inherits the table, and must not end its parent's templates.
        if template_boot is not None and template_boot.owner == os.getpid():
            template_boot.end()
    if not _BOOTS:
        atexit.unregister(stop)


def running() -> list[TemplateBoot]:
    """The running template processes of this process."""
    return [template_boot for template_boot in _BOOTS.values() if template_boot.is_running()]


def current() -> TemplateBoot | None:
    """A running template process, if this process has one."""
    return next(iter(running()), None)


def current_pid() -> int | None:
    """Process id of a running template process, if any."""
    template_boot = current()
    return template_boot.process.pid if template_boot is not None else None
