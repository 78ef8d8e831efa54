"""Watching workers during one call until it is over: which events there are, and what follows.

    launch   workers that make one call and leave; the call is over when all have ended
    pool     workers that stay; it is over when all that had it are idle again, or a worker is lost

The loop itself, one `select` over everything, is `listening`'s; how workers are made to give up is
`shutdown`'s. Finding out when something is due and doing it are two steps: finding out
changes nothing.

[Note: exit barrier] A rank that exits closes its connections. If it does so too early, it breaks a
peer that is still connecting to it (`init_process_group` returns on one rank before it does on the
other). If it does so too late, a peer that waits for it in a collective waits for ever instead of
learning that it is gone. So a launch's rank that has returned stays until all have; and if that
takes long, until no other is seen setting up a group. Then it exits, and a peer that still depends
on it fails at once, with its name.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nbaccel.base import process_death
from nbaccel.base.torch_private import CREATES_GROUP
from nbaccel.calls import pool_messages
from nbaccel.calls.collective_watch import CollectiveWatch
from nbaccel.calls.listening import WorkerListener
from nbaccel.calls.shutdown import AFTER_LOSS, END_WORKERS, KEEP_WORKERS, ShutdownLadder
from nbaccel.output.console import Console
from nbaccel.output.dashboard.following import DashboardUpdater
from nbaccel.output.report.collecting import ObservedRun
from nbaccel.transfer import memfd
from nbaccel.workers import messaging, time_limits
from nbaccel.workers.worker_group import WorkerGroup
from nbaccel.workers.worker_handle import HandleState, WorkerHandle

__all__ = ["CallResult", "RankTasks", "Supervisor"]

RankTasks = Mapping[int, tuple[Any, Sequence[int]]]
"""Rank → a task's body, and the descriptors to send along."""

_CONNECTING_FUNCTIONS = {"init_process_group", "new_group", CREATES_GROUP, "init_device_mesh"}


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
    idle: Mapping[int, pool_messages.Idle]
    """The last message of each rank of a pool that has finished."""
    lost: tuple[int, ...]
    """Ranks of a pool that have ended."""
    lost_because: str
    """Why all were lost at once, if it was that."""
    staged: Mapping[int, pool_messages.Staged]
    """What ranks have written into staging files."""
    whole_files: dict[str, int] = field(repr=False)
    """Descriptors of the ranks' own files that hold whole arenas, by key of the arena."""
    was_cut: bool
    """Whether a rank was cut off in a collective."""
    is_of_all: bool
    """Whether all workers had it."""

    @property
    def went_well(self) -> bool:
        """Whether every rank completed it."""
        return not self.interrupted and all(member.returned is not None for member in self.members)

    @property
    def shown(self) -> dict[int, Any]:
        """What the task gives the user to see, by rank."""
        return {rank: answer.shown for rank, answer in self.idle.items()}

    def take_files(self) -> list[int]:
        """The descriptors of `whole_files`; they are the caller's to close."""
        file_descriptors = list(self.whole_files.values())
        self.whole_files.clear()
        return file_descriptors

    @property
    def out_of_step(self) -> bool:
        """Whether process groups cannot be used any longer.

        A rank was cut off in one of their collectives, or their ranks have begun different numbers
        of them: the next one would meet the wrong partner.
        """
        collective_counts: dict[str, set[int]] = {}
        for name, collective_count in (
            entry for answer in self.idle.values() for entry in answer.sequence
        ):
            # By name, because not all ranks need be in a group: absent ranks are no difference.
            collective_counts.setdefault(name, set()).add(collective_count)
        in_groups = {answer.in_groups for answer in self.idle.values()}
        differing_groups = len(in_groups) > 1 or any(
            len(counts) > 1 for counts in collective_counts.values()
        )
        return self.was_cut or (self.is_of_all and differing_groups)


