"""A script on a host, with its output as it comes."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from tests.hosts.netns import NamespaceHost, remote_shell


class RunningScript:
    """A Python script that tells facts as JSON, in lines that begin with TOLD."""

    def __init__(
        self, host: NamespaceHost, folder: Path, script: Path, *arguments: str, **variables: str
    ) -> None:
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])} | variables
        self.process = host.python(script, *arguments, env=environment, cwd=folder)
        self.lines: list[str] = []
        self.errors: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, args=(stream, lines))
            for stream, lines in (
                (self.process.stdout, self.lines),
                (self.process.stderr, self.errors),
            )
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream: Any, lines: list[str]) -> None:
        with stream:
            lines.extend(line.rstrip("\n") for line in stream)

    @property
    def all_lines(self) -> str:
        return "\n".join(self.lines + self.errors)

    def wait_for(self, text: str, times: int = 1, seconds: float = 200.0) -> None:
        deadline = time.monotonic() + seconds
        while sum(text in line for line in self.lines + self.errors) < times:
            if time.monotonic() >= deadline or self.process.poll() is not None:
                self.end()
                raise AssertionError(f"no {times} x {text!r} in:\n{self.all_lines}")
            time.sleep(0.02)

    def told(self, seconds: float = 300.0) -> dict[str, Any]:
        """All that the script has told, once it has ended."""
        try:
            assert self.process.wait(seconds) == 0, self.all_lines
        finally:
            self.end()
        facts: dict[str, Any] = {}
        for line in self.lines:
            if line.startswith("TOLD "):
                facts |= json.loads(line[5:])
        return facts

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for reader in self._readers:
            reader.join()


class Notebook(RunningScript):
    """A notebook on the first host, which runs one cell with workers on both."""

    def __init__(
        self, hosts: list[NamespaceHost], folder: Path, *cell: str, script: str = "notebook.py"
    ) -> None:
        hostfile = folder / "hostfile"
        if not hostfile.exists():
            hostfile.write_text("alpha slots=2\nbeta slots=2   # the other one\n")
        super().__init__(
            hosts[0],
            folder,
            Path(__file__).with_name(script),
            cell[0],
            str(hostfile),
            *cell[1:],
            NBACCEL_SSH=str(remote_shell(folder, hosts)),
        )
