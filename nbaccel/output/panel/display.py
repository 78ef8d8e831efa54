"""The panel of a run in its place: an output of the cell that is changed, or lines in a terminal.

    0 s   nothing, or an empty place at the top: a short launch leaves no trace
    1 s   the panel as HTML, renewed once a second
    end   the summary takes the same place

A terminal cannot change what it has shown, so there lines are added now and then.

[Note: who handles a click] A cell keeps the kernel's main thread busy, so that what the front end
sends to the kernel waits until the cell has finished. So the Stop button of the panel's script asks
the Jupyter server, as the button of the toolbar does, to interrupt the kernel.

    front end ── click ──► Jupyter server ── SIGINT ──► the kernel's main thread
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from nbaccel.base import env
from nbaccel.output import publish
from nbaccel.output.cell_place import CellPlace
from nbaccel.output.panel import earlier_runs, reopened_pages
from nbaccel.output.panel.facts import RankStatus, RunBoard
from nbaccel.output.panel.live_html import live_html
from nbaccel.output.panel.run_notes import NoteFile
from nbaccel.output.panel.words import live_text
from nbaccel.output.report.report_parts import finished_line, summary_html
from nbaccel.output.report.run_facts import facts_of

if TYPE_CHECKING:
    from nbaccel.base.training_metrics import Metrics
    from nbaccel.plan import Plan


FIRST_S = 1.0
REDRAW_INTERVAL_S = 1.0
_OPEN_CHARTS = 3  # enough to compare two runs of a cell with a third
_IN_A_TERMINAL_S = (1.0, 5.0, 15.0, 60.0)


class Dashboard:
    """Shows what ranks do while they run, and a summary afterwards."""

    def __init__(
        self,
        ranks: Sequence[int],
        *,
        plan: Plan,
        title: str = "",
        place: CellPlace | None = None,
        is_wanted: bool = True,
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
        self._line_times = _less_and_less()
        self._next_line = next(self._line_times)

    def due_in(self) -> float:
        """Seconds until `update` shows something."""
        return max(0.0, self._next - self._clock())

    @property
    def is_due(self) -> bool:
        """Whether it is time to look at the ranks, and to `update`."""
        return self._clock() >= self._next

    @property
    def has_progress(self) -> bool:
        """Whether a loop had a bar: it is nowhere else, however short the loop was."""
        return any(facts.has_bar for facts in self.board.ranks.values())

    def receive(self, rank: int, message: Metrics) -> None:
        """Take in what a rank has reported of its training."""
        self.board.receive(rank, message)

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
        if self._place.is_there:
            self._draw()
        else:
            self._add_line()
        self.was_shown = True

    def _add_line(self) -> None:
        if self.board.seconds < self._next_line:
            return
        # Several times that have passed since the last look make one line.
        while self._next_line <= self.board.seconds:
            self._next_line = next(self._line_times)
        self._say_lines(live_text(self.board))

    def _draw(self) -> None:
        place = self._place
        is_main_thread = threading.current_thread() is threading.main_thread()
        # Only the main thread is interrupted.
        panel_html = live_html(self.board, is_stoppable=is_main_thread)
        # A widget that stands there gets HTML only, and cannot be renewed by its page.
        if not place.is_widget:
            reopened_pages.note_run(place.display_id)
            panel_html = reopened_pages.followed_html(panel_html, place.display_id)
        place.show({"text/plain": live_text(self.board), "text/html": panel_html})

    def finish(self, rows: Sequence[RankStatus] = (), *, ending: str = "") -> None:
        """Leave the summary, if there has been anything to see."""
        if self._note is not None:
            self._note.remove()
        board = self.board
        board.now = self._clock()
        board.see(rows)
        board.ending = ending
        earlier_runs.note_run(board)
        if self._is_wanted and (self.was_shown or self.has_progress):
            self._show_summary()
        elif self._place.is_there:
            # What was waited for may still be there.
            self._place.show({})

    def _show_summary(self) -> None:
        facts = facts_of(self.board, self._plan)
        line = finished_line(facts)
        if self._place.is_there:
            summary = {"text/plain": line, "text/html": summary_html(self.board, facts)}
            self._place.show(summary)
            reopened_pages.note_end(self._place.display_id, summary)
            folded_html = summary_html(self.board, facts, folds_chart=True)
            _fold_earlier(self._place, {"text/plain": line, "text/html": folded_html})
        elif self.was_shown:
            self._say_lines(line)

    def _say_lines(self, text: str) -> None:
        self._say("\n".join(f"nbaccel: {line}" for line in text.split("\n")))

    def _say(self, text: str) -> None:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


class _ShownSummary(NamedTuple):
    """A summary whose chart is in sight."""

    request_id: str
    place: CellPlace
    folded_data: dict[str, Any]


_SHOWN_SUMMARIES: list[_ShownSummary] = []


def _fold_earlier(place: CellPlace, data: dict[str, Any]) -> None:
    """Fold the charts of earlier runs of this cell: of a loop of launches they fill screens."""
    newest = _ShownSummary(publish.request_id(), place, data)
    of_this_cell = [one for one in _SHOWN_SUMMARIES if one.request_id == newest.request_id]
    _SHOWN_SUMMARIES[:] = [*of_this_cell, newest]
    while len(_SHOWN_SUMMARIES) > _OPEN_CHARTS:
        earliest = _SHOWN_SUMMARIES.pop(0)
        earliest.place.show(earliest.folded_data)


def _less_and_less() -> Iterator[float]:
    yield from _IN_A_TERMINAL_S
    last_seconds = _IN_A_TERMINAL_S[-1]
    yield from (last_seconds * 2**position for position in itertools.count(1))
