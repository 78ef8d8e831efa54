"""Watching workers during one call until it is over: which events there are, and what follows.

    LaunchSupervisor (launch)   the call is over when all workers have ended
    TaskSupervisor (pool)       it is over when all that had it are idle again, or a worker is lost

The loop itself, one `select` over everything, is `listening`'s; how workers are made to give up is
`shutdown`'s. Finding out when something is due and doing it are two steps: finding out
changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from nbaccel.base import process_death
from nbaccel.calls.collective_watch import CollectiveWatch
from nbaccel.calls.listening import CallDisplay, WorkerListener
from nbaccel.calls.shutdown import ShutdownLadder, ShutdownPolicy
from nbaccel.output.console import Console
from nbaccel.output.report.collecting import ObservedRun
from nbaccel.workers import messaging, time_limits
from nbaccel.workers.worker_group import WorkerGroup
from nbaccel.workers.worker_handle import HandleState, WorkerHandle


@dataclass(frozen=True, kw_only=True)
class CallResult:
    """How a call ended."""

    members: tuple[WorkerHandle, ...]
    """The workers that had it, by rank, with what each has returned, raised or died of."""
    tails: dict[int, list[str]] = field(repr=False)
    """The last lines that each rank printed."""
    library_messages: list[str] = field(repr=False)
    """What libraries have printed that is folded away as long as all is well."""
    interrupted: bool
    """The user has stopped it."""
    timed_out: bool
    stuck: tuple[WorkerHandle, ...]
    """Workers that never sent a message."""
    observed: ObservedRun | None = field(default=None, repr=False)
    """What was seen of it; None for one that is not shown."""

    @property
    def went_well(self) -> bool:
        """Whether every rank completed it."""
        return not self.interrupted and all(member.returned is not None for member in self.members)


class Supervisor(WorkerListener):
    """Watches the workers of a group during one call."""

    def __init__(
        self,
        group: WorkerGroup,
        policy: ShutdownPolicy,
        *,
        console: Console,
        timeout_s: float | None = None,
        show: CallDisplay | None = None,
    ) -> None:
        super().__init__(group.members, console, show)
        self._group = group
        self._policy = policy
        self._began = time.monotonic()
        self._deadline = None if timeout_s is None else self._began + timeout_s
        self._collective_watch = CollectiveWatch()
        self._ladder: ShutdownLadder | None = None
        self._interrupted = False
        self._timed_out = False
        self._stuck: tuple[WorkerHandle, ...] = ()
        self._observed: ObservedRun | None = None

    # ---- what follows for the workers of a launch, or of a pool

    def begin(self) -> None:
        """The workers are listened to from now on."""

    def is_over(self) -> bool:
        """Whether the call is over."""
        raise NotImplementedError

    def at_work(self) -> Iterable[WorkerHandle]:
        """Workers that are to give up the call, if all are."""
        raise NotImplementedError

    def through(self) -> Iterable[WorkerHandle]:
        """Workers that have finished, and leave once all have."""
        return ()

    def participants(self) -> Iterable[WorkerHandle]:
        """Workers whose results are those of the call."""
        return self.members

    def on_end(self, member: WorkerHandle, exit_status: messaging.Ended) -> None:
        """A worker is gone, and all that it said has been read."""
        raise NotImplementedError

    def clocks(self) -> Iterator[float]:
        """When `on_clock` is due, as long as nothing is wrong (CLOCK_MONOTONIC)."""
        return iter(())

    def on_clock(self) -> None:
        """Do what is due, as long as nothing is wrong."""

    def sentinels(self) -> Sequence[int]:
        """Descriptors of which `on_sentinel` is told."""
        return self._group.sentinels()

    def close_output(self) -> None:
        """The call is over: read what living workers have printed in it."""

    # ---- watching

    @property
    def seconds(self) -> float:
        """How long it has taken so far."""
        return time.monotonic() - self._began

    def watch(self) -> None:
        """Wait until the call is over."""
        try:
            self.listen()
        finally:
            call_display = self._show
            self._show = None
            if call_display is not None:
                # The front end must not be left with an unfinished display.
                with process_death.uninterrupted():
                    call_display.end(
                        self,
                        has_failed=any(member.returned is None for member in self.participants()),
                        was_interrupted=self._interrupted,
                        timed_out=self._timed_out,
                    )
                self._observed = ObservedRun.ended_now(
                    call_display.board, self._console.warnings, self._group.plan
                )

    def listen(self) -> None:
        """Hear the workers until the call is over, and show what they have printed."""
        with self.listening(self.sentinels()):
            self.begin()
            while not self.is_over() and self._do_what_is_due():
                self.receive(self._patience())
            self.close_output()
            self.show_rest()
        self._console.show_last()

    def facts(self) -> dict[str, Any]:
        """The fields of a `CallResult`."""
        return {
            "members": tuple(self.participants()),
            "tails": self.tails(),
            "library_messages": self._console.library_messages.lines(),
            "interrupted": self._interrupted,
            "timed_out": self._timed_out,
            "stuck": self._stuck,
            "observed": self._observed,
        }

    def give_up(self, *, failed: bool = False) -> None:
        """Let all workers give up the call."""
        steps = self._policy.on_failure if failed else self._policy.on_stop
        self.start_ladder(
            ShutdownLadder(
                self.at_work(), steps, finished=self.through(), leaving=self._policy.leaving
            )
        )

    def start_ladder(self, shutdown_ladder: ShutdownLadder) -> None:
        """Bring the workers down by this ladder from now on."""
        self.end_is_near()
        self._ladder = shutdown_ladder

    def _do_what_is_due(self) -> bool:
        """Returns False where a worker is left that cannot even be killed."""
        if self._ladder is None:
            self._check_clocks()
        # Again, because a clock may just have started the ladder.
        if self._ladder is None:
            return True
        self._ladder.advance()
        return self._ladder.due() is not None

    def _check_clocks(self) -> None:
        current_time = time.monotonic()
        # First: a worker that hangs in its fork would otherwise be reported as a timeout.
        self._stuck = tuple(
            member
            for member in self._members_without_message()
            if current_time >= member.forked_at + time_limits.FIRST_MESSAGE_S
        )
        if self._stuck:
            self.give_up()
        elif self._deadline is not None and current_time >= self._deadline:
            self._timed_out = True
            self.give_up()
        else:
            if notice_text := self._collective_watch.advance(list(self.participants())):
                self.notice(notice_text)
            self.on_clock()

    def _members_without_message(self) -> Iterator[WorkerHandle]:
        return (member for member in self.members if member.state is HandleState.FORKED)

    def _alarms(self) -> Iterator[float]:
        if self._ladder is not None:
            if (alarm_time := self._ladder.due()) is not None:
                yield alarm_time
            return
        if self._deadline is not None:
            yield self._deadline
        yield from (
            member.forked_at + time_limits.FIRST_MESSAGE_S
            for member in self._members_without_message()
        )
        yield self._collective_watch.due()
        yield from self.clocks()

    def _patience(self) -> float | None:
        current_time = time.monotonic()
        wait_seconds = [max(0.0, alarm_time - current_time) for alarm_time in self._alarms()]
        if (console_wait := self._console.due_in()) is not None:
            wait_seconds.append(console_wait)
        return min(wait_seconds, default=None)

    # ---- what can happen

    def on_message(
        self, member: WorkerHandle, worker_message: Any, file_descriptors: list[int]
    ) -> None:
        """A worker has said how far it is."""
        if isinstance(worker_message, messaging.Alive):
            member.come_alive()
        elif isinstance(worker_message, messaging.Returned):
            member.take_result(worker_message, file_descriptors)
        elif isinstance(worker_message, messaging.Failed):
            self.on_failure(member, worker_message, file_descriptors)
        elif isinstance(worker_message, messaging.Interrupting) and self._ladder is not None:
            self._ladder.unwinds(member)

    def on_failure(
        self, member: WorkerHandle, worker_message: messaging.Failed, file_descriptors: list[int]
    ) -> None:
        """A worker's function has raised."""
        if (
            member.is_stopped
            and self._ladder is not None
            # Compared by the time of the failure: one from before the stop is a failure of its own.
            and worker_message.time > self._ladder.began
        ):
            # Its stack may still be in the pipe, and the record needs it.
            self.drain_output(member)
            record = member.record_of_stop()
        else:
            record = worker_message.record
        member.take_failure(worker_message, file_descriptors, record)
        if self._ladder is None:
            self.give_up(failed=True)

    def on_interrupt(self) -> None:
        """The user has pressed Stop."""
        if self._ladder is not None:
            # Stop was pressed twice, or while a failure is handled, which is still reported.
            self._ladder.hurry()
            return
        self._interrupted = True
        self.give_up()

    def on_sentinel(self) -> None:
        """Workers may have ended."""
        by_pid = {m.pid: m for m in self.members}
        for exit_status in self._group.collect():
            if (member := by_pid.get(exit_status.pid)) is not None:
                # Before the end is noted: its last messages say whether it had returned.
                self.drain(member)
                self._console.close(member.rank)
                if self._ladder is not None:
                    self._ladder.ended(member)
                self.on_end(member, exit_status)