class Supervisor(WorkerListener):
    """Watches the workers of a group during one call."""

    def __init__(
        self,
        group: WorkerGroup,
        ranks: Iterable[int],
        rank_tasks: RankTasks,
        *,
        task_number: int,
        console: Console,
        timeout_s: float | None = None,
        make_show: Callable[[], DashboardUpdater] | None = None,
    ) -> None:
        super().__init__(group.members, console)
        self._group = group
        self._policy = KEEP_WORKERS if group.stays else END_WORKERS
        self._make_show = make_show
        self._tasks = rank_tasks
        self._number = task_number
        self._ranks = set(ranks)
        self._is_of_all = len(self._ranks) == len(self.members)
        self._began = time.monotonic()
        self._deadline = None if timeout_s is None else self._began + timeout_s
        self._collective_watch = CollectiveWatch()
        self._exits = None if group.stays else ExitBarrier(self.members)
        self._ladder: ShutdownLadder | None = None
        self._interrupted = False
        self._timed_out = False
        self._stuck: tuple[WorkerHandle, ...] = ()
        self._observed: ObservedRun | None = None
        self._open = {m.rank for m in self.participants() if not m.has_ended}
        self._joining: set[int] = set()
        """Ranks that have finished, or have no task, and join a process group for the others."""
        self._group_wanted: pool_messages.GroupWanted | None = None
        self._idle: dict[int, pool_messages.Idle] = {}
        self._staged: dict[int, pool_messages.Staged] = {}
        self._whole_files: dict[str, int] = {}
        self._lost: list[int] = []
        self._lost_because = ""
        for member in self.members:
            member.forget_call()
        for member in self.participants():
            member.begin_call()

    @property
    def seconds(self) -> float:
        """How long it has taken so far."""
        return time.monotonic() - self._began

    @property
    def open(self) -> frozenset[int]:
        """Ranks that have not finished yet."""
        return frozenset(self._open)

    def participants(self) -> list[WorkerHandle]:
        """Workers that have the task, and those that were lost meanwhile."""
        return [member for member in self.members if member.rank in self._ranks]

    def at_work(self) -> list[WorkerHandle]:
        """Workers that are in the task, or join a group for those that are."""
        ranks = self._open | self._joining
        return [member for member in self.members if member.rank in ranks and not member.has_ended]

    # ---- watching

    def run(self) -> CallResult:
        """Send the tasks, and wait until the call is over."""
        try:
            self._listen()
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
        return CallResult(
            members=tuple(self.participants()),
            tails=self.tails(),
            library_messages=self._console.library_messages.lines(),
            interrupted=self._interrupted,
            timed_out=self._timed_out,
            stuck=self._stuck,
            observed=self._observed,
            idle=self._idle,
            lost=tuple(self._lost),
            lost_because=self._lost_because,
            staged=self._staged,
            whole_files=self._whole_files,
            was_cut=self._ladder is not None and self._ladder.has_cut,
            is_of_all=self._is_of_all,
        )

    def _listen(self) -> None:
        with self.listening(self._group.sentinels()):
            if not self._group.stays:
                # Some may have died while the others were started.
                self.on_sentinel()
            while not self._is_over() and self._do_what_is_due():
                self.receive(self._patience())
            # What living workers print later belongs to no call.
            self.drain_readable()
            for member in self.members:
                if not member.has_ended:
                    self._console.close(member.rank)
            self.show_rest()
        self._console.show_last()

    def on_caught(self) -> None:
        """Send the tasks: the workers are at work while the rest is made ready to hear them."""
        members_by_body: dict[int, list[WorkerHandle]] = {}
        for member in self.members:
            if member.rank in self._tasks:
                body_id = id(self._tasks[member.rank][0])
                members_by_body.setdefault(body_id, []).append(member)
        # Ranks mostly have the very same task, which is pickled once.
        for members in members_by_body.values():
            task_body, _ = self._tasks[members[0].rank]
            packet_bytes, files = messaging.pack_message(
                messaging.Task(number=self._number, body=task_body)
            )
            with memfd.closing_files(*files):
                for member in members:
                    _, file_descriptors = self._tasks[member.rank]
                    # The worker may have ended meanwhile; its sentinel says so.
                    with contextlib.suppress(OSError):
                        member.channel.send_packed(packet_bytes, [*file_descriptors, *files])
        if self._make_show is not None:
            self._show = self._make_show()

    def _is_over(self) -> bool:
        if self._lost or not self._group.stays:
            return all(member.has_ended for member in self.members)
        # Under the ladder, joining ranks are interrupted too: their Idle is still to come.
        return not (self._open or (self._ladder is not None and self._joining))

    def _give_up(self, *, failed: bool = False) -> None:
        """Let all workers give up the call."""
        steps = self._policy.on_failure if failed else self._policy.on_stop
        at_work = self.at_work()
        finished = [m for m in self.members if m not in at_work and not m.has_ended]
        self._start_ladder(
            ShutdownLadder(at_work, steps, finished=finished, leaving=self._policy.leaving)
        )

    def _start_ladder(self, shutdown_ladder: ShutdownLadder) -> None:
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
            self._give_up()
        elif self._deadline is not None and current_time >= self._deadline:
            self._timed_out = True
            self._give_up()
        else:
            if notice_text := self._collective_watch.advance(self.participants()):
                self.notice(notice_text)
            if self._exits is not None and self._exits.is_overdue():
                self._give_up()
            elif self._exits is not None:
                self._exits.advance()

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
        if self._exits is not None and (alarm_time := self._exits.due()) is not None:
            yield alarm_time

    def _patience(self) -> float | None:
        current_time = time.monotonic()
        wait_seconds = [max(0.0, alarm_time - current_time) for alarm_time in self._alarms()]
        if (console_wait := self._console.due_in()) is not None:
            wait_seconds.append(console_wait)
        return min(wait_seconds, default=None)

    # ---- messages

    def on_message(
        self, member: WorkerHandle, worker_message: Any, file_descriptors: list[int]
    ) -> None:
        """A worker has said how far it is."""
        match worker_message:
            case messaging.Alive():
                member.come_alive()
            case messaging.Started():
                member.begin_work()
            case messaging.Returned():
                member.take_result(worker_message, file_descriptors)
                self._on_handed_over(member)
            case messaging.Failed():
                self._on_failure(member, worker_message, file_descriptors)
                self._on_handed_over(member)
            case messaging.Interrupting() if self._ladder is not None:
                self._ladder.unwinds(member)
            case messaging.Whereabouts():
                member.note_whereabouts(worker_message)
                if self._ladder is not None:
                    self._ladder.answered(member)
            case pool_messages.Idle():
                self._on_idle(member, worker_message)
            case pool_messages.Staged():
                self._staged[member.rank] = worker_message
                self._whole_files |= zip(worker_message.whole, file_descriptors, strict=True)
            case pool_messages.GroupWanted():
                self._on_group_wanted(worker_message)

    def _on_failure(
        self, member: WorkerHandle, worker_message: messaging.Failed, file_descriptors: list[int]
    ) -> None:
        """A worker's function has raised."""
        if member.rank not in self._open:
            # Outside the task, such as in a join.
            memfd.close_all(file_descriptors)
            return
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
            self._give_up(failed=True)

    def _on_handed_over(self, member: WorkerHandle) -> None:
        """A launch's worker has nothing to do any more; a pool's says so by `Idle`."""
        if self._exits is None:
            return
        member.finish_call()
        self._open.discard(member.rank)
        self._exits.note_return()
        if self._ladder is not None:
            self._ladder.finished(member)

    def _on_idle(self, member: WorkerHandle, worker_message: pool_messages.Idle) -> None:
        rank = member.rank
        if worker_message.number == self._number:
            member.finish_call()
            self._open.discard(rank)
            self.drain_output(member)
            self._console.close(rank)
            self._idle[rank] = worker_message
            # A rank that has finished must join too, or the others would wait until the timeout.
            if self._group_wanted is not None and self._open:
                self._ask_to_join(member, self._group_wanted)
        else:
            self._joining.discard(rank)
        # After a loss a finished worker is ended too, so it stays on the ladder.
        if self._ladder is not None and rank not in self._open and not self._lost:
            self._ladder.finished(member)

    def _on_group_wanted(self, worker_message: pool_messages.GroupWanted) -> None:
        if self._group_wanted is None or worker_message.ordinal > self._group_wanted.ordinal:
            self._group_wanted = worker_message
            for member in self.members:
                if member.rank not in self._open and not member.has_ended:
                    self._ask_to_join(member, worker_message)

    def _ask_to_join(self, member: WorkerHandle, group_wanted: pool_messages.GroupWanted) -> None:
        self._joining.add(member.rank)
        # The worker may have ended; its sentinel says so.
        with contextlib.suppress(OSError):
            member.channel.send(
                messaging.Task(number=0, body=pool_messages.JoinGroup(wanted=group_wanted))
            )

    # ---- interrupts and exits

    def on_interrupt(self) -> None:
        """The user has pressed Stop."""
        if self._ladder is not None:
            # Stop was pressed twice, or while a failure is handled, which is still reported.
            self._ladder.hurry()
            return
        self._interrupted = True
        self._give_up()

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
                if self._group.stays:
                    self._on_loss(member, exit_status)
                else:
                    self._on_exit(member, exit_status)
                self._open.discard(member.rank)

    def _on_exit(self, member: WorkerHandle, exit_status: messaging.Ended) -> None:
        """A launch's worker is gone: a failure, unless it had finished or was stopped."""
        if not member.is_busy or member.is_stopped:
            member.end()
            return
        member.end(member.record_of_death(exit_status, self._group.oom_kills))
        if self._ladder is None:
            self._give_up(failed=True)

    def _on_loss(self, member: WorkerHandle, exit_status: messaging.Ended) -> None:
        """A pool's worker is lost: ask the others where they are, then end them."""
        record = member.record or member.record_of_stop()
        if not member.is_stopped:
            record = member.record_of_death(exit_status, self._group.oom_kills)
        # Even a finished rank loses its result: without its worker the task has failed.
        member.end(record, loses_result=True)
        self._ranks.add(member.rank)
        self._lost.append(member.rank)
        self._lost_because = self._lost_because or exit_status.because
        # Only for the first: workers that end afterwards were killed by this ladder.
        if len(self._lost) == 1:
            other_members = [m for m in self.members if not m.has_ended]
            for other_member in other_members:
                # An answer of up to a second ago would be taken for the place of the failure.
                other_member.note_whereabouts(None)
            self._start_ladder(ShutdownLadder(other_members, AFTER_LOSS))


