"""What the Ray engine runs on a node: an actor that starts the node's agent.

It imports no torch. Ray runs its workers at nice 15, where on a busy node the import takes minutes,
and the agent that this starts imports it anyway.

Seen in Ray 2.60: its workers block SIGINT, which children inherit; they set OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
from typing import Any

from nbaccel.base import env
from nbaccel.hosts.agent_command import agent_command
from nbaccel.plan.contracts.host_engine import HANDED_FILES_VARIABLE
from nbaccel.transfer import memfd

__all__ = ["HostActor"]

_KEPT_LINES = 20  # of what an agent has written to stderr
# Ray sets them in its workers, for its own sake.
_RAYS_OWN_VARIABLES = ("PYTHONBREAKPOINT", "OMP_NUM_THREADS")


class HostActor:
    """On a node: starts the agent, hands it memory files, and ends it."""

    def __init__(self) -> None:
        self._files, agent_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._agent_end = agent_end.detach()

    def run_agent(self, hello_line: str) -> str:
        """Start the agent and wait for its end."""
        with tempfile.TemporaryFile() as output:
            process = self._start(hello_line, output)
            status = process.wait()
            output.seek(0)
            last_lines = output.read().decode(errors="replace").splitlines()[-_KEPT_LINES:]
        return f"its agent ended with status {status}" + (
            f": {' / '.join(last_lines)}" if last_lines else ""
        )

    def _start(self, line: str, output: Any) -> subprocess.Popen[bytes]:
        # Ray's workers block it, and whatever they start inherits that.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        environment = {
            name: value for name, value in env.snapshot().items() if name not in _RAYS_OWN_VARIABLES
        }
        process = subprocess.Popen(
            agent_command(),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env={**environment, HANDED_FILES_VARIABLE: str(self._agent_end)},
            pass_fds=[self._agent_end],
        )
        os.close(self._agent_end)
        stdin: Any = process.stdin
        stdin.write(line.encode())
        # Not closed: the agent ends when this process does, which closes it.
        stdin.flush()
        return process

    def take(self, ticket: str, references: list[Any]) -> None:
        """Give the agent a memory file with an object's bytes."""
        import ray

        content = memoryview(ray.get(references[0]))
        file_descriptor = memfd.create_file("arena", content.nbytes)
        with memfd.closing_files(file_descriptor):
            memfd.write_at(file_descriptor, content, 0)
            socket.send_fds(self._files, [ticket.encode()], [file_descriptor])
