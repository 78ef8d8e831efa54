"""Watching workers during one call until it is over: one `select` over all that can happen.

    pipes ─────► Console ─────► the cell
    channels ──► messages ────► how far each rank is; metrics go to the panel
    sentinels ─► exits
    wake pipe ─► an interrupt of the notebook, as Stop sends it

Nothing is polled and no thread is started. Finding out when something is due and doing it are two
steps: finding out changes nothing.

[Note: exit barrier] A rank that exits closes its connections. If it does so too early, it breaks a
peer that is still connecting to it (`init_process_group` returns on one rank before it does on the
other). If it does so too late, a peer that waits for it in a collective waits for ever instead of
learning that it is gone. So a launch's rank that has returned stays until all have; and if that
takes long, until no other is seen setting up a group. Where a launch is ended, it stays until no
other is at work: a peer in a collective would report an error that this end has caused.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from nbaccel.base import processes
from nbaccel.base.torch_private import CREATES_GROUP
from nbaccel.base.training_metrics import Metrics
from nbaccel.base.units import format_seconds
from nbaccel.calls import shutdown
from nbaccel.config.capabilities import engine_row
from nbaccel.output.console import Console
from nbaccel.output.panel.display import Dashboard
from nbaccel.output.panel.facts import RunBoard
from nbaccel.plan import Plan
from nbaccel.train.call_check import CHECK_VARIABLE
from nbaccel.transfer import memfd
from nbaccel.workers import messaging, template, time_limits
from nbaccel.workers.failure import RankActivity
from nbaccel.workers.worker_processes import HandleState, WorkerHandle

RankTasks = Mapping[int, tuple[Any, Sequence[int]]]  # rank → a task's body, and descriptors

_READ_BYTES = 1 << 16
_PIPE_BYTES = 1 << 20  # the capacity of a pipe, set in `worker_handle.connect`


@dataclass(kw_only=True)
class CallResult:
    """How a call ended; a `Supervisor` fills it in."""

    members: tuple[WorkerHandle, ...] = ()  # the workers that had it, by rank, with their answers
    console: Console = field(repr=False)  # what ranks have printed
    interrupted: bool = False  # the user has stopped it
    timed_out: bool = False
    stuck: list[WorkerHandle] = field(default_factory=list)  # workers that never sent a message
    observed: RunBoard | None = field(default=None, repr=False)  # None for one that is not shown
    idle: dict[int, messaging.Idle] = field(default_factory=dict)  # the last message of each
    lost: list[int] = field(default_factory=list)  # ranks of a pool that have ended
    lost_because: str = ""  # why all were lost at once, if it was that
    out_of_step: bool = False
    """Whether process groups cannot be used any longer: a rank was cut off in a collective, or all
    have begun different numbers of them, so that the next one would meet the wrong partner."""

    @property
    def is_complete(self) -> bool:
        """Whether every rank has returned, in time."""
        return not self.timed_out and all(member.returned is not None for member in self.members)

    @property
    def went_well(self) -> bool:
        """Whether every rank completed it, and none was stopped."""
        return not self.interrupted and self.is_complete

    @property
    def has_ended(self) -> bool:
        """Whether the functions came to their ends, and were not stopped where a step had ended."""
        return not any(m.returned is not None and m.returned.was_stopped for m in self.members)

    @property
    def shown(self) -> dict[int, Any]:
        """What the task gives the user to see, by rank."""
        return {rank: answer.shown for rank, answer in self.idle.items()}

    @property
    def in_groups(self) -> set[bool]:
        """Whether ranks are in a process group: one answer, or both."""
        return {idle.whereabouts.group != "" for idle in self.idle.values()}

    @property
    def counts_differ(self) -> bool:
        """Whether ranks have begun different numbers of collectives."""
        # By name, because not all ranks need be in a group: absent ranks are no difference.
        counts: dict[str, set[int]] = {}
        for idle in self.idle.values():
            for name, count in idle.sequence:
                counts.setdefault(name, set()).add(count)
        return len(self.in_groups) > 1 or any(len(numbers) > 1 for numbers in counts.values())


class WatchedGroup(Protocol):
    """What this needs to know of a `Group`, which is above it."""

    plan: Plan
    stays: bool
    members: list[WorkerHandle]
    oom_kills: int

    def collect(self) -> Sequence[tuple[WorkerHandle, messaging.Ended]]:
        """Workers that have ended since the last call."""


class Supervisor:
    """Watches the workers of a group during one call."""

    def __init__(
        self,
        group: WatchedGroup,
        ranks: Iterable[int],
        tasks: RankTasks,
        *,
        task_number: int,
        console: Console,
        timeout_s: float | None = None,
        make_show: Callable[[], Dashboard] | None = None,
    ) -> None:
        self.members = list(group.members)
        self.console = console
        self._group = group
        self._ranks = set(ranks)
        self._tasks = tasks
        self._number = task_number
        self._make_show = make_show
        self._show: Dashboard | None = None
        # Not epoll: a call is short, and each registering there is a system call.
        self._selector = selectors.PollSelector()
        self._paused: dict[int, WorkerHandle] = {}  # pipes not read now: the worker waits
        self._began = time.monotonic()
        self._deadline = None if timeout_s is None else self._began + timeout_s
        self._policy = shutdown.KEEP_WORKERS if group.stays else shutdown.END_WORKERS
        self._resting = tuple(m.rank for m in self.members if m.rank not in self._ranks)
        lets_exit = not group.stays
        self._watch = RankWatch(self.participants(), lets_exit=lets_exit, resting=self._resting)
        self._ladder: shutdown.ShutdownLadder | None = None
        self._agreement: shutdown.StepAgreement | None = None
        self._joining: set[int] = set()  # ranks that join a process group for the others
        self._group_wanted: messaging.GroupWanted | None = None
        self.result = CallResult(console=console)
        for member in self.members:
            member.begin_call(takes_part=member.rank in self._ranks)

    @property
    def seconds(self) -> float:
        """How long it has taken so far."""
        return time.monotonic() - self._began

    @property
    def open(self) -> frozenset[int]:
        """Ranks that have not finished yet."""
        return frozenset(member.rank for member in self.participants() if member.is_busy)

    def participants(self) -> list[WorkerHandle]:
        """Workers that have the task, and those that were lost meanwhile."""
        return [member for member in self.members if member.rank in self._ranks]

    def at_work(self) -> list[WorkerHandle]:
        """Workers that are in the task, or join a group for those that are."""
        ranks = self.open | self._joining
        return [member for member in self.members if member.rank in ranks and not member.has_ended]

    def doing(self, rank: int) -> str:
        """What a rank does that seems to wait; empty for one that is at work."""
        return self._watch.doing(rank)

    # ---- watching

    def run(self) -> CallResult:
        """Send the tasks, and wait until the call is over."""
        result = self.result
        try:
            self._listen()
        finally:
            result.members = tuple(self.participants())
            if self._show is not None:
                show, self._show = self._show, None
                # The front end must not be left with an unfinished display.
                with processes.uninterrupted():
                    show.end(self, self._ending())
                result.observed = show.board
        was_cut = self._watch.has_cut or (self._ladder is not None and self._ladder.has_cut)
        is_of_all = len(self._ranks) == len(self.members)
        result.out_of_step = was_cut or (is_of_all and result.counts_differ)
        return result

    def _ending(self) -> str:
        if self.result.interrupted:
            return "stopped"
        if self.result.timed_out:
            return "timed out"
        return "failed" if any(member.returned is None for member in self.result.members) else ""

    def _listen(self) -> None:
        # In the order in which they are left: interrupts are caught to the end.
        with _waking_pipe() as wake_pipe, contextlib.closing(self._selector):
            self._send_tasks()
            self._register_all(wake_pipe)
            while not self._is_over() and self._do_what_is_due():
                self._receive(self._patience())
            # What living workers print later belongs to no call.
            living = [member for member in self.members if not member.has_ended]
            for member in living:
                self.drain_output(member)
            for member in living:
                self.console.close(member.rank)
            # Interrupts are handled meanwhile.
            while self.console.is_behind:
                self._receive(self.console.due_in())
        self.console.show_last(has_summary=self._show is not None and self._show.has_progress)

    def _send_tasks(self) -> None:
        """Send the tasks: the workers are at work while the rest is made ready to hear them."""
        # Ranks mostly have the very same task, which is pickled once.
        packed: dict[int, tuple[bytes, list[int]]] = {}
        with contextlib.ExitStack() as sent:
            for member in (member for member in self.members if member.rank in self._tasks):
                body, fds = self._tasks[member.rank]
                if id(body) not in packed:
                    task = messaging.Task(number=self._number, body=body, resting=self._resting)
                    packed[id(body)] = messaging.pack_message(task)
                    sent.enter_context(memfd.closing_files(*packed[id(body)][1]))
                packet, files = packed[id(body)]
                # The worker may have ended meanwhile; its sentinel says so.
                with contextlib.suppress(OSError):
                    member.channel.send_packet(packet, [*fds, *files])
        if self._make_show is not None:
            self._show = self._make_show()

    def _register_all(self, wake_pipe: int) -> None:
        register = self._selector.register
        register(wake_pipe, selectors.EVENT_READ, wake_pipe)
        for member in self.members:
            if member.has_ended:
                continue
            register(member.sentinel, selectors.EVENT_READ, None)
            if not member.hung_up:
                register(member.channel, selectors.EVENT_READ, member)
            for pipe in member.pipes:
                register(pipe, selectors.EVENT_READ, member)
        if self._show is not None:
            # The display may have a Stop button, which has an effect from here on.
            self._show.poll(self)

    def _is_over(self) -> bool:
        if self.result.lost or not self._group.stays:
            return all(member.has_ended for member in self.members)
        # Under the ladder, joining ranks are interrupted too: their Idle is still to come.
        return not (self.open or (self._ladder is not None and self._joining))

    def _give_up(self, *, failed: bool = False, first: shutdown.ShutdownSteps = ()) -> None:
        steps = (*first, *(self._policy.on_failure if failed else self._policy.on_stop))
        if failed and engine_row(self._group.plan.engine).runs_on_hosts:
            records = [member.record for member in self.members if member.record is not None]
            # Ranks have only lost their connections: Ray may tell why.
            if all(record.is_consequence for record in records):
                steps = ((shutdown.ShutdownStep.WAIT, time_limits.HOST_S), *steps)
        self._start_ladder(shutdown.ShutdownLadder(self.at_work(), steps))

    def _start_ladder(self, ladder: shutdown.ShutdownLadder) -> None:
        # Output must not delay that.
        self.console.end_is_near()
        self._resume()
        self._ladder = ladder

    def _do_what_is_due(self) -> bool:
        """Returns False where a worker is left that cannot even be killed."""
        if self._ladder is None:
            self._check_clocks()
        # Again, because a clock may just have started the ladder.
        if self._ladder is None:
            return True
        self._ladder.advance()
        if self._ladder.is_over and not self._group.stays:
            # Nobody is at work any more: those that have handed over may exit.
            self._watch_exits()
            return True
        return self._ladder.due() is not None

    def _check_clocks(self) -> None:
        now = time.monotonic()
        # First: a worker that hangs in its fork would otherwise be reported as a timeout.
        latest = now - time_limits.FIRST_MESSAGE_S
        self.result.stuck = [m for m in self._unborn() if m.forked_at <= latest]
        if self.result.stuck:
            self._give_up()
        elif self._deadline is not None and now >= self._deadline:
            self.result.timed_out = True
            self._give_up()
        else:
            self._watch_exits()

    def _watch_exits(self) -> None:
        if text := self._watch.advance():
            self.console.notice(text)
        if self._watch.is_overdue():
            self._end_leftover()

    def _end_leftover(self) -> None:
        living = [member for member in self.members if not member.has_ended]
        self._start_ladder(shutdown.ShutdownLadder(living, shutdown.OVERDUE))

    def _unborn(self) -> list[WorkerHandle]:
        """Workers that have sent nothing yet."""
        return [member for member in self.members if member.state is HandleState.FORKED]

    def _patience(self) -> float | None:
        """Seconds until something is due; None if only workers can make it go on."""
        if self._ladder is None:
            alarms = [self._deadline, self._watch.due()]
            alarms += [m.forked_at + time_limits.FIRST_MESSAGE_S for m in self._unborn()]
        elif self._ladder.is_over:
            alarms = [self._watch.due()]
        else:
            alarms = [self._ladder.due()]
        now = time.monotonic()
        waits = [max(0.0, alarm - now) for alarm in alarms if alarm is not None]
        if (console_wait := self.console.due_in()) is not None:
            waits.append(console_wait)
        return min(waits, default=None)

    # ---- listening

    def _receive(self, patience_s: float | None) -> None:
        """Wait until something happens, at most so long, and let it be decided."""
        if self._show is not None:
            due_s = self._show.due_in()
            patience_s = due_s if patience_s is None else min(patience_s, due_s)
        has_ended = False
        for key, _ in self._selector.select(patience_s):
            member = key.data
            if member is None:
                has_ended = True
            elif not isinstance(member, WorkerHandle):
                # All of it: several presses of Stop within one wait are one interrupt.
                os.read(member, 4096)
                # A stopped template (SIGSTOP) would not report the ends of its workers.
                for process in template.running():
                    process.let_continue()
                self._on_interrupt()
            elif key.fileobj is member.channel:
                if not member.hung_up:
                    self._receive_message(member)
            # A message earlier in this batch may have let its pipes be read to their end.
            elif key.fd in self._selector.get_map():
                self._read_output(member, key.fd)
        if has_ended:
            self._on_sentinel()
        self.console.tick()
        self._resume()
        if self._show is not None:
            self._show.poll(self)

    def drain_output(self, member: WorkerHandle) -> None:
        """Read all that the worker has printed so far."""
        for pipe in tuple(member.pipes):
            # A thread may print for ever: read no more than a pipe can have held at the start.
            for _ in range(_PIPE_BYTES // _READ_BYTES):
                if not self._read_output(member, pipe):
                    break

    def _receive_message(self, member: WorkerHandle) -> None:
        try:
            message, fds = member.channel.receive()
        except EOFError:
            self._hang_up(member)
            return
        match message:
            case messaging.Display() | messaging.ClearOutput():
                # What it printed before the display must be shown before it; it waits until then.
                with memfd.closing_files(*fds):
                    self.drain_output(member)
                    self.console.feed_display(member.rank, message)
            case Metrics() if self._show is not None:
                self._show.board.receive(member.rank, message)
            case messaging.Leaves():
                message.note_in(member.leftovers)
            case _:
                self._on_message(member, message, fds)

    def _on_message(self, member: WorkerHandle, message: Any, fds: list[int]) -> None:
        match message:
            case messaging.Word.ALIVE:
                member.state = HandleState.ALIVE
            case messaging.Word.STARTED:
                member.state = HandleState.RUNNING
            case messaging.Returned():
                member.take(fds)
                member.returned = message
                self._on_handed_over(member)
            case messaging.Failed():
                self._on_failure(member, message, fds)
                self._on_handed_over(member)
            case messaging.Word.INTERRUPTING if self._ladder is not None:
                self._ladder.unwinds(member)
            case messaging.AtStep() if self._agreement is not None:
                self._agreement.answered(member.rank, message.number)
                if self._ladder is not None:
                    self._ladder.answers_step(self._agreement.wait_s)
            case messaging.Whereabouts():
                member.whereabouts = message
                if self._ladder is not None:
                    self._ladder.answered(member)
            case messaging.Idle():
                self._on_idle(member, message)
            case messaging.GroupWanted():
                self._on_group_wanted(message)

    def _read_output(self, member: WorkerHandle, pipe: int) -> bool:
        """Take in a chunk of output; returns whether there may be more."""
        try:
            content = os.read(pipe, _READ_BYTES)
        except BlockingIOError:
            return False
        stream = member.pipes[pipe]
        # End of file: every process that held the writing end has closed it.
        if not content:
            self._forget(pipe)
            del member.pipes[pipe]
            os.close(pipe)
        elif stream == "stack":
            member.stack_text += content.decode(errors="replace")
        else:
            self.console.feed(member.rank, stream, content)
            if pipe not in self._paused and self.console.is_full(member.rank):
                self._forget(pipe)
                # Unread, the pipe fills up and the worker waits: memory here stays bounded.
                self._paused[pipe] = member
        return len(content) == _READ_BYTES

    def _resume(self) -> None:
        for pipe, member in tuple(self._paused.items()):
            if not self.console.is_full(member.rank):
                del self._paused[pipe]
                self._selector.register(pipe, selectors.EVENT_READ, member)

    def _forget(self, pipe: int) -> None:
        if self._paused.pop(pipe, None) is None:
            self._selector.unregister(pipe)

    def _hang_up(self, member: WorkerHandle) -> None:
        if not member.hung_up:
            member.hung_up = True
            self._selector.unregister(member.channel)

    # ---- messages

    def _on_failure(self, member: WorkerHandle, message: messaging.Failed, fds: list[int]) -> None:
        if member.rank not in self.open:
            # Outside the task, such as in a join.
            memfd.close_all(fds)
            return
        record = message.record
        # Compared by the time of the failure: one from before the stop is a failure of its own.
        if member.is_stopped and self._ladder is not None and record.time > self._ladder.began:
            # Its stack may still be in the pipe, and the record needs it.
            self.drain_output(member)
            record = member.record_of_stop()
        member.take(fds)
        member.failed = message
        member.record = record
        if self._ladder is None:
            self._give_up(failed=True)

    def _on_handed_over(self, member: WorkerHandle) -> None:
        """A launch's worker has nothing to do any more; a pool's says so by `Idle`."""
        if self._agreement is not None and not (member.returned and member.returned.was_stopped):
            self._agreement.call_off()
        if self._group.stays:
            return
        member.finish_call()
        self._watch.note_return()
        if self._ladder is not None:
            self._ladder.finished(member)

    def _on_idle(self, member: WorkerHandle, message: messaging.Idle) -> None:
        rank = member.rank
        member.whereabouts = message.whereabouts
        if message.number == self._number:
            member.finish_call()
            self.drain_output(member)
            self.console.close(rank)
            self.result.idle[rank] = message
            # A rank that has finished must join too, or the others would wait until the timeout.
            if self._group_wanted is not None and self.open:
                self._ask_to_join(member, self._group_wanted)
        else:
            self._joining.discard(rank)
        # After a loss a finished worker is ended too, so it stays on the ladder.
        if self._ladder is not None and not member.is_busy and not self.result.lost:
            self._ladder.finished(member)

    def _on_group_wanted(self, wanted: messaging.GroupWanted) -> None:
        if self._group_wanted is None or wanted.ordinal > self._group_wanted.ordinal:
            self._group_wanted = wanted
            for idle in [m for m in self.members if not (m.is_busy or m.has_ended)]:
                self._ask_to_join(idle, wanted)

    def _ask_to_join(self, member: WorkerHandle, wanted: messaging.GroupWanted) -> None:
        self._joining.add(member.rank)
        task = messaging.PoolTask("join_group", {"wanted": wanted})
        member.tell(messaging.Task(number=0, body=task))

    # ---- interrupts and exits

    def _on_interrupt(self) -> None:
        if self._ladder is not None:
            # Stop was pressed twice, or while a failure is handled, which is still reported.
            if self._ladder.is_over:
                self._end_leftover()
            self._ladder.hurry()
            return
        self.result.interrupted = True
        wait_s = self._seconds_to_end_of_step()
        if wait_s:
            self._agreement = shutdown.StepAgreement(self.at_work(), wait_s)
        self._give_up(first=((shutdown.ShutdownStep.FINISH_STEP, wait_s),) if wait_s else ())

    def _seconds_to_end_of_step(self) -> float:
        """How long the step under way may take; 0 where no weights come home, or nothing trains."""
        config = self._group.plan.config
        is_kept = config.share_back and config.on_stop == "keep" and config.num_nodes == 1
        bodies = [body for body, _ in self._tasks.values()]
        has_models = any(isinstance(body, messaging.Job) and body.arenas for body in bodies)
        if not (is_kept and has_models and self._show is not None):
            return 0.0
        now = time.monotonic()
        waits = []
        for facts in self._show.board.ranks.values():
            steps_s = time_limits.STEPS / (facts.pace.overall or float("inf"))
            wait_s = min(max(time_limits.STEP_S, steps_s), time_limits.MOST_STEP_S)
            if facts.told.steps and facts.told.time >= now - wait_s:
                waits.append(wait_s)
        return max(waits, default=0.0)

    def _on_sentinel(self) -> None:
        for member, ended in self._group.collect():
            # Before the end is noted: its last messages say whether it had returned.
            while not member.hung_up and messaging.wait([member.channel.fileno()]):
                self._receive_message(member)
            self._hang_up(member)
            # Not to their end: a grandchild may hold the pipes open for ever.
            self.drain_output(member)
            for pipe in member.pipes:
                self._forget(pipe)
            self._selector.unregister(member.sentinel)
            self.console.close(member.rank)
            if self._ladder is not None:
                self._ladder.finished(member)
            if self._group.stays:
                self._on_loss(member, ended)
            else:
                self._on_exit(member, ended)

    def _on_exit(self, member: WorkerHandle, ended: messaging.Ended) -> None:
        """A launch's worker is gone: a failure, unless it had finished or was stopped."""
        if not member.is_busy or member.is_stopped:
            member.end()
            return
        member.end(member.record_of_death(ended, self._group.oom_kills))
        if self._ladder is None:
            self._give_up(failed=True)

    def _on_loss(self, member: WorkerHandle, ended: messaging.Ended) -> None:
        """A pool's worker is lost: ask the others where they are, then end them."""
        record = member.record or member.record_of_stop()
        if not member.is_stopped:
            record = member.record_of_death(ended, self._group.oom_kills)
        # Even a finished rank loses its result: without its worker the task has failed.
        member.end(record)
        member.returned = None
        self._ranks.add(member.rank)
        self.result.lost.append(member.rank)
        self.result.lost_because = self.result.lost_because or ended.because
        # Only for the first: workers that end afterwards were killed by this ladder.
        if len(self.result.lost) == 1:
            others = [m for m in self.members if not m.has_ended]
            for other in others:
                # An answer of up to a second ago would be taken for the place of the failure.
                other.whereabouts = None
            self._start_ladder(shutdown.ShutdownLadder(others, shutdown.AFTER_LOSS))


