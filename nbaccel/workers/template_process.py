"""One template process, as the notebook's process starts it, watches it and ends it.

Standard library only, so that it can be started when nbaccel is loaded.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nbaccel.base import env, frames
from nbaccel.base.errors import StartupFailed
from nbaccel.workers import time_limits, working_folder
from nbaccel.workers.installed_modules import FileStamp, by_package, installed_modules, stamps_of

__all__ = ["TemplateProcess"]


_SWITCH = "NBACCEL_TEMPLATE_IMPORTS"
"""Environment variable: with 0, templates import torch only."""
# With it, `import torch` imports every package that extends it; torch_tpu takes seconds, also where
# there is no TPU. The template imports those that devices of this machine need, and all unknown.
_AUTOLOAD_VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_PROGRAM = (
    "import sys; sys.path[:] = {path!r}; "
    "from nbaccel.workers.template_server import serve; serve({fd})"
)
_FEW_MODULES = 20
"""So many new modules of packages that it has are not worth a new template: cells import some
without saying so."""
_STARVED_AFTER_S = 3.0
_MESSAGE_CHARS = 2000


@dataclass(kw_only=True, eq=False)
class TemplateProcess:
    """A template process that has been started."""

    process: subprocess.Popen[bytes]
    socket: socket.socket
    errors: int
    """Memory file that collects its stderr: the reason, if it cannot start."""
    stamps: Mapping[str, FileStamp | None] = field(repr=False)
    """Modules that it was told to import → the versions of their files."""
    in_background: bool
    """Whether it imports at the lowest priority."""
    owner: int = field(default_factory=os.getpid)
    """The process that started it: a fork of that process must not use or end it."""
    looked_at: tuple[float, float] | None = None
    """When it was last asked whether it is starved, and the processor time that it had used."""
    importing: str = ""
    """The package that it imports now."""
    ready: bool = False
    has_failed: bool = False
    """Whether it ended before it was ready, and no package is known to be at fault."""
    ended: dict[int, Any] = field(default_factory=dict)
    """Its workers → how they ended, or None; a launch and a pool read each other's reports."""
    status: int | None = None
    """As `subprocess` gives it, if it has ended by itself: negative for a signal."""
    said: str = ""
    """What it has written to stderr, once it has ended."""
    hearing: threading.RLock = field(default_factory=threading.RLock)
    """Held by whoever reads what it says once it is ready."""
    is_replaced: bool = False
    """Whether it ends with its last user."""
    users: int = 0
    """Starters of workers."""

    @classmethod
    def start(
        cls, device: str, left_out: Mapping[str, str], *, in_background: bool
    ) -> TemplateProcess:
        """Start one; returns at once."""
        files = installed_modules() if _follows_notebook() else {}
        own_socket, template_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # A file, not a pipe: it is read only after the end, and a full pipe would block.
        errors = os.memfd_create("nbaccel-template-errors", os.MFD_CLOEXEC)
        with template_socket, open(os.memfd_create("nbaccel-template-request"), "w+") as request:
            json.dump(
                {
                    "parent_id": os.getpid(),
                    "device": device,
                    "in_notebook": "IPython" in sys.modules,
                    "extends_torch": env.read(_AUTOLOAD_VARIABLE) != "0",
                    "packages": by_package(files),
                    "left_out": dict(left_out),
                    "import_limit_s": time_limits.IMPORT_S,
                    "in_background": in_background,
                },
                request,
            )
            request.seek(0)
            program = _PROGRAM.format(
                path=working_folder.installed_first(), fd=template_socket.fileno()
            )
            process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=request,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=env.snapshot() | {_AUTOLOAD_VARIABLE: "0"},
                # Where the own one has been deleted, MKL ends a process that imports torch.
                cwd=working_folder.current_folder(),
                pass_fds=[template_socket.fileno()],
                # Ctrl-C in a terminal must reach the notebook process only.
                start_new_session=True,
            )
        return cls(
            process=process,
            socket=own_socket,
            errors=errors,
            stamps=stamps_of(files),
            in_background=in_background,
        )

    def is_running(self) -> bool:
        """Whether it runs and belongs to this very process."""
        return (
            self.owner == os.getpid() and self.socket.fileno() >= 0 and self.process.poll() is None
        )

    def lacked_packages(self, left_out: Mapping[str, str]) -> tuple[str, ...]:
        """Packages of which the notebook has imported more; empty where that is not worth much."""
        if not _follows_notebook():
            return ()
        names = [
            name
            for name in installed_modules().keys() - self.stamps.keys()
            # nbaccel's own alone are not worth it.
            if (package := name.partition(".")[0]) not in left_out and package != "nbaccel"
        ]
        lacked = {name.partition(".")[0] for name in names}
        has_new = not lacked <= {name.partition(".")[0] for name in self.stamps}
        return tuple(sorted(lacked)) if has_new or len(names) > _FEW_MODULES else ()

    def changed_packages(self) -> set[str]:
        """Packages of which a file is another one now than when it was told to import them."""
        files = installed_modules()
        stamps = stamps_of({name: files[name] for name in self.stamps if name in files})
        return {
            name.partition(".")[0] for name, stamp in stamps.items() if self.stamps[name] != stamp
        }

    def is_starved(self) -> bool:
        """Whether it has got little of the processor since this was last asked, some seconds ago.

        At the lowest priority that is so beside other programs that compute.
        """
        import psutil

        with contextlib.suppress(psutil.Error):
            times = psutil.Process(self.process.pid).cpu_times()
            now = (time.monotonic(), times.user + times.system)
            before = self.looked_at or now
            if self.looked_at is not None and now[0] - before[0] < _STARVED_AFTER_S:
                return False
            self.looked_at = now
            return self.in_background and now[1] - before[1] < (now[0] - before[0]) / 2
        return False

    def let_continue(self) -> None:
        """Let it continue if it was stopped (SIGSTOP)."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGCONT)

    def use(self) -> None:
        """Keep it until :meth:`release`, also if it is replaced meanwhile."""
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
        # A fork inherits the object, and must not end its parent's template.
        if self.socket.fileno() < 0 or self.owner != os.getpid():
            return
        # Before hanging up: afterwards it ends because of this process, not by itself.
        self.status = self.process.poll()
        self.said = os.pread(self.errors, 1 << 20, 0).decode(errors="replace").strip()
        # A worker that was forked from the notebook has a copy of this end.
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        os.close(self.errors)
        if not self.ready:
            # It has no workers yet, and need not do anything at its end.
            self.process.kill()
        try:
            self.process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def explain_end(self) -> StartupFailed:
        """The error that says why it has ended, or hung up; afterwards it has ended."""
        from nbaccel.workers import failure

        if self.socket.fileno() >= 0:
            # It has closed its end and is about to exit; its status says why.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=1.0)
        self.end()
        reason = "was ended on request (nbaccel.shutdown, or the end of this process)"
        if self.status is not None:
            reason = failure.name_exit(self.status).removesuffix(" before the function returned")
        return StartupFailed(
            f"The process that workers are forked from {reason}, and its workers ended with it.\n"
            + (f"It said: {self.said[-_MESSAGE_CHARS:]}\n" if self.said else "")
            + "Run the cell again: the next launch starts a new one."
        )


def _follows_notebook() -> bool:
    """Whether templates import what this process has imported."""
    return (
        sys.platform.startswith("linux")
        and frames.running_shell() is not None
        and env.flag(_SWITCH) is not False
    )
