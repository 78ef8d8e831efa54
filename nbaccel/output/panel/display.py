"""The panel of a run in its place: an output of the cell that is changed, or lines in a terminal.

    0 s   nothing, or an empty place at the top: a short launch leaves no trace
    1 s   the panel as HTML, renewed once a second; in a terminal lines, now and then
    end   the summary takes the same place

A cell keeps the kernel's main thread busy, so that what the front end sends to the kernel waits
until the cell has finished. So the Stop button of the panel's script asks the Jupyter server, as
the button of the toolbar does, to interrupt the kernel.

[Note: pages that are reloaded, or opened again] A page that is loaded has of a running cell what
the file has. JupyterLab does not pass on what the kernel sends to that cell, and widgets of the
page before cannot be had from a kernel that is busy. So a panel is HTML, which always draws, and a
script in it asks the server for the kernel's messages (`panel_script.js`).

    panel in the file ── the script: kernel's messages ──► renewed once a second, with Stop
                     └── comm `nbaccel.run`, answered when the cell has ended ──► the summary
    not saved, or not trusted ── the next cell that is run ──► what has ended meanwhile
"""

from __future__ import annotations

import datetime as dt
import html
import importlib.resources
import json
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbaccel.base import env, frames
from nbaccel.output import publish
from nbaccel.output.panel.facts import ENDED_RUNS, RankStatus, RunBoard
from nbaccel.output.panel.live_html import live_html, live_text
from nbaccel.output.panel.run_notes import NoteFile
from nbaccel.output.publish import CellPlace, WaitingLine
from nbaccel.output.report import facts_of, finished_line, summary_html
from nbaccel.plan import Plan, registry
from nbaccel.plan.contracts.device import Device
from nbaccel.workers.failure import RankActivity

if TYPE_CHECKING:
    from nbaccel.workers.worker_processes import WorkerHandle


FIRST_S = 1.0
REDRAW_INTERVAL_S = 1.0
_LESS_AND_LESS = 3  # times as long until a terminal is told again


WatchedCall = Any
"""A call's `Supervisor`: its members, console, seconds, open ranks, who is at work and how."""


