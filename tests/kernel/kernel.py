"""A real ipykernel, spoken to through jupyter_client; every wait has an end.

    test ── Unix sockets ──► kernel ──► template, workers

Sockets lie in a temporary folder: no port is opened that others on the machine could reach.
"""

from __future__ import annotations

import os
import queue
import re
import signal
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psutil
from jupyter_client.manager import KernelManager
from typing_extensions import Self

from tests.isolation import ROOT
from tests.leak_police import TEMPLATE_NAME

WAIT_S = 400.0  # for one cell, on a machine that does other things
POLL_S = 0.05
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class Cell:
    """What came of running a cell."""

    text: str = ""
    stdout: str = ""
    stderr: str = ""
    displays: list[dict[str, Any]] = field(default_factory=list)
    updates: list[dict[str, Any]] = field(default_factory=list)
    """What has become of outputs of earlier cells."""
    handles: set[str] = field(default_factory=set)  # by what its own displays can be updated
    outputs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Displays by these handles, as they are now."""
    widgets: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Comm → the state of its widget, of all that are open."""
    closed: list[str] = field(default_factory=list)  # comms that the kernel has closed
    error: str = ""  # name of the exception's class
    traceback: list[str] = field(default_factory=list)  # its lines, without colours
    done: bool = False

    def check(self) -> Cell:
        """Fail the test if the cell raised."""
        assert not self.error, "\n".join(self.traceback)
        return self


