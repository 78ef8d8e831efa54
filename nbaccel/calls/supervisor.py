"""Watching workers during one call until it is over: one `select` over all that can happen.

    pipes ─────► Console ─────► the cell
    channels ──► messages ────► how far each rank is; metrics go to the panel
    sentinels ─► exits
    wake pipe ─► an interrupt of the notebook, or a click on Stop

A launch's workers make one call and leave: it is over when all have ended. A pool's stay: it is
over when all that had the task are idle again, or when a worker is lost.

Nothing is polled and no thread is started. How workers are made to give up is `shutdown`'s. Finding
out when something is due and doing it are two steps: finding out changes nothing.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from nbaccel.base import process_death
from nbaccel.calls import pool_messages
from nbaccel.calls.collective_watch import CollectiveWatch
from nbaccel.calls.outcome import CallResult
from nbaccel.calls.shutdown import (
    AFTER_LOSS,
    END_WORKERS,
    KEEP_WORKERS,
    ExitBarrier,
    ShutdownLadder,
    ShutdownStep,
)
from nbaccel.config.capabilities import engine_row
from nbaccel.output.console import Console
from nbaccel.output.panel.facts import RunBoard
from nbaccel.output.panel.following import DashboardUpdater
from nbaccel.plan import Plan
from nbaccel.transfer import memfd
from nbaccel.workers import messaging, template_starter, time_limits
from nbaccel.workers.worker_handle import HandleState, WorkerHandle

__all__ = ["RankTasks", "Supervisor"]

RankTasks = Mapping[int, tuple[Any, Sequence[int]]]
"""Rank → a task's body, and the descriptors to send along."""

_READ_BYTES = 1 << 16
_PIPE_BYTES = 1 << 20  # the capacity of a pipe, set in `worker_handle._enlarge`


class WatchedGroup(Protocol):
    """What this needs to know of a `Group`, which is above it."""

    plan: Plan
    stays: bool
    members: list[WorkerHandle]
    oom_kills: int

    def collect(self) -> Sequence[messaging.Ended]:
        """Workers that have ended since the last call."""


