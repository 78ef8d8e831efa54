"""The command that starts an agent, for engines; and agents that are processes of this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from nbaccel.plan.contracts.host_engine import AgentCrew, AgentHello

__all__ = ["ProcessCrew", "agent_command"]

_AGENT_CODE = (
    "import sys, os; folder = {folder!r}; "
    "os.path.isdir(os.path.join(folder, 'nbaccel')) and sys.path.insert(0, folder); "
    "from nbaccel.hosts.agent import main; main()"
)
_ERROR_CHARS = 600


def agent_command(python: str = "") -> list[str]:
    """The command line of an agent: nothing of it is secret."""
    # A checkout, or a folder given by PYTHONPATH, where hosts share a file system. Not the folder
    # of installed packages: in front of the standard library these would hide parts of it.
    package_folder = str(Path(__file__).parents[2])
    shared_folder = "" if package_folder.endswith("-packages") else package_folder
    return [python or sys.executable, "-c", _AGENT_CODE.format(folder=shared_folder)]


class _AgentProcess:
    """A process on this machine that is an agent, or leads to some (ssh, srun)."""

    def __init__(self, command: Sequence[str], line: str, environment: Mapping[str, str]) -> None:
        self.command = command
        # A file: nobody reads a pipe while all is well, and a full one would stop the agent.
        self._errors: IO[bytes] = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=self._errors,
            stderr=self._errors,
            env=dict(environment),
            # Ctrl-C in a terminal must reach the notebook only.
            start_new_session=True,
        )
        if self.process.stdin is not None:
            # It may have ended already; its status says why.
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.write(line.encode())
                self.process.stdin.close()

    def problem(self) -> str:
        """How it has ended and what it said; empty while it runs."""
        exit_status = self.process.poll()
        if exit_status is None:
            return ""
        self._errors.seek(0)
        text = self._errors.read().decode(errors="replace").strip()[-_ERROR_CHARS:]
        how = f"exit code {exit_status}"
        if exit_status < 0:
            how = f"signal {signal.Signals(-exit_status).name}"
        return f"{self.command[0]} has ended ({how})" + (f": {text}" if text else "")

    def close(self) -> None:
        """Close its error file."""
        self._errors.close()


class ProcessCrew(AgentCrew):
    """Agents that end with processes of this machine."""

    def __init__(
        self,
        commands: Mapping[tuple[str, ...], tuple[Sequence[str], AgentHello]],
        environment: Mapping[str, str],
    ) -> None:
        self._processes: dict[tuple[str, ...], _AgentProcess] = {}
        self._unstarted: dict[str, str] = {}
        for names, (command, hello) in commands.items():
            try:
                self._processes[names] = _AgentProcess(command, hello.to_line(), environment)
            except OSError as error:
                problem = f"{command[0]} cannot be started: {error.strerror or error}"
                self._unstarted |= dict.fromkeys(names, problem)

    def problems(self) -> Mapping[str, str]:
        """See :meth:`AgentCrew.problems`."""
        return self._unstarted | {
            host_name: problem
            for host_names, process in self._processes.items()
            if (problem := process.problem())
            for host_name in host_names
        }

    def end(self, grace_s: float) -> None:
        """See :meth:`AgentCrew.end`."""
        deadline = time.monotonic() + grace_s
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.process.wait(max(0.0, deadline - time.monotonic()))
        for process in self._processes.values():
            if process.process.poll() is None:
                # Its group: a command such as srun has children.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.process.pid, signal.SIGKILL)
                process.process.wait()
            process.close()
        self._processes.clear()
