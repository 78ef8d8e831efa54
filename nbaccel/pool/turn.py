"""One turn of a pool: a task for some of its workers, watched until each is idle again.

A turn ends in one of four ways: all ranks are through; a rank raised, and the others have given the
task up; the user has stopped it; a worker was lost, and with it the pool.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from nbaccel.launch import failure, wire
from nbaccel.launch.console import Console
from nbaccel.launch.dashboard.following import Following
from nbaccel.launch.listening import Listener, death_of
from nbaccel.launch.member import Member, State
from nbaccel.launch.reaping import end_group
from nbaccel.launch.sharing import memory
from nbaccel.pool import messages
from nbaccel.pool.halting import GRACE_S, Halting, tell

__all__ = ["Account", "Turn"]

_BORN_S = 20.0  # a forked process that says nothing for so long hangs
_KILL_S = 5.0
_LOOK_S = 0.1  # at a death the others are asked where they are; none is waited for longer


class Account:
    """What became of a turn. It is what `launch.verdict` judges by.

    Args:
        members: The workers that had the task, by rank.
        console: What they printed.
    """

    def __init__(self, members: Sequence[Member], console: Console) -> None:
        self.members = list(members)
        self._console = console
        self.interrupted = False
        self.timed_out = False
        self.stuck: list[Member] = []
        self.closing = ""
        self.remark = ""
        """What is known beyond the workers' own ends."""
        self.shown: dict[int, Any] = {}
        self.idle: dict[int, messages.Idle] = {}
        self.places: dict[int, messages.Whereabouts] = {}
        """Where ranks were last seen."""
        self.lost: list[int] = []
        """Ranks that have ended."""
        self.staged: dict[int, messages.Staged] = {}
        """What ranks have written into staging files."""
        self._whole: dict[str, int] = {}
        self.was_cut = False
        self.is_whole = False
        """Whether all workers of the pool had the task."""

    @property
    def went_well(self) -> bool:
        """Whether every rank did the task to its end."""
        return not self.interrupted and all(m.returned is not None for m in self.members)

    def add_staged(self, rank: int, message: messages.Staged, fds: Sequence[int]) -> None:
        """A rank has written its weights; the descriptors are this account's from now on."""
        self.staged[rank] = message
        self._whole |= zip(message.whole, fds, strict=True)

    def whole_files(self) -> dict[str, int]:
        """Descriptors of the ranks' own files that hold whole arenas, by key of the arena."""
        return dict(self._whole)

    def take_files(self) -> list[int]:
        """The same descriptors; they are the caller's to close."""
        fds = list(self._whole.values())
        self._whole.clear()
        return fds

    @property
    def out_of_step(self) -> bool:
        """Whether process groups are of no more use.

        A rank was cut off in one of their collectives, or their ranks have begun different numbers
        of them: the next one would meet the wrong partner.
        """
        counts: dict[str, set[int]] = {}
        for name, count in (entry for idle in self.idle.values() for entry in idle.sequence):
            counts.setdefault(name, set()).add(count)  # of a group that not all ranks are in, some
        in_groups = {idle.in_groups for idle in self.idle.values()}
        differ = len(in_groups) > 1 or any(len(found) > 1 for found in counts.values())
        return self.was_cut or (self.is_whole and differ)

    def tails(self) -> dict[int, list[str]]:
        """The last lines that each rank printed."""
        return self._console.tails()


