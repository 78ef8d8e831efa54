"""Keeps a dashboard up to date while workers are listened to.

The memory of workers is looked up from outside by process id, on other hosts by the actor there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from nbaccel.output import publish
from nbaccel.output.cell_place import CellPlace, WaitingLine
from nbaccel.output.console import Console
from nbaccel.output.panel.display import Dashboard
from nbaccel.output.panel.facts import RankStatus
from nbaccel.plan import Plan, registry
from nbaccel.plan.contracts.device import Device
from nbaccel.workers.worker_handle import HandleState, WorkerHandle

_STATE_WORDS = {
    HandleState.FORKED: "starting",
    HandleState.ALIVE: "starting",
    HandleState.RUNNING: "running",
}

_STARTING = frozenset({HandleState.FORKED, HandleState.ALIVE})


class WatchedCall(Protocol):
    """The part of a listener that a dashboard uses."""

    members: list[WorkerHandle]

    @property
    def console(self) -> Console:
        """What shows the output."""

    def doing(self, rank: int) -> str:
        """What a rank does that seems to wait; empty for one that is at work."""


class DashboardUpdater(Dashboard):
    """The dashboard of a launch: it looks at the workers itself."""

    def __init__(
        self,
        ranks: Sequence[int],
        *,
        plan: Plan,
        place: CellPlace | None = None,
        always_shown: bool = False,
        waiting_line: WaitingLine | None = None,
        title: str = "",
    ) -> None:
        is_wanted = always_shown or publish.has_cells() or publish.is_watched()
        super().__init__(ranks, plan=plan, title=title, place=place, is_wanted=is_wanted)
        self._ranks = frozenset(ranks)
        self._device: Device | None = None
        self._meter: Any = None
        """What measures device memory; None where nothing can."""
        self._watched: WatchedCall | None = None
        self._waiting_line = waiting_line

    def due_in(self) -> float:
        """Seconds until `poll` has something to do."""
        waiting_s = float("inf") if self._waiting_line is None else self._waiting_line.due_in()
        return min(super().due_in(), waiting_s)

    def poll(self, call: WatchedCall) -> None:
        """Show what is due. Cheap to call often."""
        self._watched = call
        self._tell_of_start(call)
        if self.is_due:
            self.update(self._rows(call))
            self.after_update(call)

    def _tell_of_start(self, call: WatchedCall) -> None:
        """Say that workers are being set up, until they run or the dashboard shows it."""
        if self._waiting_line is None:
            return
        is_starting = any(member.state in _STARTING for member in call.members)
        if is_starting and not self.is_due:
            self._waiting_line.say("setting them up")
        else:
            self._waiting_line.close(is_replaced=True)
            self._waiting_line = None

    def _note_totals(self) -> None:
        """Note how much memory there is, and what measures it."""
        self._device = registry.device(self._plan.device)
        self._meter = self._device.driver_meter()
        self.board.host_total_bytes = self._plan.inventory.host_total_bytes or None
        units = self._device.units(self._plan.inventory)
        for rank, facts in self.board.ranks.items() if units else ():
            # Workers beyond the number of devices share them in turn.
            facts.memory.device_total = units[rank % len(units)].total_bytes or None

    def _rows(self, call: WatchedCall) -> list[RankStatus]:
        if self._device is None:
            # Not before: nearly all cells end before there is anything to show.
            self._note_totals()
        console = call.console
        self.board.library_messages = console.library_messages
        rewritten = console.rewritten_lines()
        on_device: dict[int, int] = self._meter.read() if self._meter is not None else {}
        rows = []
        # A pool's workers that do not have the task are not shown.
        for member in filter(lambda member: member.rank in self._ranks, call.members):
            row = self.row(call, member)
            row = replace(row, rewritten_lines=rewritten.get(member.rank, ()))
            # After its end the number may belong to another process. In a container the driver may
            # know it by another one: then what the worker reports is used.
            if not member.has_ended and member.pid in on_device:
                row = replace(row, device_bytes=on_device[member.pid])
            rows.append(row)
        return rows

    def row(self, call: WatchedCall, member: WorkerHandle) -> RankStatus:
        """One rank, as it is now, but for lines that it draws in place."""
        state = state_of(member)
        return RankStatus(
            rank=member.rank,
            state=state,
            seconds=time.monotonic() - member.forked_at,
            rss_bytes=resident(member),
            doing=call.doing(member.rank) if state == "running" else "",
        )

    def after_update(self, call: WatchedCall) -> None:
        """The ranks are shown; a pool's are asked where they are, for the next time."""

    def end(self, call: WatchedCall, ending: str) -> None:
        """Leave the summary, and release everything."""
        try:
            # Nearly all cells end well before anything is shown: nothing is to be looked up then.
            is_seen = self.was_shown or self.has_progress or ending
            self.board.warnings = call.console.warnings
            self.finish(self._rows(call) if is_seen else (), ending=ending)
        finally:
            self._watched = None
            if self._meter is not None:
                self._meter.close()

    def _say(self, text: str) -> None:
        if self._watched is not None:
            self._watched.console.notice(text)


def state_of(member: WorkerHandle) -> str:
    """A launch's worker in a word."""
    if member.is_busy and member.is_stopped:
        return "stopping"
    if member.is_busy:
        return _STATE_WORDS[member.state]
    if member.returned is not None:
        return "done"
    return "stopped" if member.record is None or member.record.was_stopped else "failed"


def resident(member: WorkerHandle) -> int:
    """Bytes that a worker has in its machine's memory; 0 for one that has gone."""
    use = None if member.has_ended else member.starter.use_of(member.pid)
    return use.rss_bytes if use is not None else 0