class Kernel:
    """A kernel of this interpreter in which nbaccel can be imported."""

    def __init__(
        self, wrap: Callable[[list[str]], list[str]] | None = None, **variables: str
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="nb-")
        self.manager = KernelManager(
            kernel_name="python3", transport="ipc", ip=f"{self._folder.name}/k"
        )
        if wrap is not None:
            # The client would put its own interpreter in place of a first word "python" only.
            self.manager.kernel_spec.argv = wrap(
                [sys.executable, *self.manager.kernel_spec.argv[1:]]
            )
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        # Frames of a debugger in the kernel would be frozen modules' business, not ours.
        environment = {**os.environ, "PYTHONPATH": path, "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
        environment |= variables
        self.manager.start_kernel(env=environment)
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=WAIT_S)

    @property
    def pid(self) -> int:
        return int(self.manager.provisioner.pid)

    def run(self, code: str, *, timeout_s: float = WAIT_S) -> Cell:
        """Run a cell to its end."""
        return self.finish(self.begin(code), timeout_s=timeout_s)

    def begin(self, code: str, *, page: str = "") -> tuple[str, Cell]:
        """Start a cell, on another page than the others where that has a name."""
        code = textwrap.dedent(code)
        if not page:
            return self.client.execute(code), Cell()
        return self.send("execute_request", {"code": code, "silent": False}, page=page)

    def send(self, kind: str, content: dict[str, Any], *, page: str) -> tuple[str, Cell]:
        """Send what another page sends."""
        message = self.client.session.msg(kind, content)
        message["header"]["session"] = page
        self.client.shell_channel.send(message)
        return str(message["header"]["msg_id"]), Cell()

    def until(
        self,
        running: tuple[str, Cell],
        what: str | Callable[[Cell], object],
        *,
        timeout_s: float = WAIT_S,
    ) -> None:
        """Wait until the cell has printed this, or until something is so."""
        deadline = time.monotonic() + timeout_s
        cell = running[1]
        while not (what in cell.text if isinstance(what, str) else what(cell)):
            assert callable(what) or not cell.done, f"the cell ended without {what!r}: {cell}"
            self._take(running, deadline)

    def look(self, running: tuple[str, Cell], *, timeout_s: float = WAIT_S) -> None:
        """Take in the next thing that comes of the cell."""
        self._take(running, time.monotonic() + timeout_s)

    def finish(self, running: tuple[str, Cell], *, timeout_s: float = WAIT_S) -> Cell:
        """Wait until the cell has ended, and the kernel is idle."""
        self.wait_idle(running, timeout_s=timeout_s)
        self.take_reply(running[0], timeout_s=timeout_s)
        if running[1].error:
            # A kernel aborts cells that were sent before it has told of an error, and ipykernel 6
            # does so a moment longer: one sent at once would end with nothing run. What it answers
            # after that moment is asked here.
            self.take_reply(self.client.kernel_info(), timeout_s=timeout_s)
        return running[1]

    def wait_idle(self, running: tuple[str, Cell], *, timeout_s: float = WAIT_S) -> None:
        """Wait until the cell has ended, as a front end is told of it."""
        deadline = time.monotonic() + timeout_s
        while not running[1].done:
            self._take(running, deadline)

    def take_reply(self, ident: str, *, timeout_s: float) -> None:
        """Take the reply to a request, which comes by another socket than what cells show."""
        deadline = time.monotonic() + timeout_s
        reply = None
        while reply != ident:
            left = max(0.0, deadline - time.monotonic())
            reply = self.client.get_shell_msg(timeout=left)["parent_header"].get("msg_id")

    def interrupt(self) -> None:
        """Press Stop."""
        self.manager.interrupt_kernel()

    def descendants(self) -> list[psutil.Process]:
        """The kernel's living children, and theirs."""
        try:
            found = psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        return [p for p in found if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    def templates(self) -> list[psutil.Process]:
        """Those among them that workers are forked from; each cell may bring a new one."""
        return [p for p in self.descendants() if _is_template(p)]

    def workers(self) -> list[psutil.Process]:
        """The others."""
        return [p for p in self.descendants() if _name_of(p) and not _is_template(p)]

    def kill(self) -> None:
        """End the kernel as the out-of-memory killer would."""
        os.kill(self.pid, signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End kernel and client, and everything they started."""
        left = self.descendants()
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()
        # The client's own, too: left to the garbage collector, it is a warning in some later test.
        for context in (self.client.context, self.manager.context):
            context.destroy(linger=0)
        psutil.wait_procs(left, timeout=100)
        self._folder.cleanup()

    def _take(self, running: tuple[str, Cell], deadline: float) -> None:
        ident, cell = running
        left = deadline - time.monotonic()
        assert left > 0, f"the cell did not come to an end: {cell}"
        try:
            message = self.client.get_iopub_msg(timeout=min(left, 1.0))
        except queue.Empty:
            return
        is_comm = message["msg_type"].startswith("comm_")
        if is_comm or message["parent_header"].get("msg_id") == ident:
            _note(cell, message["msg_type"], message["content"])


def _is_template(process: psutil.Process) -> bool:
    """Also one that has just been started and has not taken its name yet, as workers do at once."""
    name = _name_of(process)
    if not name.startswith("python"):
        return name == TEMPLATE_NAME
    try:
        return any("template_server" in word for word in process.cmdline())
    except psutil.NoSuchProcess:
        return False


def _name_of(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.NoSuchProcess:
        return ""


def _note(cell: Cell, kind: str, content: dict[str, Any]) -> None:
    if kind == "stream":
        cell.text += content["text"]
        setattr(cell, content["name"], getattr(cell, content["name"]) + content["text"])
    elif kind in ("display_data", "execute_result"):
        cell.displays.append(content["data"])
        handle = content.get("transient", {}).get("display_id", "")
        cell.handles.add(handle)
        if kind == "display_data":
            cell.outputs[handle] = content["data"]
    elif kind == "update_display_data":
        handle = content["transient"]["display_id"]
        cell.outputs[handle] = content["data"]
        (cell.displays if handle in cell.handles else cell.updates).append(content["data"])
    elif kind == "comm_open":
        cell.widgets[content["comm_id"]] = content["data"].get("state", {})
    elif kind == "comm_msg" and content["data"].get("method") == "update":
        cell.widgets.setdefault(content["comm_id"], {}).update(content["data"]["state"])
    elif kind == "comm_close":
        cell.widgets.pop(content["comm_id"], None)
        cell.closed.append(content["comm_id"])
    elif kind == "error":
        cell.error = content["ename"]
        cell.traceback = _COLOURS.sub("", "\n".join(content["traceback"])).splitlines()
    elif kind == "status":
        cell.done = content["execution_state"] == "idle"


def wait_for(condition: Any, *, timeout_s: float = 200.0) -> bool:
    """Whether the condition came true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True
