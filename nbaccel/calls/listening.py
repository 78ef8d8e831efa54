"""Events of workers: one `select` for output, messages, exits and interrupts.

pipes ─────► Console ─────► the cell
channels ──► messages ──► `on_message`
sentinels ─► exits ─────► `on_sentinel`
wake pipe ─► an interrupt of the notebook, or a click on Stop ──► `on_interrupt`

Nothing is polled and no thread is started. The panel is given the metrics, and looks when it wants
to. What an event means is decided by the subclass: the `supervisor` of a call.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from nbaccel.output.console import Console
from nbaccel.output.dashboard.following import DashboardUpdater
from nbaccel.workers import messaging, template_starter
from nbaccel.workers.worker_handle import WorkerHandle

_READ_BYTES = 1 << 16
_PIPE_BYTES = 1 << 20  # the capacity of a pipe, set in `worker_handle._enlarge`


class WorkerListener:
    """Listens to some workers."""

    def __init__(self, members: Sequence[WorkerHandle], output_console: Console) -> None:
        self.members = list(members)
        self._console = output_console
        self._show: DashboardUpdater | None = None
        self._selector = selectors.DefaultSelector()
        self._paused: dict[int, WorkerHandle] = {}
        """Pipes that are not read just now: the worker waits in its `print`."""
        self._wake = _WakePipe()

    # ---- what a listener decides

    def on_message(self, member: WorkerHandle, message: Any, file_descriptors: list[int]) -> None:
        """A worker has sent a message; the descriptors are the listener's to close."""
        raise NotImplementedError

    def on_sentinel(self) -> None:
        """Some worker may have ended."""
        raise NotImplementedError

    def on_interrupt(self) -> None:
        """The notebook was interrupted."""
        raise NotImplementedError

    def on_caught(self) -> None:
        """Interrupts are caught from now on, and what workers say is heard soon."""

    # ---- from outside

    def interrupt(self) -> None:
        """Do what interrupting the notebook does; from any thread.

        It has no effect unless this listens just now, so a late click stops nothing else.
        """
        self._wake.ring()

    @property
    def console(self) -> Console:
        """Where the workers' output goes."""
        return self._console

    def notice(self, notice_text: str) -> None:
        """Show a line that is no worker's, after what has been printed so far."""
        self._console.notice(notice_text)

    # ---- listening

    def tails(self) -> dict[int, list[str]]:
        """The last lines that each rank printed."""
        return self._console.tails()

    @contextlib.contextmanager
    def listening(self, sentinels: Sequence[int]) -> Iterator[None]:
        """Listen within this block, with interrupts caught."""
        with self._wake.open() as wake_pipe:
            self.on_caught()
            register_input = self._selector.register
            register_input(wake_pipe, selectors.EVENT_READ, wake_pipe)
            for file_descriptor in sentinels:
                register_input(file_descriptor, selectors.EVENT_READ, None)
            for member in self.members:
                if member.has_ended:
                    continue
                if not member.hung_up:
                    register_input(member.channel, selectors.EVENT_READ, member)
                for file_descriptor in member.pipes:
                    register_input(file_descriptor, selectors.EVENT_READ, member)
            if self._show is not None:
                # The display may have a Stop button, which has an effect from here on.
                self._show.poll(self)
            try:
                yield
            finally:
                self._selector.close()

    def receive(self, patience_s: float | None) -> None:
        """Wait until something happens, at most so long, and let it be decided."""
        if self._show is not None:
            due_time = self._show.due_in()
            patience_s = due_time if patience_s is None else min(patience_s, due_time)
        for selector_key, _ in self._selector.select(patience_s):
            if selector_key.data is None:
                self.on_sentinel()
            elif not isinstance(selector_key.data, WorkerHandle):
                # All of it: several presses of Stop within one wait are one interrupt.
                os.read(selector_key.data, 4096)
                # A stopped template (SIGSTOP) would not report the ends of its workers.
                template_starter.go_on()
                self.on_interrupt()
            elif selector_key.fileobj is selector_key.data.channel:
                if not selector_key.data.hung_up:
                    self._receive_message(selector_key.data)
            # An exit earlier in this batch may have closed the pipe.
            elif selector_key.fd in self._selector.get_map():
                self._read_output(selector_key.data, selector_key.fd)
        self._console.tick()
        self._resume()
        if self._show is not None:
            self._show.poll(self)

    def end_is_near(self) -> None:
        """Stop was pressed, or a worker has failed: do not let output delay that."""
        self._console.end_is_near()
        self._resume()

    def show_rest(self) -> None:
        """Show the waiting output when all have finished; interrupts are handled meanwhile."""
        while self._console.is_behind:
            self.receive(self._console.due_in())

    def drain(self, member: WorkerHandle) -> None:
        """Read what the worker left behind; a grandchild may hold the pipes open for ever."""
        while not member.hung_up and _is_readable(member.channel.fileno()):
            self._receive_message(member)
        self._hang_up(member)
        self.drain_output(member)
        for file_descriptor in member.pipes:
            self._forget(file_descriptor)

    def drain_output(self, member: WorkerHandle) -> None:
        """Read all that the worker has printed so far."""
        for file_descriptor in tuple(member.pipes):
            # A thread may print for ever: read no more than a pipe can have held at the start.
            bytes_left = _PIPE_BYTES
            while (
                bytes_left > 0
                and file_descriptor in member.pipes
                and self._read_output(member, file_descriptor)
            ):
                bytes_left -= _READ_BYTES

    def drain_readable(self) -> None:
        """Read all that living workers have printed so far, by one question for all pipes."""
        # The pipes of members that wait are not in the selector.
        talking_members = {member.rank: member for member in self._paused.values()}
        for key, _ in self._selector.select(0):
            member = key.data
            if isinstance(member, WorkerHandle) and key.fileobj is not member.channel:
                talking_members[member.rank] = member
        for member in talking_members.values():
            if not member.has_ended:
                self.drain_output(member)

    def _receive_message(self, member: WorkerHandle) -> None:
        try:
            message, file_descriptors = member.channel.receive()
        except EOFError:
            self._hang_up(member)
            return
        if isinstance(message, (messaging.Display, messaging.ClearOutput)):
            # What it printed before the display must be shown before it.
            self.drain_output(member)
            self._console.feed_display(member.rank, message)
        elif isinstance(message, messaging.Metrics):
            if self._show is not None:
                self._show.receive(member.rank, message)
        elif isinstance(message, messaging.Leaves):
            member.note(message)
        else:
            self.on_message(member, message, file_descriptors)

    def _read_output(self, member: WorkerHandle, file_descriptor: int) -> bool:
        """Take in a chunk of output; returns whether there may be more."""
        try:
            output_bytes = os.read(file_descriptor, _READ_BYTES)
        except BlockingIOError:
            return False
        stream_name = member.pipes[file_descriptor]
        # End of file: every process that held the writing end has closed it.
        if not output_bytes:
            self._forget(file_descriptor)
            del member.pipes[file_descriptor]
            os.close(file_descriptor)
            return False
        if stream_name == "stack":
            member.note_stack(output_bytes)
        else:
            self._console.feed(member.rank, stream_name, output_bytes)
            if file_descriptor not in self._paused and self._console.is_full(member.rank):
                self._forget(file_descriptor)
                # Unread, the pipe fills up and the worker waits: memory here stays bounded.
                self._paused[file_descriptor] = member
        return len(output_bytes) == _READ_BYTES

    def _resume(self) -> None:
        for file_descriptor, member in tuple(self._paused.items()):
            if not self._console.is_full(member.rank):
                del self._paused[file_descriptor]
                self._selector.register(file_descriptor, selectors.EVENT_READ, member)

    def _forget(self, file_descriptor: int) -> None:
        """Stop reading this pipe."""
        if self._paused.pop(file_descriptor, None) is None:
            self._selector.unregister(file_descriptor)

    def _hang_up(self, member: WorkerHandle) -> None:
        if not member.hung_up:
            member.hang_up()
            self._selector.unregister(member.channel)


