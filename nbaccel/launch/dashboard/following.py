"""Keeps a dashboard up to date while workers are listened to."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from nbaccel.launch import publish
from nbaccel.launch.dashboard.board import RankStatus
from nbaccel.launch.dashboard.shown import Dashboard
from nbaccel.launch.dashboard.weighing import Scales, resident
from nbaccel.launch.dashboard.whereabouts import Whereabouts
from nbaccel.launch.member import Member, State
from nbaccel.launch.wire import Metrics

__all__ = ["Following", "Watched"]

_WORDS = {
    State.BORN: "starting",
    State.ALIVE: "starting",
    State.RUNNING: "running",
}


class Watched(Protocol):
    """What a listener lets be seen of itself."""

    members: list[Member]

    @property
    def clears(self) -> int:
        """How often the cell has been cleared."""

    def last_lines(self) -> dict[int, str]:
        """What each rank printed last."""

    def notice(self, text: str) -> None:
        """Show lines after what has been printed so far."""

    def make_room(self) -> None:
        """Take away what is drawn over, before something else is shown."""

    def interrupt(self) -> None:
        """Do what interrupting the cell does; from any thread."""


class Following:
    """The dashboard of a launch.

    Args:
        ranks: The ranks that are shown.
        device: What the workers compute on.
        always: Whether lines are shown even where nobody seems to watch them appear.
    """

    def __init__(self, ranks: Sequence[int], *, device: str, always: bool = False) -> None:
        is_wanted = always or publish.has_cells() or publish.is_watched()
        self._dashboard = Dashboard(
            ranks,
            stop=self._interrupt,
            say=self._say,
            make_room=self._make_room,
            is_wanted=is_wanted,
        )
        self._ranks = frozenset(ranks)
        self._scales = Scales(uses_gpus=device == "cuda")
        self._watched: Watched | None = None
        self._clears = 0
        self._whereabouts = Whereabouts()
        self._is_wanted = is_wanted

    def due_in(self) -> float:
        """Seconds until `look` has something to do."""
        return self._dashboard.due_in()

    def hear(self, rank: int, message: Metrics) -> None:
        """A rank has told of its training."""
        self._dashboard.hear(rank, message)

    def look(self, watched: Watched) -> None:
        """Show what is due. Cheap to call often.

        Args:
            watched: Who listens to the workers.
        """
        self._watched = watched
        if watched.clears != self._clears:
            self._clears = watched.clears
            self._dashboard.cleared()
        if self._dashboard.wants_a_look:
            self._dashboard.update(self._rows(watched))
            self.looked(watched)
        else:
            self._dashboard.refresh()

    def _rows(self, watched: Watched) -> list[RankStatus]:
        members = [m for m in watched.members if m.rank in self._ranks]
        lines = watched.last_lines()
        on_gpus = self._scales.on_gpus([m.pid for m in members if not m.has_ended])
        return [
            self.row(watched, m, last_line=lines.get(m.rank, ""), device_bytes=on_gpus.get(m.pid))
            for m in members
        ]

    def row(
        self, watched: Watched, member: Member, *, last_line: str, device_bytes: int | None
    ) -> RankStatus:
        """One rank, as it is now.

        Args:
            watched: Who listens to it.
            member: The worker.
            last_line: What it printed last.
            device_bytes: What the driver says that it holds on GPUs.
        """
        return RankStatus(
            rank=member.rank,
            state=state_of(member),
            seconds=time.monotonic() - member.born,
            rss_bytes=0 if member.has_ended else resident(member.pid),
            device_bytes=device_bytes,
            doing=self._whereabouts.doing(member.rank) if state_of(member) == "running" else "",
            last_line=last_line,
        )

    def looked(self, watched: Watched) -> None:
        """Ask ranks that seem to wait where they are, for the next time."""
        if self._is_wanted:
            self._whereabouts.look(watched.members)

    def end(self, watched: Watched, **how: bool) -> None:
        """Leave the summary, and let go of everything.

        Args:
            watched: Who listened to the workers.
            **how: As `Dashboard.finish` has it.
        """
        try:
            self._dashboard.finish(self._rows(watched), **how)
        finally:
            self._watched = None
            self._scales.close()

    def _say(self, text: str) -> None:
        if self._watched is not None:
            self._watched.notice(text)

    def _make_room(self) -> None:
        if self._watched is not None:
            self._watched.make_room()

    def _interrupt(self) -> None:
        watched = self._watched
        if watched is not None:
            watched.interrupt()


def state_of(member: Member) -> str:
    """A launch's worker in a word."""
    if member.is_busy and member.told:
        return "stopping"
    if member.is_busy:
        return _WORDS[member.state]
    if member.returned is not None:
        return "done"
    return "stopped" if member.record is None else "failed"