class Dashboard:
    """Shows what ranks do while they run, and a summary afterwards.

    At a call's workers it looks itself (`poll`, `end`), and asks a pool's where they are.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        *,
        plan: Plan,
        title: str = "",
        place: CellPlace | None = None,
        is_wanted: bool = True,
        of_pool: bool = False,
        waiting_line: WaitingLine | None = None,
        on_poll: Callable[[], None] | None = None,
        read_clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = read_clock
        self.board = RunBoard(ranks, began_at=read_clock(), plan=plan)
        self.board.title = title
        self.was_shown = False
        self._plan = plan
        self._note: NoteFile | None = None
        self._place = place or CellPlace()
        self._is_wanted = is_wanted and env.flag("NBACCEL_DASHBOARD") is not False
        self._next = self.board.began + FIRST_S
        self._next_line = FIRST_S
        self._of_pool = of_pool
        self._waiting_line = waiting_line
        self._on_poll = on_poll
        self._device: Device | None = None
        self._meter: Any = None  # what measures device memory; None where nothing can
        self._watched: WatchedCall | None = None

    def due_in(self) -> float:
        """Seconds until something is to be shown."""
        waiting_s = float("inf") if self._waiting_line is None else self._waiting_line.due_in()
        return min(max(0.0, self._next - self._clock()), waiting_s)

    @property
    def is_due(self) -> bool:
        """Whether it is time to look at the ranks, and to `update`."""
        return self._clock() >= self._next

    @property
    def has_progress(self) -> bool:
        """Whether a loop had a bar: it is nowhere else, however short the loop was."""
        return any(facts.has_bar for facts in self.board.ranks.values())

    def update(self, rows: Sequence[RankStatus]) -> None:
        """Show the ranks, if it is time."""
        now = self._clock()
        if now < self._next:
            return
        # Whole intervals are skipped: looks that were missed are not made up for.
        self._next += REDRAW_INTERVAL_S * (1 + (now - self._next) // REDRAW_INTERVAL_S)
        self.board.now = now
        self.board.see(rows)
        self._note = self._note or NoteFile(self.board.title)
        self._note.write(self.board)
        if not self._is_wanted:
            return
        place = self._place
        if place.is_there:
            is_main_thread = threading.current_thread() is threading.main_thread()
            # Only the main thread is interrupted.
            panel_html = live_html(self.board, is_stoppable=is_main_thread)
            note_run(place.display_id)
            panel_html = followed_html(panel_html, place.display_id)
            place.show({"text/plain": live_text(self.board), "text/html": panel_html})
        elif self.board.seconds >= self._next_line:
            # Several times that have passed since the last look make one line.
            while self._next_line <= self.board.seconds:
                self._next_line *= _LESS_AND_LESS
            self._say(textwrap.indent(live_text(self.board), "nbaccel: "))
        self.was_shown = True

    def finish(self, rows: Sequence[RankStatus] = (), *, ending: str = "") -> None:
        """Leave the summary, if there has been anything to see."""
        if self._note is not None:
            self._note.remove()
        board = self.board
        board.now = self._clock()
        board.see(rows)
        board.ending = ending
        ENDED_RUNS.append(board)
        if not self._is_wanted or not (self.was_shown or self.has_progress):
            if self._place.is_there:
                # What was waited for may still be there.
                self._place.show({})
            return
        facts = facts_of(board, self._plan)
        line = finished_line(facts)
        if self._place.is_there:
            summary = {"text/plain": line, "text/html": summary_html(board, facts)}
            self._place.show(summary)
            if run := _RUNS.get(self._place.display_id):
                run.summary = summary
        elif self.was_shown:
            self._say(f"nbaccel: {line}")

    def _say(self, text: str) -> None:
        if self._watched is not None:
            self._watched.console.notice(text)
            return
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()

    def poll(self, call: WatchedCall) -> None:
        """Show what is due. Cheap to call often."""
        self._watched = call
        if self._waiting_line is not None:
            if not self.is_due and "starting" in map(state_of, call.members):
                self._waiting_line.say("setting them up")
            else:
                self._waiting_line.close(is_replaced=True)
                self._waiting_line = None
        if self.is_due:
            self.update(self._rows(call))
            if self._on_poll is not None:
                self._on_poll()
            for member in call.at_work() if self._of_pool else ():
                if member.rank in call.open:
                    member.ask_where()  # for the next time

    def _rows(self, call: WatchedCall) -> list[RankStatus]:
        if self._device is None:
            # Not before: nearly all cells end before there is anything to show.
            self._device = registry.device(self._plan.device)
            self._meter = self._device.driver_meter()
            self.board.host_total_bytes = self._plan.inventory.host_total_bytes or None
            units = self._device.units(self._plan.inventory)
            for rank, facts in self.board.ranks.items() if units else ():
                # Workers beyond the number of devices share them in turn.
                facts.memory.device_total = units[rank % len(units)].total_bytes or None
        self.board.library_messages = call.console.library_messages
        rewritten = call.console.rewritten_lines()
        on_device: dict[int, int] = self._meter.read() if self._meter is not None else {}
        return [
            self._row(call, member, rewritten.get(member.rank, ()), on_device.get(member.pid))
            for member in call.members
            if member.rank in self.board.ranks  # others of a pool do not have the task
        ]

    def _row(
        self, call: WatchedCall, member: WorkerHandle, lines: tuple[str, ...], measured: int | None
    ) -> RankStatus:
        state = state_of(member)
        doing = call.doing(member.rank)
        place = member.whereabouts
        if self._of_pool:
            state = "gone" if member.has_ended else state
            doing = str(RankActivity.of_stack(place.stack)) if place and place.stack else ""
        # In a container the driver may know the process by another number.
        if measured is None and place is not None:
            measured = place.device_bytes
        return RankStatus(
            rank=member.rank,
            state=state,
            seconds=call.seconds,
            rss_bytes=resident(member),
            # After its end the number may belong to another process.
            device_bytes=None if member.has_ended else measured,
            doing=doing if member.is_busy else "",
            rewritten_lines=lines,
        )

    def end(self, call: WatchedCall, ending: str) -> None:
        """Leave the summary, and release everything."""
        try:
            # Nearly all cells end well before anything is shown: nothing is to be looked up then.
            is_seen = self.was_shown or self.has_progress or ending
            self.board.warnings = call.console.warnings
            self.finish(self._rows(call) if is_seen else (), ending=ending)
        finally:
            if self._meter is not None:
                self._meter.close()


def state_of(member: WorkerHandle) -> str:
    """A launch's worker in a word."""
    if member.is_busy and member.is_stopped:
        return "stopping"
    if member.is_busy:
        return "running" if member.state.name == "RUNNING" else "starting"
    if member.returned is not None:
        return "done"
    return "stopped" if member.record is None or member.record.was_stopped else "failed"