class _WakePipe:
    """A pipe whose one end is in the `select`: whoever writes to the other one interrupts it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ringer: int | None = None

    def ring(self) -> None:
        """Interrupt the `select`, if there is one."""
        with self._lock:
            if self._ringer is not None:
                os.write(self._ringer, b"i")

    @contextlib.contextmanager
    def open(self) -> Iterator[int]:
        """Let an interrupt of the notebook wake `select` instead of raising in the middle."""
        woken_end, waking_end = os.pipe()
        os.set_blocking(woken_end, False)
        # A signal handler must never wait, not even for a full pipe.
        os.set_blocking(waking_end, False)
        # Only the main thread may set signal handlers.
        is_main_thread = threading.current_thread() is threading.main_thread()

        def on_interrupt(signal_number: int, current_frame: Any) -> None:
            # Without the lock: the handler may run while this same thread holds it.
            os.write(waking_end, b"i")

        handler_before = signal.signal(signal.SIGINT, on_interrupt) if is_main_thread else None
        self._ringer = waking_end
        try:
            yield woken_end
        finally:
            # Another thread may be about to write to the descriptor, which is closed below.
            with self._lock:
                self._ringer = None
            if is_main_thread:
                signal.signal(signal.SIGINT, handler_before)
            os.close(woken_end)
            os.close(waking_end)


def _is_readable(file_descriptor: int) -> bool:
    with selectors.DefaultSelector() as poll_selector:
        poll_selector.register(file_descriptor, selectors.EVENT_READ)
        return bool(poll_selector.select(0))
