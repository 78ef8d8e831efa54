"""Workers on other hosts, as the notebook starts them: through the relay."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import stat
import time
from collections.abc import Callable, Mapping, Sequence

from nbaccel.base.errors import StartupFailed
from nbaccel.hosts import relay_messages
from nbaccel.hosts.file_copies import ARENA, file_kind
from nbaccel.hosts.helper_process import HelperProcess
from nbaccel.transfer.memfd import file_identity
from nbaccel.workers import messaging, time_limits
from nbaccel.workers.resource_use import ProcessUse
from nbaccel.workers.start_method import HostShare
from nbaccel.workers.worker import WorkerEnds

__all__ = ["RelayConnection", "RemoteStarter"]

_LEAST_CARRIED_BYTES = 1 << 20
"""Smaller files are there sooner by the notebook's own connections."""
_USE_S = 0.5
"""Between questions for what workers use: a dashboard looks once a second, for all ranks."""
_REPORT_S = 0.5
"""For an engine to learn why a host was lost, once the connection to it is."""


class RelayConnection:
    """The notebook's channel to its relay, and what came by it that nobody has asked for yet."""

    def __init__(
        self,
        relay: HelperProcess,
        explain: Callable[[], Mapping[str, str]],
    ) -> None:
        self._relay = relay
        self.channel = channel = relay.channel
        self._explain = explain
        self._waiting: list[object] = []
        # Readable while the channel is, or while an end is kept here that nobody has asked for.
        self._kept_end = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ends = select.epoll()
        for source in (channel.fileno(), self._kept_end):
            self._ends.register(source, select.EPOLLIN)
        self._known_files: set[tuple[int, int]] = set()
        self.lost_hosts: dict[str, str] = {}
        """Hosts that were lost, each with what is known of it."""
        self.uses: dict[int, ProcessUse] = {}
        """What workers use, by number, as their hosts have said last."""
        self._use_asked_at = float("-inf")

    def fileno(self) -> int:
        """A descriptor that is readable when a worker may have ended."""
        return self._ends.fileno()

    def is_new(self, file_descriptor: int) -> bool:
        """Whether a file has not been asked about before."""
        identity = file_identity(file_descriptor)
        is_new = identity not in self._known_files
        self._known_files.add(identity)
        return is_new

    def send(self, message: object, file_descriptors: Sequence[int] = ()) -> None:
        """Tell the relay something."""
        try:
            self.channel.send(message, file_descriptors)
        except OSError as error:
            raise self._relay_gone() from error

    def next(self, kinds: tuple[type, ...], timeout_s: float) -> object | None:
        """The next message of these kinds; others are kept."""
        deadline = time.monotonic() + timeout_s
        while True:
            for message in self._waiting:
                if isinstance(message, kinds):
                    self._waiting.remove(message)
                    return message
            seconds_left = max(0.0, deadline - time.monotonic())
            if not select.select([self.channel], [], [], seconds_left)[0]:
                return None
            self._receive()

    def _receive(self) -> None:
        try:
            message, _ = self.channel.receive()
        except EOFError as error:
            raise self._relay_gone() from error
        if isinstance(message, relay_messages.HostLost):
            self.lost_hosts[message.name] = self._engine_says(message.name)
            return
        if isinstance(message, relay_messages.UseKnown):
            self.uses.update(message.uses)
            return
        if isinstance(message, messaging.Ended):
            os.eventfd_write(self._kept_end, 1)
        self._waiting.append(message)

    def next_end(self) -> messaging.Ended | None:
        """The next report of an ended worker, if there is one."""
        message = self.next((messaging.Ended,), 0.0)
        if not isinstance(message, messaging.Ended):
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._kept_end)
            return None
        return message

    def ask_use(self) -> None:
        """Have `uses` brought up to date; often called, seldom asked."""
        # Asked for, not sent unasked: while nobody reads this channel it would fill up.
        if time.monotonic() - self._use_asked_at >= _USE_S:
            self._use_asked_at = time.monotonic()
            self.send(relay_messages.AskUse())

    def _engine_says(self, name: str) -> str:
        deadline = time.monotonic() + _REPORT_S
        while not (known := self._explain().get(name, "")) and time.monotonic() < deadline:
            time.sleep(_REPORT_S / 10)
        return known

    def close(self) -> None:
        """Hang up: the relay and all agents end."""
        self._ends.close()
        os.close(self._kept_end)
        self._relay.close()

    def _relay_gone(self) -> StartupFailed:
        text = self._relay.error_text()
        last_line = text.rpartition("\n")[2] or "it may have been killed for lack of memory"
        return StartupFailed(
            "The process that connects this notebook with its hosts has ended, and the workers "
            f"with it ({last_line}).\n"
            + (f"It said: {text}\n" if text else "")
            + "Run the cell again."
        )