class Supervisor:
    """Watches the workers of a group during one call."""

    def __init__(
        self,
        group: WatchedGroup,
        ranks: Iterable[int],
        rank_tasks: RankTasks,
        *,
        task_number: int,
        console: Console,
        timeout_s: float | None = None,
        make_show: Callable[[], DashboardUpdater] | None = None,
    ) -> None:
        self.members = list(group.members)
        self._group = group
        self._console = console
        self._show: DashboardUpdater | None = None
        self._selector = selectors.DefaultSelector()
        self._paused: dict[int, WorkerHandle] = {}
        """Pipes that are not read just now: the worker waits in its `print`."""
        self._wake = _WakePipe()
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
        self._observed: RunBoard | None = None
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
                self._observed = call_display.board
        return CallResult(
            members=tuple(self.participants()),
            tails=self._console.tails(),
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
        with self._listening():
            while not self._is_over() and self._do_what_is_due():
                self._receive(self._patience())
            # What living workers print later belongs to no call.
            self._drain_readable()
            for member in self.members:
                if not member.has_ended:
                    self._console.close(member.rank)
            self._show_rest()
        self._console.show_last()

    def _send_tasks(self) -> None:
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
                        member.channel.send_packet(packet_bytes, [*file_descriptors, *files])
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
        if failed and self._may_have_lost_a_host():
            steps = ((ShutdownStep.WAIT, time_limits.HOST_S), *steps)
        at_work = self.at_work()
        finished = [m for m in self.members if m not in at_work and not m.has_ended]
        self._start_ladder(
            ShutdownLadder(at_work, steps, finished=finished, leaving=self._policy.leaving)
        )

    def _may_have_lost_a_host(self) -> bool:
        """Whether ranks have only lost their connections, and Ray may tell why."""
        records = [member.record for member in self.members if member.record is not None]
        on_hosts = engine_row(self._group.plan.engine).runs_on_hosts
        return on_hosts and all(record.is_consequence for record in records)

    def _start_ladder(self, shutdown_ladder: ShutdownLadder) -> None:
        self._end_is_near()
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

    # ---- listening

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """Listen within this block, with interrupts caught."""
        with self._wake.open() as wake_pipe:
            self._send_tasks()
            register_input = self._selector.register
            register_input(wake_pipe, selectors.EVENT_READ, wake_pipe)
            for member in self.members:
                if member.has_ended:
                    continue
                register_input(member.sentinel, selectors.EVENT_READ, None)
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

    def _receive(self, patience_s: float | None) -> None:
        """Wait until something happens, at most so long, and let it be decided."""
        if self._show is not None:
            due_time = self._show.due_in()
            patience_s = due_time if patience_s is None else min(patience_s, due_time)
        has_ended = False
        for selector_key, _ in self._selector.select(patience_s):
            if selector_key.data is None:
                has_ended = True
            elif not isinstance(selector_key.data, WorkerHandle):
                # All of it: several presses of Stop within one wait are one interrupt.
                os.read(selector_key.data, 4096)
                # A stopped template (SIGSTOP) would not report the ends of its workers.
                template_starter.go_on()
                self._on_interrupt()
            elif selector_key.fileobj is selector_key.data.channel:
                if not selector_key.data.hung_up:
                    self._receive_message(selector_key.data)
            # A message earlier in this batch may have let its pipes be read to their end.
            elif selector_key.fd in self._selector.get_map():
                self._read_output(selector_key.data, selector_key.fd)
        if has_ended:
            self._on_sentinel()
        self._console.tick()
        self._resume()
        if self._show is not None:
            self._show.poll(self)

    def _end_is_near(self) -> None:
        """Stop was pressed, or a worker has failed: do not let output delay that."""
        self._console.end_is_near()
        self._resume()

    def _show_rest(self) -> None:
        """Show the waiting output when all have finished; interrupts are handled meanwhile."""
        while self._console.is_behind:
            self._receive(self._console.due_in())

    def _drain(self, member: WorkerHandle) -> None:
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

    def _drain_readable(self) -> None:
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
            self._on_message(member, message, file_descriptors)

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
            member.stack_text += output_bytes.decode(errors="replace")
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
            member.hung_up = True
            self._selector.unregister(member.channel)

    # ---- messages

    def _on_message(
        self, member: WorkerHandle, worker_message: Any, file_descriptors: list[int]
    ) -> None:
        """A worker has said how far it is."""
        match worker_message:
            case messaging.Alive():
                member.state = HandleState.ALIVE
            case messaging.Started():
                member.state = HandleState.RUNNING
            case messaging.Returned():
                member.take_result(worker_message, file_descriptors)
                self._on_handed_over(member)
            case messaging.Failed():
                self._on_failure(member, worker_message, file_descriptors)
                self._on_handed_over(member)
            case messaging.Interrupting() if self._ladder is not None:
                self._ladder.unwinds(member)
            case messaging.Whereabouts():
                member.whereabouts = worker_message
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
            and worker_message.record.time > self._ladder.began
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

    def _on_interrupt(self) -> None:
        """The user has pressed Stop."""
        if self._ladder is not None:
            # Stop was pressed twice, or while a failure is handled, which is still reported.
            self._ladder.hurry()
            return
        self._interrupted = True
        self._give_up()

    def _on_sentinel(self) -> None:
        """Workers may have ended."""
        by_pid = {m.pid: m for m in self.members}
        for exit_status in self._group.collect():
            if (member := by_pid.get(exit_status.pid)) is not None:
                # Before the end is noted: its last messages say whether it had returned.
                self._drain(member)
                self._selector.unregister(member.sentinel)
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
                other_member.whereabouts = None
            self._start_ladder(ShutdownLadder(other_members, AFTER_LOSS))


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
