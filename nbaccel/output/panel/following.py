"""Keeps a dashboard up to date while workers are listened to.

The memory of workers is looked up from outside by process id, on other hosts by the actor there;
ranks that do nothing are asked where they wait.

A rank that has used no processor time for some seconds is asked for its stack, as it is when a
launch is ended (faulthandler writes it, without running Python code of the worker). A rank that
computes is never disturbed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from nbaccel.output import publish
from nbaccel.output.cell_place import CellPlace, WaitingLine
from nbaccel.output.console import Console
from nbaccel.output.panel.display import Dashboard
from nbaccel.output.panel.facts import RankStatus, RunBoard
from nbaccel.plan import Plan, registry
from nbaccel.plan.contracts.device import Device
from nbaccel.plan.inventory import Inventory
from nbaccel.workers.failure import RankActivity
from nbaccel.workers.messaging import Metrics
from nbaccel.workers.resource_use import ProcessUse
from nbaccel.workers.worker_handle import HandleState, WorkerHandle

__all__ = ["DashboardUpdater", "MemoryMeter", "WaitingRanks", "WatchedCall", "resident"]


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

    def notice(self, text: str) -> None:
        """Show lines after what has been printed so far."""

    def interrupt(self) -> None:
        """Do what interrupting the cell does; from any thread."""


class DashboardUpdater:
    """The dashboard of a launch."""

    def __init__(
        self,
        ranks: Sequence[int],
        *,
        plan: Plan,
        place: CellPlace | None = None,
        always_shown: bool = False,
        waiting_line: WaitingLine | None = None,
    ) -> None:
        is_wanted = always_shown or publish.has_cells() or publish.is_watched()
        self._dashboard = Dashboard(
            ranks,
            plan=plan,
            stop=self._interrupt,
            say=self._say,
            place=place,
            is_wanted=is_wanted,
        )
        self._ranks = frozenset(ranks)
        self._plan = plan
        self._scales: MemoryMeter | None = None
        self._watched: WatchedCall | None = None
        self._whereabouts = WaitingRanks()
        self._is_wanted = is_wanted
        self._waiting_line = waiting_line

    @property
    def board(self) -> RunBoard:
        """What is known of the launch."""
        return self._dashboard.board

    def due_in(self) -> float:
        """Seconds until `look` has something to do."""
        waiting_s = float("inf") if self._waiting_line is None else self._waiting_line.due_in()
        return min(self._dashboard.due_in(), waiting_s)

    def receive(self, rank: int, message: Metrics) -> None:
        """A rank has reported metrics of its training."""
        self._dashboard.receive(rank, message)

    def poll(self, call: WatchedCall) -> None:
        """Show what is due. Cheap to call often."""
        self._watched = call
        self._tell_of_start(call)
        if self._dashboard.is_due:
            self._dashboard.update(self._rows(call))
            self.ask_ranks(call)
        else:
            self._dashboard.refresh()

    def _tell_of_start(self, call: WatchedCall) -> None:
        """Say that workers are being set up, until they run or the dashboard shows it."""
        if self._waiting_line is None:
            return
        is_starting = any(member.state in _STARTING for member in call.members)
        if is_starting and not self._dashboard.is_due:
            self._waiting_line.say("setting them up")
        else:
            self._waiting_line.close(is_replaced=True)
            self._waiting_line = None

    def _rows(self, call: WatchedCall) -> list[RankStatus]:
        # A pool's workers that do not have the task are not shown.
        members = [member for member in call.members if member.rank in self._ranks]
        console = call.console
        board = self._dashboard.board
        board.library_messages = console.library_messages.lines()
        board.num_library_messages = console.library_messages.count
        board.recent_lines = console.recent_lines.by_rank()
        board.num_lines = console.recent_lines.num_shown
        last_lines = console.last_lines()
        bars = console.bars()
        if self._scales is None:
            # Not before: nearly all cells end before there is anything to show.
            device = registry.device(self._plan.device)
            self._scales = MemoryMeter(device)
            _note_totals(board, device, self._plan.inventory)
        on_gpus = self._scales.on_gpus([member.pid for member in members if not member.has_ended])
        return [
            replace(
                self.row(
                    call,
                    member,
                    last_line=last_lines.get(member.rank, ""),
                    device_bytes=on_gpus.get(member.pid),
                ),
                bars=bars.get(member.rank, ()),
            )
            for member in members
        ]

    def row(
        self,
        call: WatchedCall,
        member: WorkerHandle,
        *,
        last_line: str,
        device_bytes: int | None,
    ) -> RankStatus:
        """One rank, as it is now."""
        return RankStatus(
            rank=member.rank,
            state=state_of(member),
            seconds=time.monotonic() - member.forked_at,
            # After its end the number may belong to another process.
            rss_bytes=resident(member),
            device_bytes=device_bytes,
            doing=self._whereabouts.doing(member.rank) if state_of(member) == "running" else "",
            last_line=last_line,
        )

    def ask_ranks(self, call: WatchedCall) -> None:
        """Ask ranks that seem to wait where they are, for the next time."""
        if self._is_wanted:
            self._whereabouts.poll(call.members)

    def end(self, call: WatchedCall, **ending_words: bool) -> None:
        """Leave the summary, and release everything."""
        try:
            # Nearly all cells end well before anything is shown: nothing is to be looked up then.
            is_wanted = (
                self._dashboard.was_shown
                or self._dashboard.has_progress
                or call.console.has_bars
                or any(ending_words.values())
            )
            self.board.warnings = call.console.warnings
            rows = self._rows(call) if is_wanted else ()
            self._dashboard.finish(rows, **ending_words)
        finally:
            self._watched = None
            if self._scales is not None:
                self._scales.close()

    def _say(self, text: str) -> None:
        if self._watched is not None:
            self._watched.notice(text)

    def _interrupt(self) -> None:
        call = self._watched
        if call is not None:
            call.interrupt()


def state_of(member: WorkerHandle) -> str:
    """A launch's worker in a word."""
    if member.is_busy and member.is_stopped:
        return "stopping"
    if member.is_busy:
        return _STATE_WORDS[member.state]
    if member.returned is not None:
        return "done"
    return "stopped" if member.record is None or member.record.was_stopped else "failed"