def resident(member: WorkerHandle) -> int:
    """Bytes that a worker has in its machine's memory; 0 for one that has gone."""
    use = None if member.has_ended else member.starter.use_of(member.pid)
    return use.rss_bytes if use is not None else 0


_COMM_TARGET = "nbaccel.run"
_MAX_KEPT = 50


@dataclass
class _ShownRun:
    """A run that has had a panel."""

    cell: str
    page: str  # the number of the page that ran the cell, which has another one once it is reloaded
    summary: dict[str, Any] | None = None  # as HTML and as text; None while it goes on
    is_told: bool = False  # whether the page that ran a cell after its end has been told


_RUNS: dict[str, _ShownRun] = {}  # by the id of its place, the oldest first


def note_run(place_id: str) -> None:
    """A run has its panel at a place in a cell."""
    shell: Any = frames.running_shell()
    if place_id in _RUNS or shell is None:
        return
    # Reloaded pages are answered, and it is seen who runs the next cells.
    manager = getattr(getattr(shell, "kernel", None), "comm_manager", None)
    if manager is not None and _COMM_TARGET not in manager.targets:
        manager.register_target(_COMM_TARGET, _answer)
        shell.events.register("pre_run_cell", _tell_what_has_ended)
    # IPython's own counter is one further in some versions.
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_stack(None))
    number = next(filter(None, map(frames.cell_number, files)), None)
    cell = "A cell" if number is None else f"In[{number}]"
    _RUNS[place_id] = _ShownRun(cell, publish.request_header("session"))
    for oldest in list(_RUNS)[:-_MAX_KEPT]:
        del _RUNS[oldest]


def followed_html(panel_html: str, place_id: str) -> str:
    """A panel with the script that gives it its button, and renews it where nothing else does."""
    # What the Jupyter server calls this kernel; empty where no server has started it.
    kernel = getattr(frames.running_shell(), "kernel", None)
    name = Path(getattr(getattr(kernel, "parent", None), "connection_file", "")).stem
    kernel_id = name.removeprefix("kernel-") if name.startswith("kernel-") else ""
    arguments = json.dumps([place_id, kernel_id])
    script = ""
    if kernel_id:
        source = importlib.resources.files("nbaccel.output.panel").joinpath("panel_script.js")
        script = f"<script>{source.read_text('utf-8').rstrip()}(...{arguments})</script>"
    seen = f"{dt.datetime.now().astimezone():%d %B, %H:%M:%S}"
    return (
        f'<div class="nbaccel-panel" data-place="{place_id}" data-seen="{seen}">'
        f"{panel_html}{script}</div>"
    )


def _answer(comm: Any, message: dict[str, Any]) -> None:
    """A reloaded page asks what has become of a run."""
    place_id = message["content"]["data"].get("place")
    run = _RUNS.get(place_id)
    if run is None or run.summary is None:
        comm.close()
        return
    # As it was shown at the end, which the script waits for, too. The comm stays open: pages are
    # told of its end, and complain of one that only the script knows.
    transient = {"display_id": place_id}
    publish.publish_display({"data": run.summary, "transient": transient, "update": True})


def _tell_what_has_ended(_info: object) -> None:
    """Show the summaries of runs that another page, or this one before it was reloaded, has run."""
    page = publish.request_header("session")
    ended = [run for run in _RUNS.values() if run.summary is not None and not run.is_told]
    for run in ended:
        run.is_told = True
        if page == run.page or run.summary is None:
            continue
        words = f"{run.cell} has ended since its page was closed or reloaded:"
        data = {
            "text/plain": f"{words} {run.summary['text/plain']}",
            "text/html": f"<div>{html.escape(words)}</div>{run.summary['text/html']}",
        }
        publish.publish_display({"data": data})
