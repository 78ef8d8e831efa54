"""Cells that print as fast as they can, in a real kernel, and a client that counts what arrives."""

from __future__ import annotations

import textwrap
import threading
import time
from dataclasses import dataclass
from typing import Any

import psutil
from jupyter_client.manager import KernelManager
from typing_extensions import Self

WAIT_S = 300.0
SETUP = """
import os, time
from nbaccel import notebook_launcher
%load_ext nbaccel
notebook_launcher(os.getpid, (), 2);
"""
LIVE = "%%accelerate --num_processes 2\nimport os, time"


@dataclass(frozen=True)
class Way:
    """Where the cell's code runs."""

    name: str
    first_line: str = ""
    is_launch: bool = False
    num_ranks: int = 2

    def cell(self, body: str) -> str:
        """A cell that runs this code, in which `rank` is the process's rank."""
        code = f"import os, time\nrank = int(os.environ.get('RANK', 0))\n{body}\n"
        if not self.is_launch:
            return self.first_line + code
        body = textwrap.indent(code, "    ")
        return f"def work():\n{body}\nnotebook_launcher(work, (), {self.num_ranks})"


PLAIN = Way("a cell of the kernel", num_ranks=1)
WAYS = (PLAIN, Way("a launch", is_launch=True), Way("a live cell", first_line="%%accelerate\n"))


@dataclass(frozen=True)
class Took:
    seconds: float
    """To the end of the cell; after Stop, if it was pressed."""
    chars: int
    lines: int
    error: str


class Kernel:
    """A kernel with a template and two live workers; a context manager, which ends it."""

    def __enter__(self) -> Self:
        self.manager = KernelManager()
        self.manager.start_kernel()
        self.client: Any = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=WAIT_S)
        for code in (SETUP, LIVE):
            took = self.run(code)
            if took.error:
                raise RuntimeError(took.error)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)

    def resident_mib(self) -> float:
        """What the kernel's own process holds."""
        return float(psutil.Process(self.manager.provisioner.pid).memory_info().rss / 2**20)

    def run(self, code: str, *, stop_after_s: float | None = None) -> Took:
        """Run a cell; press Stop so long after its first line, if asked to."""
        request = self.client.execute(code)
        since, timer = [time.monotonic()], None
        texts: list[str] = []
        error = ""
        while True:
            message = self.client.get_iopub_msg(timeout=WAIT_S)
            if message["parent_header"].get("msg_id") != request:
                continue
            content = message["content"]
            if message["msg_type"] == "stream":
                texts.append(content["text"])
                if stop_after_s is not None and timer is None:
                    timer = threading.Timer(stop_after_s, self._stop, [since])
                    timer.start()
            elif message["msg_type"] == "error":
                error = "\n".join(content["traceback"])
            elif content.get("execution_state") == "idle":
                break
        seconds = time.monotonic() - since[0]
        if timer is not None:
            timer.join()
        self.client.get_shell_msg(timeout=WAIT_S)
        text = "".join(texts)
        return Took(seconds, len(text) + len(error), text.count("\n"), error)

    def _stop(self, since: list[float]) -> None:
        since[0] = time.monotonic()
        self.manager.interrupt_kernel()
