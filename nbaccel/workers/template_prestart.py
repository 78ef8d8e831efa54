"""Starting the template process: standard library only, so that it can be done at load time.

    base       a fresh interpreter, or a fork of the notebook's process where that is clean
    candidate  a fork of the base that imports what the notebook has imported
    learned    what the candidate has become: the template, from then on

See `template_learning` for when.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from nbaccel.base import env
from nbaccel.workers import working_folder
from nbaccel.workers.installed_modules import FileStamp

_TEMPLATE_CODE = (
    "import sys; sys.path[:] = {path!r}; "
    "from nbaccel.workers.template_server import serve; "
    "serve({fd}, {parent}, device={device!r}, in_notebook={in_notebook}, "
    "extends_torch={extends_torch})"
)


# With it, `import torch` imports every package that extends it; torch_tpu takes seconds, also where
# there is no TPU. The template imports those that devices of this machine need, and all unknown.
_AUTOLOAD_VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"


class TemplateProcess(Protocol):
    """A template process, as `subprocess.Popen` has it."""

    pid: int

    def poll(self) -> int | None:
        """How it ended, negative for a signal; None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: It has not ended within so many seconds.
        """

    def kill(self) -> None:
        """Send it SIGKILL."""


@dataclass(kw_only=True, eq=False)
class TemplateBoot:
    """A template process that has been started."""

    process: TemplateProcess
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
    hearing: threading.RLock = field(default_factory=threading.RLock)
    """Held by whoever reads its messages."""
    stamps: Mapping[str, FileStamp | None] = field(default_factory=dict, repr=False)
    """Installed modules that it has because the notebook has them → the versions of their files."""
    surroundings: Any = field(default=None, repr=False)
    """`template_learning.Surroundings` where it has imported what only workers have."""
    is_of_this_process: bool = False
    """Whether it is a fork of this process, and no fresh interpreter."""
    base: TemplateBoot | None = None
    """The one that it was forked from, which must not end before it does."""
    is_replaced: bool = False
    """Whether it ends with its last user."""
    users: int = 0
    """Starters of workers, and templates that were forked from it."""

    def is_running(self) -> bool:
        """Whether it runs and belongs to this very process."""
        return (
            self.owner == os.getpid() and self.socket.fileno() >= 0 and self.process.poll() is None
        )

    def error_text(self) -> str:
        """What it has written to stderr."""
        # `end` has closed the descriptors.
        if self.socket.fileno() < 0:
            return ""
        return os.pread(self.errors, 1 << 20, 0).decode(errors="replace")

    def use(self) -> None:
        """Keep it until :meth:`leave`, also if it is replaced meanwhile."""
        self.users += 1

    def release(self) -> None:
        """Undo one :meth:`use`."""
        self.users -= 1
        if self.is_replaced and self.users <= 0:
            self.end()

    def replace(self) -> None:
        """Let it end as soon as nothing uses it."""
        self.is_replaced = True
        if self.users <= 0:
            self.end()

    def end(self) -> None:
        """Hang up, wait for it to leave, kill it if it does not."""
        if self.socket.fileno() < 0:
            return
        # Before hanging up: afterwards it ends because of this process, not by itself.
        self.status = self.process.poll()
        self.socket.close()
        os.close(self.errors)
        if not self.ready:
            # It imports, and would not notice for seconds; it has no workers yet.
            self.process.kill()
        try:
            self.process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.base is not None:
            self.base.release()
            self.base = None


# The template processes of this process, by the device whose library is imported in them; empty for
# all devices that need no template of their own.
_BOOTS: dict[str, TemplateBoot] = {}
# Those with what the notebook has imported: used instead, as long as they run.
_LEARNED: dict[str, TemplateBoot] = {}


def start(device: str = "") -> TemplateBoot:
    """Start a template process unless one runs already; returns at once.

    Args:
        device: The device whose library is imported in it; empty for none beside torch.
    """
    for running_boots in (_LEARNED, _BOOTS):
        template_boot = running_boots.get(device)
        if template_boot is not None and template_boot.is_running():
            return template_boot
    stop(device)
    return adopt(device, _start_fresh(device))


def start_base(device: str = "") -> TemplateBoot:
    """The base, started anew if it has ended: what was forked from it may still be in use.

    Args:
        device: As for :func:`start`.
    """
    base_boot = base(device)
    if base_boot is None:
        lost_boot = _BOOTS.pop(device, None)
        if lost_boot is not None and lost_boot.owner == os.getpid():
            lost_boot.replace()
        base_boot = _BOOTS[device] = _start_fresh(device)
        atexit.register(stop)
    return base_boot


def start_anew(device: str = "") -> None:
    """Start a fresh interpreter in place of the present template process.

    Args:
        device: As for :func:`start`.
    """
    adopt(device, _start_fresh(device))


def adopt(device: str, template_boot: TemplateBoot) -> TemplateBoot:
    """Let a template process be the base from now on.

    Args:
        device: As for :func:`start`.
        template_boot: The process.
    """
    _replace(device)
    if not _BOOTS:
        atexit.register(stop)
    _BOOTS[device] = template_boot
    return template_boot


def adopt_learned(device: str, template_boot: TemplateBoot) -> None:
    """Let a template process that was forked from the base be used instead of it.

    Args:
        device: As for :func:`start`.
        template_boot: The process.
    """
    former_boot = _LEARNED.pop(device, None)
    _LEARNED[device] = template_boot
    if former_boot is not None and former_boot.owner == os.getpid():
        former_boot.replace()


def _replace(device: str) -> None:
    for running_boots in (_LEARNED, _BOOTS):
        template_boot = running_boots.pop(device, None)
        if template_boot is not None and template_boot.owner == os.getpid():
            template_boot.replace()


def _start_fresh(device: str) -> TemplateBoot:
    own_socket, template_socket, error_file = open_ends()
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
    return TemplateBoot(
        process=template_process, socket=own_socket, errors=error_file, owner=os.getpid()
    )


def open_ends() -> tuple[socket.socket, socket.socket, int]:
    """What a template process needs: two ends of a channel, and a file for its stderr."""
    # A file, not a pipe: it is read only after the template has ended, and a full pipe would block.
    file = os.memfd_create("nbaccel-template-errors", os.MFD_CLOEXEC)
    return *socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET), file


def start_ahead(device: str = "") -> None:
    """Start a template process before it is needed, where that can be done.

    Where it cannot (a system without memory files, no room for a process), importing nbaccel must
    work all the same: a launch says what is missing, and one process needs none of it.

    Args:
        device: As for :func:`start`.
    """
    with contextlib.suppress(OSError, AttributeError):
        start(device)


def drop_learned(device: str) -> None:
    """Go back to the base: a module of the learned one has been changed.

    Args:
        device: As for :func:`start`.
    """
    learned_boot = _LEARNED.pop(device, None)
    if learned_boot is not None and learned_boot.owner == os.getpid():
        learned_boot.replace()


def drop_ended(template_boot: TemplateBoot) -> None:
    """Use a template no more: it has ended, or it does not answer.

    Args:
        template_boot: The process; those that were forked from it go with it.
    """
    for device, learned_boot in tuple(_LEARNED.items()):
        if learned_boot is template_boot:
            del _LEARNED[device]
        elif learned_boot.base is template_boot:
            del _LEARNED[device]
            learned_boot.end()
    for device, base_boot in tuple(_BOOTS.items()):
        if base_boot is template_boot:
            del _BOOTS[device]


def stop(device: str | None = None) -> None:
    """End template processes, if this process has some. Safe to call at any time.

    Args:
        device: As for :func:`start`; None ends all.
    """
    for running_boots in (_LEARNED, _BOOTS):
        for name in list(running_boots) if device is None else [device]:
            template_boot = running_boots.pop(name, None)
            # A fork inherits the table, and must not end its parent's templates.
            if template_boot is not None and template_boot.owner == os.getpid():
                template_boot.end()
    if not _BOOTS:
        atexit.unregister(stop)


def running() -> list[TemplateBoot]:
    """The running template processes of this process, those that will be used first."""
    return [
        template_boot
        for running_boots in (_LEARNED, _BOOTS)
        for template_boot in running_boots.values()
        if template_boot.is_running()
    ]


def base(device: str) -> TemplateBoot | None:
    """The running base, if there is one.

    Args:
        device: As for :func:`start`.
    """
    template_boot = _BOOTS.get(device)
    return template_boot if template_boot is not None and template_boot.is_running() else None


def learned(device: str) -> TemplateBoot | None:
    """The running template with what the notebook has imported, if there is one.

    Args:
        device: As for :func:`start`.
    """
    template_boot = _LEARNED.get(device)
    return template_boot if template_boot is not None and template_boot.is_running() else None


def let_continue(template_boot: TemplateBoot) -> None:
    """Let a template process continue if it was stopped (SIGSTOP).

    Args:
        template_boot: The process.
    """
    with contextlib.suppress(ProcessLookupError):
        os.kill(template_boot.process.pid, signal.SIGCONT)


def current() -> TemplateBoot | None:
    """A running template process, if this process has one."""
    return next(iter(running()), None)


def current_pid() -> int | None:
    """Process id of a running template process, if any."""
    template_boot = current()
    return template_boot.process.pid if template_boot is not None else None