class ExitBarrier:
    """Lets workers that have returned exit, at the right time. See [Note: exit barrier]."""

    def __init__(self, members: Sequence[WorkerHandle]) -> None:
        self._members = members
        self._next_poll: float | None = None
        """When ranks at work are looked at; None if no rank waits to leave."""
        self._are_asked = False
        self._released_at: float | None = None
        self._released: set[int] = set()

    def note_return(self) -> None:
        """A worker has returned."""
        if self._next_poll is None:
            self._next_poll = time.monotonic() + time_limits.EXIT_RECHECK_S

    def due(self) -> float | None:
        """When something is to be done (CLOCK_MONOTONIC); None if there is nothing to decide."""
        if self._at_work():
            return self._next_poll
        if self._waiting():
            # No rank is at work any more: those that wait may leave at once.
            return 0.0
        return None if self._released_at is None else self._released_at + time_limits.EXIT_S

    def is_overdue(self) -> bool:
        """Whether workers that may leave and have not must be ended; not while one is at work.

        They have handed over all they had. One that does not leave (stopped by a signal, or stuck
        in a library's clean-up), or whose end is not reported, must not keep the notebook waiting.
        """
        if self._released_at is None or self._waiting() or self._at_work():
            return False
        return time.monotonic() >= self._released_at + time_limits.EXIT_S

    def advance(self) -> None:
        """Do what is due."""
        current_time = time.monotonic()
        due_time = self.due()
        if due_time is None or current_time < due_time:
            return
        busy_members = self._at_work()
        if not busy_members:
            self.release(self._waiting())
        elif not self._are_asked:
            for member in busy_members:
                # Or the old dump would be taken for the answer.
                member.forget_stack()
                member.ask_stack()
            self._are_asked = True
            self._next_poll = current_time + time_limits.ANSWER_S
        else:
            self._are_asked = False
            self._next_poll = current_time + time_limits.EXIT_RECHECK_S
            # A rank that sets up a group may still need the connections of one that has returned.
            waiting_members = self._waiting()
            if waiting_members and not any(map(_sets_up, busy_members)):
                self.release(waiting_members)

    def _at_work(self) -> list[WorkerHandle]:
        return [member for member in self._members if member.is_busy]

    def _waiting(self) -> list[WorkerHandle]:
        """Workers that have returned and may not leave yet."""
        return [
            member
            for member in self._members
            if member.state is HandleState.RETURNED and member.rank not in self._released
        ]

    def release(self, members: Iterable[WorkerHandle]) -> None:
        """Let workers that have returned exit."""
        self._next_poll = None
        self._released_at = self._released_at or time.monotonic()
        for member in members:
            self._released.add(member.rank)
            member.let_exit()


def _sets_up(member: WorkerHandle) -> bool:
    """Whether it sets up a process group, or itself."""
    return member.state is not HandleState.RUNNING or any(
        stack_frame.function in _CONNECTING_FUNCTIONS for stack_frame in member.stack
    )