@contextlib.contextmanager
def _waking_pipe() -> Iterator[int]:
    """Let an interrupt of the notebook wake `select` instead of raising in the middle."""
    woken, waking = os.pipe()
    os.set_blocking(woken, False)
    # A signal handler must never wait, not even for a full pipe.
    os.set_blocking(waking, False)
    # Only the main thread may set signal handlers.
    is_main_thread = threading.current_thread() is threading.main_thread()
    handler_before = None
    if is_main_thread:
        handler_before = signal.signal(signal.SIGINT, lambda *_: os.write(waking, b"i"))
        # It came between two tasks, and this one may wait for a worker that does not answer.
        if processes.take_held_interrupt(handler_before):
            os.write(waking, b"i")
    try:
        yield woken
    finally:
        if is_main_thread:
            signal.signal(signal.SIGINT, handler_before)
        os.close(woken)
        os.close(waking)


LOOK_S = 5.0
_LOOKS = 2  # for so many a rank waits before it is told of
_IDLE_SHARE = 0.03  # of the time: the threads of libraries use a little even while a rank waits
_CONNECTING_FUNCTIONS = {"init_process_group", "new_group", CREATES_GROUP, "init_device_mesh"}


class RankWatch:
    """Asks the ranks of one call where they are, and lets those go that others wait for in vain.

    Now and then it looks for ranks that have done next to nothing since. If there are some, all are
    asked where they are; a panel shows it. One that waits in the same collective for long, and in
    another one than the others, is told of once. A rank that has finished will never come to it: a
    launch's may exit, and a pool's cuts its connections, so that those that wait for it fail.
    """

    def __init__(
        self, members: Sequence[WorkerHandle], *, lets_exit: bool, resting: Sequence[int] = ()
    ) -> None:
        self.has_cut = False  # if so, the process groups are unusable
        self._members = members
        self._resting = resting  # ranks that have no part in it
        self._lets_exit = lets_exit
        self._looked_at = time.monotonic()
        self._look_at = self._looked_at + LOOK_S
        self._answers_at: float | None = None  # when those that were asked must have answered
        self._overdue_at: float | None = None  # when those that may exit must have
        self._released: set[int] = set()
        self._cpu_s: dict[int, float] = {}
        self._idle_ranks: frozenset[int] = frozenset()  # they had done next to nothing lately
        self._doing: dict[int, tuple[RankActivity, float]] = {}  # of idle ranks; since which answer
        self._told_waits: set[tuple[int, RankActivity]] = set()

    def note_return(self) -> None:
        """A launch's worker has returned, and may exit soon."""
        self._look_at = min(self._look_at, time.monotonic() + time_limits.EXIT_RECHECK_S)

    def doing(self, rank: int) -> str:
        """`waiting in barrier (Cell In[2], line 4)`; empty for one that is at work."""
        return str(self._doing[rank][0]) if rank in self._doing else ""

    def due(self) -> float | None:
        """When `advance` has something to do (CLOCK_MONOTONIC); None if there is nothing to do."""
        if self._lets_exit and not self._busy():
            # No rank is at work any more: those that wait may exit at once.
            return 0.0 if self._waiting() else self._overdue_at
        return self._look_at if self._answers_at is None else self._answers_at

    def is_overdue(self) -> bool:
        """Whether workers that have handed over all they had, and do not exit, must be ended."""
        # One stopped by a signal, or stuck in its clean-up, must not keep the notebook waiting.
        is_late = self._overdue_at is not None and time.monotonic() >= self._overdue_at
        return is_late and not self._busy() and not self._waiting()

    def advance(self) -> str:
        """Do what is due. Returns a notice for the user; empty for none."""
        now = time.monotonic()
        due_at = self.due()
        if due_at is None or now < due_at:
            return ""
        busy = self._busy()
        if self._lets_exit and not busy:
            self._release(now)
            return ""
        if self._answers_at is not None:
            self._answers_at = None
            # A rank that sets up a group may still need the connections of one that has returned.
            if self._lets_exit and not any(map(_sets_up, busy)):
                self._release(now)
            activities = {m.rank: RankActivity.of_stack(m.stack) for m in _running(busy)}
            for member in busy:
                _forget_answer(member)
            return self._judge(activities, now)
        may_exit = self._lets_exit and bool(self._waiting())
        self._idle_ranks = self._find_idle(_running(busy), now - self._looked_at)
        self._doing = {rank: self._doing[rank] for rank in self._idle_ranks & self._doing.keys()}
        self._looked_at = now
        self._look_at = now + (time_limits.EXIT_RECHECK_S if may_exit else LOOK_S)
        if self._idle_ranks or may_exit:
            self._answers_at = now + time_limits.ANSWER_S
            for member in busy:
                # Or the old dump would be taken for the answer.
                _forget_answer(member)
                member.ask_where()
        return ""

    def _busy(self) -> list[WorkerHandle]:
        return [member for member in self._members if member.is_busy]

    def _waiting(self) -> list[WorkerHandle]:
        """Workers that have handed over what they had, and may not exit yet."""
        return [
            member
            for member in self._members
            if member.state in (HandleState.RETURNED, HandleState.FAILED)
            and member.rank not in self._released
        ]

    def _release(self, now: float) -> None:
        for member in self._waiting():
            self._released.add(member.rank)
            if not self._lets_exit:
                self.has_cut = True
                member.tell(messaging.Word.BREAK)
                continue
            # Of the last one. A worker gives up what takes longer than `EXIT_S`, and says so.
            self._overdue_at = now + time_limits.EXIT_S + time_limits.UNWIND_S
            member.let_exit()

    def _find_idle(self, running: Iterable[WorkerHandle], seconds: float) -> frozenset[int]:
        cpu_before = self._cpu_s
        uses = {member.rank: member.starter.use_of(member.pid) for member in running}
        self._cpu_s = {rank: use.cpu_s for rank, use in uses.items() if use is not None}
        return frozenset(
            rank
            for rank, cpu_s in self._cpu_s.items()
            if rank in cpu_before and cpu_s - cpu_before[rank] < _IDLE_SHARE * seconds
        )

    def _judge(self, activities: dict[int, RankActivity], now: float) -> str:
        idle = {rank: one for rank, one in activities.items() if rank in self._idle_ranks}
        before = self._doing
        self._doing = {
            rank: before[rank] if rank in before and before[rank][0] == one else (one, now)
            for rank, one in idle.items()
        }
        lasting = {
            (rank, one)
            for rank, (one, since) in self._doing.items()
            # It had done nothing at the first of these answers, for the time since the look before.
            if one.collective and now - since > (_LOOKS - 0.1) * LOOK_S
        }
        calls = {(activity.collective, activity.is_comparing) for activity in activities.values()}
        num_ranks = len(self._members) + len(self._resting)
        have_all_come = len(calls) == 1 and len(activities) == num_ranks
        if not lasting or have_all_come:
            return ""
        # Each time: a rank may finish long after the wait for it was told of.
        if not self._lets_exit and not any(map(_sets_up, self._busy())):
            self._release(now)
        if lasting & self._told_waits:
            return ""
        self._told_waits = lasting
        waiting_ranks = ", ".join(str(rank) for rank in sorted(rank for rank, _ in lasting))
        lines = [
            f"nbaccel: not all ranks have come to a collective, where rank {waiting_ranks} waited "
            f"for more than {format_seconds(_LOOKS * LOOK_S)}:"
        ]
        for member in self._members:
            state_words = "starting" if member.is_busy else "has finished"
            lines.append(f"  rank {member.rank}: {activities.get(member.rank) or state_words}")
        lines += [f"  rank {rank}: has not been given this cell or call" for rank in self._resting]
        lines.append(
            "All ranks must call it, equally often and with equal shapes. Look for an `if` or a "
            "`break` that only some of them take, or for a rank that is merely slow. "
            f"{CHECK_VARIABLE}=always compares every call of nbaccel's collectives."
        )
        return "\n".join(lines)


def _running(members: Iterable[WorkerHandle]) -> list[WorkerHandle]:
    return [member for member in members if member.state is HandleState.RUNNING]


def _sets_up(member: WorkerHandle) -> bool:
    """Whether it sets up a process group, or itself."""
    return member.state is not HandleState.RUNNING or any(
        frame.function in _CONNECTING_FUNCTIONS for frame in member.stack
    )


def _forget_answer(member: WorkerHandle) -> None:
    # What is written at a crash belongs to the report of the death.
    if not member.has_crashed:
        member.stack_text = ""
