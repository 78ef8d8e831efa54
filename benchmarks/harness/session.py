"""The inner half of a measurement: one kernel, driven from inside its namespaces.

    launch.py ── request, one JSON line ──> session.py ── ZeroMQ ──> ipykernel ── fork ──> workers
              <── answer, one JSON line ──             <─ outputs ─

The session runs where the kernel runs, so that it interrupts the kernel as Jupyter does, sees the
same pids, and reads the memory of all. When its outer half closes the pipe, it ends.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq
from jupyter_client.manager import KernelManager

from harness.output import CellOutput
from harness.processes import cpu_ns, is_alive, measure_memory, settle, tagged

Tick = Callable[[CellOutput], None]


def _nothing(_: CellOutput) -> None:
    """No action while the cell runs."""


class Session:
    def __init__(self, tag: str) -> None:
        self.tag = tag
        self.manager = KernelManager()
        self.client: Any = None

    def start(self) -> dict[str, Any]:
        self.manager.start_kernel()
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)
        return {"pid": os.getpid()}

    def close(self) -> None:
        """The namespace's end kills whatever this leaves."""
        if self.client is not None:
            self.client.stop_channels()
        if self.manager.has_kernel:
            self.manager.shutdown_kernel(now=True)

    def run(self, code: str, timeout_s: float, tick: Tick = _nothing) -> dict[str, Any]:
        """Run a cell until its reply and the idle that follows it have come."""
        output = CellOutput()
        reply_at = idle_at = 0.0
        started = time.monotonic()
        request = self.client.execute(code, allow_stdin=False, stop_on_error=False)
        poller = zmq.Poller()
        for channel in (self.client.iopub_channel, self.client.shell_channel):
            poller.register(channel.socket, zmq.POLLIN)
        while not (reply_at and idle_at) and time.monotonic() - started < timeout_s:
            poller.poll(20)
            while self.client.iopub_channel.msg_ready():
                message = self.client.get_iopub_msg(timeout=5)
                if message["parent_header"].get("msg_id") != request:
                    continue
                output.feed(message)
                if message["content"].get("execution_state") == "idle":
                    idle_at = time.monotonic()
            while self.client.shell_channel.msg_ready():
                reply = self.client.get_shell_msg(timeout=5)
                if reply["parent_header"].get("msg_id") == request:
                    reply_at = time.monotonic()
            if not (reply_at and idle_at):
                tick(output)
        ended_at = max(reply_at, idle_at) if reply_at and idle_at else None
        return {
            "started_at": started,
            "ended_at": ended_at,
            "text": output.text,
            "error": output.error_text,
            "error_name": output.error_name,
            "values": output.values,
        }

    def run_all(self, codes: list[str], timeout_s: float) -> dict[str, Any]:
        """Run cells one after the other, up to one that hangs."""
        answers: list[dict[str, Any]] = []
        for code in codes:
            answers.append(self.run(code, timeout_s))
            if answers[-1]["ended_at"] is None:
                break
        return {"answers": answers}

    def distribute(self, num_processes: int) -> dict[str, Any]:
        """Restart the kernel as jupyter-distributed's, as its field "Processes" does.

        Its server extension does the same with the server's kernel manager.
        """
        from jupyter_distributed.coordinator import KernelLaunchAdapter

        started = time.monotonic()
        adapter = KernelLaunchAdapter()
        registry = Path(self.manager.connection_file).parent / "jupyter-distributed.json"
        adapter.configure_proxy(
            self.manager, adapter.capture(self.manager), num_processes, registry
        )
        self.manager.restart_kernel()
        self._wait_for_new_kernel(60.0)
        return {"started_at": started}

    def _wait_for_new_kernel(self, timeout_s: float) -> None:
        """Until both channels that a cell needs have reached it; asked often, to lose no time."""
        deadline = time.monotonic() + timeout_s
        has_replied = has_published = False
        while not (has_replied and has_published):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the new kernel was not ready within {timeout_s:.0f} s")
            self.client.kernel_info()
            self.client.shell_channel.socket.poll(100)
            while self.client.shell_channel.msg_ready():
                self.client.get_shell_msg(timeout=5)
                has_replied = True
            while self.client.iopub_channel.msg_ready():
                self.client.get_iopub_msg(timeout=5)
                has_published = True

    def idle_cpu(self, seconds: float) -> dict[str, Any]:
        """Processor time that the kernel and all others of the session take while nobody asks."""
        pid = self.manager.provisioner.pid
        before, started = cpu_ns(self.tag), time.monotonic()
        time.sleep(seconds)
        after, took = cpu_ns(self.tag), time.monotonic() - started
        used = {name: after[name] - before.get(name, 0) for name in after}
        kernel = used.pop(pid, 0)
        return {
            "kernel_s_per_min": kernel / 1e9 * 60 / took,
            "others_s_per_min": sum(used.values()) / 1e9 * 60 / took,
            "num_others": len(used),
        }

    def run_and_interrupt(
        self, code: str, timeout_s: float, expect: list[str], grace_s: float
    ) -> dict[str, Any]:
        """Press Stop `grace_s` after all the `expect`ed texts are on the screen."""
        seen_at = sent_at = 0.0

        def tick(output: CellOutput) -> None:
            nonlocal seen_at, sent_at
            if not seen_at and all(text in output.raw for text in expect):
                seen_at = time.monotonic()
            if seen_at and not sent_at and time.monotonic() - seen_at > grace_s:
                sent_at = time.monotonic()
                self.manager.interrupt_kernel()

        answer = self.run(code, timeout_s, tick)
        return {**answer, "sent_at": sent_at or None}

    def run_and_weigh(
        self, code: str, timeout_s: float, folder: str, num_processes: int
    ) -> dict[str, Any]:
        """Sample memory three times while all workers wait on a file, then let them go."""
        samples: list[list[dict[str, object]]] = []
        ready = [Path(folder, f"ready-{rank}") for rank in range(num_processes)]

        def tick(_: CellOutput) -> None:
            if samples or not all(path.exists() for path in ready):
                return
            for _attempt in range(3):
                time.sleep(0.3)
                samples.append(measure_memory(self.tag))
            Path(folder, "go").touch()

        answer = self.run(code, timeout_s, tick)
        return {**answer, "samples": samples}

    def survivors(self, pids: list[int], timeout_s: float) -> dict[str, Any]:
        """Which of the workers are still there, after up to `timeout_s` of patience."""
        deadline = time.monotonic() + timeout_s
        at_once = [pid for pid in pids if is_alive(pid)]
        left = at_once
        while left and time.monotonic() < deadline:
            time.sleep(0.05)
            left = [pid for pid in pids if is_alive(pid)]
        others = [" ".join(p.cmdline())[:120] for p in tagged(self.tag, without=os.getpid())]
        return {"at_once": at_once, "left": left, "processes": others}

    def handle(self, operation: str, options: dict[str, Any]) -> dict[str, Any]:
        if operation == "settle":
            return {"seconds": settle(self.tag, **options)}
        if operation == "memory":
            return {"samples": [measure_memory(self.tag)]}
        allowed = {"start", "run", "run_all", "run_and_interrupt", "run_and_weigh", "survivors"}
        allowed |= {"distribute", "idle_cpu"}
        if operation not in allowed:
            raise ValueError(f"unknown operation {operation!r}")
        answer: dict[str, Any] = getattr(self, operation)(**options)
        return answer


def main(tag: str) -> None:
    session = Session(tag)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what others print must not get among the answers
    try:
        for line in sys.stdin:
            request = json.loads(line)
            try:
                answer = session.handle(request["operation"], request["options"])
            except Exception as error:  # the outer half decides what an error means
                answer = {"failure": f"{type(error).__name__}: {error}"}
            answers.write(json.dumps(answer) + "\n")
    finally:
        session.close()
