"""Watching the workers of one launch until all have ended: what is heard, and what it means.

The loop itself, one `select` over everything, is `listening`'s.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from nbaccel.launch import system, wire
from nbaccel.launch.console import Console
from nbaccel.launch.dashboard.following import Following
from nbaccel.launch.ending import GRACE_S, Ending
from nbaccel.launch.lingering import Lingering
from nbaccel.launch.listening import Listener, death_of
from nbaccel.launch.member import Member, State
from nbaccel.launch.starter import Starter

_BORN_S = 20.0  # a forked process that says nothing for so long hangs


class Supervisor(Listener):
    """Watches the workers of one launch.

    Args:
        starter: Who started them, and learns of their end.
        members: The workers of this node, by rank.
        console: Where their output goes.
        timeout_s: Seconds after which the launch is ended; None for no limit.
        following: Shows how the launch goes on; None for nobody.
    """

    def __init__(
        self,
        starter: Starter,
        members: Sequence[Member],
        *,
        console: Console,
        timeout_s: float | None,
        following: Following | None = None,
    ) -> None:
        super().__init__(members, console, following)
        self._following = following
        self._starter = starter
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._ending: Ending | None = None
        self._oom_kills = system.oom_kills()
        self._lingering = Lingering(self.members)
        self.closing = "The notebook's model is as it was before the launch."
        self.interrupted = False
        self.timed_out = False
        self.stuck: list[Member] = []
        """Workers that never said a word."""

    def run(self) -> None:
        """Wait until every worker has ended; what became of them stands in `members`."""
        try:
            self._watch()
        finally:
            if self._following is not None:
                with system.uninterrupted():  # a front end must not be left with half of it
                    self._following.end(
                        self,
                        failed=any(m.returned is None for m in self.members),
                        interrupted=self.interrupted,
                        timed_out=self.timed_out,
                    )

    def _watch(self) -> None:
        with self.listening(self._starter.sentinels()):
            self.on_sentinel()  # one may have died while the others were started
            while not all(m.has_ended for m in self.members):
                if self._given_up():
                    break
                self.hear(self._patience())
                self._check_clocks()
            self.show_rest()
        self._console.tick(final=True)

    # ---- waiting

    def _patience(self) -> float | None:
        now = time.monotonic()
        due = [self._console.due_in()]
        if self._ending is not None:
            at = self._ending.advance(self.members)
            due.append(None if at is None else max(0.0, at - now))
        else:
            due += [max(0.0, at - now) for at in self._alarms()]
        return min((d for d in due if d is not None), default=None)

    def _alarms(self) -> Iterator[float]:
        if self._deadline is not None:
            yield self._deadline
        yield from (m.born + _BORN_S for m in self.members if m.state is State.BORN)
        for at in (self._lingering.due(), self._lingering.overdue()):
            if at is not None:
                yield at

    def _check_clocks(self) -> None:
        now = time.monotonic()
        if self._ending is not None:
            return
        silent = [m for m in self.members if m.state is State.BORN and now > m.born + _BORN_S]
        if silent:
            self.stuck = silent
            self._end(grace_s=0.0)
        elif self._deadline is not None and now > self._deadline:
            self.timed_out = True
            self._end(grace_s=0.0)
        elif (at := self._lingering.overdue()) is not None and now >= at:
            self._end(grace_s=0.0)
        elif notice := self._lingering.advance():
            self._console.notice(notice)

    def _given_up(self) -> bool:
        """Whether the last worker cannot be killed: it hangs in a driver."""
        return self._ending is not None and self._ending.advance(self.members) is None

    # ---- what can happen

    def on_message(self, member: Member, message: Any, fds: list[int]) -> None:
        """A worker has said how far it is."""
        if isinstance(message, wire.Alive):
            member.state = State.ALIVE
            member.tells_its_stack = True
        elif isinstance(message, wire.Started):
            member.state = State.RUNNING
        elif isinstance(message, wire.Interrupting):
            if self._ending is not None:
                self._ending.extend(member)
        elif isinstance(message, wire.Returned):
            member.state, member.returned = State.RETURNED, message
            member.result_fd = fds[0] if fds else None
        elif isinstance(message, wire.Failed):
            self._on_failure(member, message, fds)

    def _on_failure(self, member: Member, message: wire.Failed, fds: list[int]) -> None:
        member.state = State.FAILED
        member.error = (message, fds[0] if fds else None)
        if not member.told:
            member.record = message.record
        if self._ending is None:
            self._end(grace_s=GRACE_S)

    def on_interrupt(self) -> None:
        """The user has pressed Stop."""
        if self._ending is not None:
            # Stop was pressed twice, or while a failure is wound up: that one is still to be told.
            self._ending.hurry()
            return
        self.interrupted = True
        self.end_is_near()
        self._ending = Ending(self.members, grace_s=0.0)

    def on_sentinel(self) -> None:
        """Workers may have ended."""
        by_pid = {m.pid: m for m in self.members}
        for ended in self._starter.collect():
            if ended.pid in by_pid:
                self._on_end(by_pid[ended.pid], ended)

    def _on_end(self, member: Member, ended: wire.Ended) -> None:
        self.drain(member)
        finished = member.state in (State.RETURNED, State.FAILED)
        member.state = State.GONE
        self._console.close(member.rank)
        if finished or member.told:
            return
        member.record = death_of(member, ended, self._oom_kills)
        if self._ending is None:
            self._end(grace_s=GRACE_S)

    # ---- ending

    def _end(self, *, grace_s: float) -> None:
        self.end_is_near()
        self._ending = Ending(self.members, grace_s=grace_s)