def _is_worth_carrying(file_descriptor: int) -> bool:
    file_status = os.fstat(file_descriptor)
    return (
        stat.S_ISREG(file_status.st_mode)
        and file_status.st_size >= _LEAST_CARRIED_BYTES
        and file_kind(file_descriptor) == ARENA
    )


class RemoteStarter:
    """Starts workers on hosts whose agents have joined. See `start_method.Starter`."""

    name = "hosts"
    status: int | None = None

    def __init__(
        self,
        connection: RelayConnection,
        shares: Sequence[HostShare],
        carry: Callable[[int], str] = lambda _: "",
    ) -> None:
        self.shares = shares
        self._carry = carry
        self._connection = connection
        self._places = [share.name for share in shares for _ in range(share.num_workers)]
        self._hosts_of: dict[int, str] = {}
        self._num_started = 0

    def start(self, ends: WorkerEnds) -> int:
        """See :meth:`Starter.start`."""
        name = self._places[self._num_started]
        self._num_started += 1
        ticket = self._num_started
        self._connection.send(relay_messages.StartWorker(ticket, name), ends.all())
        answer = self._connection.next((messaging.Forked,), time_limits.FORK_S)
        if not isinstance(answer, messaging.Forked):
            raise StartupFailed(
                f"Host {name} did not fork a worker within {time_limits.FORK_S:.0f} s. It may "
                "be overloaded or swapping; all workers have been ended."
            )
        self._hosts_of[answer.pid] = name
        return answer.pid

    def prepare_files(self, file_descriptors: Sequence[int]) -> None:
        """See :meth:`Starter.prepare_files`."""
        for file_descriptor in file_descriptors:
            if _is_worth_carrying(file_descriptor) and self._connection.is_new(file_descriptor):
                self._prepare_file(file_descriptor)

    def _prepare_file(self, file_descriptor: int) -> None:
        ticket = self._carry(file_descriptor)
        if ticket:
            self._connection.send(relay_messages.FileCarried(ticket), [file_descriptor])
            # Answered, because the relay reads the workers' channels in no particular order.
            self._connection.next((relay_messages.FileNoted,), time_limits.FORK_S)

    def sentinels(self) -> Sequence[int]:
        """The channel on which the relay reports ended workers."""
        return [self._connection.fileno()]

    def sentinel(self, process_id: int) -> int:
        """See :meth:`Starter.sentinel`: readable when the relay reports anything."""
        return os.dup(self._connection.fileno())

    def collect(self) -> Sequence[messaging.Ended]:
        """See :meth:`Starter.collect`."""
        exit_statuses = []
        while True:
            try:
                message = self._connection.next_end()
            except StartupFailed as error:
                reason = str(error).partition("\n")[0]
                exit_statuses += [
                    messaging.Ended(process_id, -9, 0, reason) for process_id in self._hosts_of
                ]
                self._hosts_of.clear()
                return exit_statuses
            if message is None:
                return exit_statuses
            name = self._hosts_of.pop(message.pid, None)
            if name is not None:
                exit_statuses.append(self._explained(message, name))

    def _explained(self, ended: messaging.Ended, name: str) -> messaging.Ended:
        """The report, with what the engine knows of a host that was lost."""
        known = self._connection.lost_hosts.get(name, "")
        if not known:
            return ended
        return dataclasses.replace(ended, because=f"{ended.because}: {known}")

    def signal(self, process_id: int, signal_number: int) -> None:
        """See :meth:`Starter.signal`."""
        self._tell(relay_messages.SignalProcess(process_id, signal_number))

    def kill(self, process_id: int) -> None:
        """See :meth:`Starter.kill`."""
        self._tell(relay_messages.KillProcess(process_id))

    def use_of(self, process_id: int) -> ProcessUse | None:
        """See :meth:`Starter.use_of`."""
        # The relay has ended, and the workers with it: `collect` says so.
        with contextlib.suppress(StartupFailed):
            self._connection.ask_use()
        return self._connection.uses.get(process_id)

    def close(self) -> None:
        """All have ended; the connection stays its session's."""
        self._hosts_of.clear()

    def _tell(self, message: object) -> None:
        # The relay has ended, and the workers with it: `collect` says so.
        with contextlib.suppress(StartupFailed):
            self._connection.send(message)