def _note_totals(board: RunBoard, device: Device, inventory: Inventory) -> None:
    """Note how much memory there is, on the host and on each rank's device."""
    board.host_total_bytes = inventory.host_total_bytes or None
    units = device.units(inventory)
    for rank, facts in board.ranks.items():
        if units:
            # Workers beyond the number of devices share them in turn.
            facts.memory.device_total = units[rank % len(units)].total_bytes or None


class MemoryMeter:
    """Measures the device memory of workers."""

    def __init__(self, memory_device: Device) -> None:
        self._device: Device | None = memory_device
        self._meter: Any = None

    def on_gpus(self, process_ids: Sequence[int]) -> dict[int, int]:
        """Process id → bytes on devices, of those of these processes that the driver knows.

        In a container it may know them by other numbers; then a worker's own report is used.
        """
        if self._device is None:
            return {}
        self._meter = self._meter or self._device.driver_meter()
        if self._meter is None:
            # Not asked again: a device without a meter will not get one.
            self._device = None
            return {}
        held_bytes: dict[int, int] = self._meter.read()
        return {
            process_id: held_bytes[process_id]
            for process_id in process_ids
            if process_id in held_bytes
        }

    def close(self) -> None:
        """Release the driver."""
        if self._meter is not None:
            self._meter.close()
            self._meter = None


def resident(member: WorkerHandle) -> int:
    """Bytes that a worker has in its machine's memory; 0 for one that has gone."""
    use = None if member.has_ended else member.starter.use_of(member.pid)
    return use.rss_bytes if use is not None else 0


_IDLE_S = 3.0  # without processor time, before it counts as waiting
_AGAIN_S = 5.0  # before it is asked again
_BUSY_SHARE = 0.2  # of the time: threads of gloo and others use a little even while it waits


@dataclass(slots=True)
class _MemberSight:
    """What was seen of one rank."""

    use: ProcessUse
    at: float
    idle_since: float | None = None
    asked_at: float = float("-inf")
    is_asked: bool = False
    doing: str = ""


class WaitingRanks:
    """Knows where ranks wait. One per launch."""

    def __init__(self) -> None:
        self._sights: dict[int, _MemberSight] = {}

    def doing(self, rank: int) -> str:
        """`waiting in barrier (Cell In[2], line 4)`; empty for one that is at work."""
        sight = self._sights.get(rank)
        return sight.doing if sight is not None else ""

    def poll(self, members: Iterable[WorkerHandle]) -> None:
        """Read what was answered, and ask those that do nothing; called about once a second."""
        current_time = time.monotonic()
        for member in members:
            use = member.starter.use_of(member.pid) if _can_be_asked(member) else None
            if use is None:
                self._sights.pop(member.rank, None)
                continue
            sight = self._sights.get(member.rank)
            if sight is None:
                self._sights[member.rank] = _MemberSight(use, current_time)
            # Else another host has not answered since, and nothing is known of this second.
            elif use is not sight.use:
                self._ask_rank(sight, member, use, current_time)

    def _ask_rank(
        self, sight: _MemberSight, member: WorkerHandle, use: ProcessUse, current_time: float
    ) -> None:
        if sight.is_asked:
            sight.is_asked = False
            # The answer to an earlier question, which has arrived with the output since.
            sight.doing = _take_answer(member) or sight.doing
        used_s = use.cpu_s - sight.use.cpu_s
        is_working = used_s > _BUSY_SHARE * (current_time - sight.at)
        sight.use = use
        sight.at = current_time
        if is_working:
            sight.idle_since = None
            sight.doing = ""
        elif sight.idle_since is None:
            sight.idle_since = current_time
        elif (
            current_time - sight.idle_since >= _IDLE_S and current_time - sight.asked_at >= _AGAIN_S
        ):
            sight.asked_at = current_time
            sight.is_asked = True
            member.ask_stack()


def _can_be_asked(member: WorkerHandle) -> bool:
    return member.state is HandleState.RUNNING and member.tells_its_stack and not member.is_stopped


def _take_answer(member: WorkerHandle) -> str:
    """What it was doing; nothing after a crash, whose dump belongs to the report of its death."""
    if not member.stack_text or member.has_crashed:
        return ""
    text = member.stack
    member.stack_text = ""
    return str(RankActivity.of_stack(text)) if text else ""