class Turn(Listener):
    """Watches one turn.

    Args:
        crew: All workers of the pool, by rank.
        active: Ranks that have the task.
        number: The turn's number, which the ranks' Idle repeats.
        console: Where output goes.
        collect: Tells of workers that have ended; see `launch.starter.Starter`.
        oom_kills: How often the system had run out of memory when the workers were started.
        timeout_s: Seconds after which the turn is ended; None for no limit.
        following: Shows how the ranks get on; None for nobody.
    """

    def __init__(
        self,
        crew: Sequence[Member],
        active: Iterable[int],
        *,
        number: int,
        console: Console,
        collect: Callable[[], Sequence[wire.Ended]],
        oom_kills: int,
        timeout_s: float | None = None,
        following: Following | None = None,
    ) -> None:
        super().__init__(crew, console, following)
        ranks = set(active)
        self._open = {m.rank for m in crew if m.rank in ranks and not m.has_ended}
        self.account = Account([m for m in crew if m.rank in ranks], console)
        self.account.is_whole = len(ranks) == len(crew)
        self._number = number
        self._joining: set[int] = set()
        self._collect = collect
        self._halting: Halting | None = None
        self._doomed_at: float | None = None
        self._ended_all = False
        self._group_wanted: messages.GroupWanted | None = None
        self._began = time.monotonic()
        self._deadline = None if timeout_s is None else self._began + timeout_s
        self._following = following
        self._oom_kills = oom_kills
        for member in self.account.members:
            _reset(member)

    @property
    def seconds(self) -> float:
        """How long it has taken so far."""
        return time.monotonic() - self._began

    @property
    def open(self) -> frozenset[int]:
        """Ranks that are not through yet."""
        return frozenset(self._open)

    def run(self, sentinels: Mapping[int, int], begin: Callable[[], None]) -> Account:
        """Wait until every rank is through, or lost.

        Args:
            sentinels: Rank → descriptor that becomes readable when that worker has ended.
            begin: Gives out the tasks. From then on an interrupt is the workers' business.
        """
        try:
            self._watch(sentinels, begin)
        finally:
            if self._following is not None:
                self._following.end(self, **self._how_it_ended())
        if self._halting is not None:
            self.account.was_cut = self._halting.was_cut
        return self.account

    def _how_it_ended(self) -> dict[str, bool]:
        account = self.account
        return {
            "failed": any(m.returned is None for m in account.members),
            "interrupted": account.interrupted,
            "timed_out": account.timed_out,
        }

    def _watch(self, sentinels: Mapping[int, int], begin: Callable[[], None]) -> None:
        with self.listening(list(sentinels.values())):
            begin()
            while self._unfinished():
                if not self._advance():
                    break
                self.hear(self._patience())
            for member in self.members:
                if not member.has_ended:
                    self.drain_output(member)
                    self._console.close(member.rank)
            self.show_rest()
        self._console.tick(final=True)

    def _unfinished(self) -> bool:
        if self._doomed_at is not None:
            return any(not m.has_ended for m in self.members)
        return bool(self._open or (self._halting is not None and self._joining))

    # ---- clocks

    def _patience(self) -> float:
        now = time.monotonic()
        due = [at - now for at in self._alarms()]
        waiting = self._console.due_in()
        return max(0.0, min([*due, 60.0 if waiting is None else waiting]))

    def _alarms(self) -> Iterator[float]:
        if self._halting is not None and (at := self._halting.advance()) is not None:
            yield at
        if self._doomed_at is not None:
            yield self._doomed_at
        if self._deadline is not None and self._halting is None:
            yield self._deadline
        yield from (m.born + _BORN_S for m in self.members if m.state is State.BORN)

    def _advance(self) -> bool:
        """Do what is due; returns False where a worker cannot even be killed."""
        now = time.monotonic()
        if self._doomed_at is not None and now >= self._doomed_at:
            if self._ended_all:
                return False
            self._ended_all, self._doomed_at = True, now + _KILL_S
            for member in self.members:
                if not member.has_ended:
                    member.told = True
                    end_group(member.pid)
        silent = [m for m in self.members if m.state is State.BORN and now > m.born + _BORN_S]
        if silent and not self.account.stuck:
            self.account.stuck = silent
            self._doom(now)
        if self._deadline is not None and now >= self._deadline and self._halting is None:
            self.account.timed_out = True
            self._halt(grace_s=0.0)
        if self._halting is None or self._doomed_at is not None:
            return True
        return self._halting.advance() is not None

    # ---- what can happen

    def on_message(self, member: Member, message: Any, fds: list[int]) -> None:
        """A worker has said something."""
        rank = member.rank
        if isinstance(message, messages.Idle):
            self._on_idle(member, message)
        elif isinstance(message, wire.Returned):
            member.returned = message
            member.result_fd = fds[0] if fds else None
        elif isinstance(message, wire.Failed):
            self._on_failure(member, message, fds)
        elif isinstance(message, messages.Staged):
            self.account.add_staged(rank, message, fds)
        elif isinstance(message, messages.Whereabouts):
            self.account.places[rank] = message
            if self._halting is not None:
                self._halting.seen(rank)
            if all(m.has_ended or m.rank in self.account.places for m in self.members):
                self._doomed_at = self._doomed_at and 0.0  # nobody is left to be asked
        elif isinstance(message, wire.Interrupting):
            if self._halting is not None:
                self._halting.unwinding(rank)
        elif isinstance(message, messages.GroupWanted):
            self._on_group_wanted(message)
        elif isinstance(message, wire.Alive):
            member.state, member.tells_its_stack = State.ALIVE, True

    def _on_idle(self, member: Member, message: messages.Idle) -> None:
        rank = member.rank
        if message.number != self._number:
            self._joining.discard(rank)
            if self._halting is not None and rank not in self._open:
                self._halting.over(rank)
            return
        member.state, member.since = State.RETURNED, time.monotonic()
        self._open.discard(rank)
        self.drain_output(member)
        self._console.close(rank)
        self.account.idle[rank] = message
        self.account.shown[rank] = message.shown
        if member.error is None and member.returned is None:
            member.returned = wire.Returned(time.monotonic(), None, None, None)
        if self._halting is not None:
            self._halting.over(rank)
        if self._group_wanted is not None and self._open:
            self._ask_to_join(member)

    def _on_failure(self, member: Member, message: wire.Failed, fds: list[int]) -> None:
        if member.rank not in self._open:  # nobody waits for what it did
            memory.close_all(fds)
            return
        member.error = (message, fds[0] if fds else None)
        halted = member.told and self._halting is not None and message.time > self._halting.began
        member.record = self._stopped(member) if halted else message.record
        if self._halting is None:
            self._halt(grace_s=GRACE_S)

    def _on_group_wanted(self, message: messages.GroupWanted) -> None:
        if self._group_wanted is None or message.ordinal > self._group_wanted.ordinal:
            self._group_wanted = message
            for member in self.members:
                if member.rank not in self._open and not member.has_ended:
                    self._ask_to_join(member)

    def _ask_to_join(self, member: Member) -> None:
        wanted = self._group_wanted
        if wanted is not None:
            self._joining.add(member.rank)
            with contextlib.suppress(OSError):  # it has gone: its sentinel will tell
                member.channel.send(messages.Task(number=0, body=messages.JoinGroup(wanted=wanted)))

    def on_interrupt(self) -> None:
        """The user has pressed Stop; a second time, he means it."""
        if self._halting is not None:
            self._halting.hurry()
            return
        self.account.interrupted = True
        self._halt(grace_s=0.0)

    def on_sentinel(self) -> None:
        """A worker may have ended."""
        by_pid = {m.pid: m for m in self.members}
        for ended in self._collect():
            if ended.pid in by_pid:
                self._on_death(by_pid[ended.pid], ended)

    def _on_death(self, member: Member, ended: wire.Ended) -> None:
        self.drain(member)
        member.state = State.GONE
        self._open.discard(member.rank)
        self._console.close(member.rank)
        if self._halting is not None:
            self._halting.over(member.rank)
        self.account.lost.append(member.rank)
        if member not in self.account.members:
            self.account.members.append(member)
        member.returned = None  # whatever it did: it cannot go on
        if member.told:
            member.record = member.record or self._stopped(member)
        else:
            member.record = death_of(member, ended, self._oom_kills)
        if self._doomed_at is None:
            self._doom(time.monotonic())

    # ---- giving up

    def _halt(self, *, grace_s: float) -> None:
        self.end_is_near()
        left = [m for m in self.members if m.rank in self._open | self._joining]
        self._halting = Halting(left, grace_s=grace_s, at_once=grace_s > 0)

    def _doom(self, now: float) -> None:
        """A worker is lost: ask the others where they are, then end them."""
        self.end_is_near()
        self.account.places.clear()  # of a second ago
        for member in self.members:
            if not member.has_ended:
                tell(member, messages.Look())
        self._doomed_at = now + _LOOK_S

    def _stopped(self, member: Member) -> failure.Record:
        """A rank that did nothing wrong and was asked to give up."""
        place = self.account.places.get(member.rank)
        stack = place.stack if place else member.stack()
        doing = failure.doing(stack) if stack else "running"
        return failure.Record(
            rank=member.rank,
            time=float("inf"),
            doing=f"was {doing} when nbaccel stopped it",
            stack=stack,
        )


def _reset(member: Member) -> None:
    """A new turn: what is known of the last one is of no more interest."""
    for fd in (member.result_fd, member.error[1] if member.error else None):
        if fd is not None:
            os.close(fd)
    member.result_fd = member.error = member.returned = member.record = None
    member.told = False
    member.since = time.monotonic()
    if member.state is not State.BORN and not member.has_ended:
        member.state = State.RUNNING
