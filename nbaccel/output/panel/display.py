"""A dashboard in its place: an output of the cell that is changed, or lines in a terminal.

Front ends whose clicks arrive while a cell runs get a panel with a Stop button.

    0 s   nothing, or an empty place at the top: a short launch leaves no trace
    1 s   the facts as HTML; where a click would arrive, widgets are made
    then  the panel with its Stop button takes the same place, if the front end is ready for it
    end   the summary as HTML takes the place; the widgets are gone

A terminal cannot change what it has shown, so there lines are added now and then.

[Note: who handles a click] A cell keeps the kernel's main thread busy, so that what the front end
sends waits until the cell has finished: a button would have no effect just when it is needed.
ipykernel 7 has subshells, threads beside the main one with their own messages, and JupyterLab 4.4
and Notebook 7.4 send the messages of widgets through one. A front end that supports them says so in
the header of each request; that it uses one for widgets is seen when it has made one. Both are
known before a button is shown.

    front end ── click, to its subshell ──► a thread of the kernel ──► `Listener.interrupt`
    main thread, in the listener's `select` ──► the wake pipe ──► `on_interrupt`
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbaccel.base import env
from nbaccel.output import publish
from nbaccel.output.cell_place import VIEW_MIME, CellPlace
from nbaccel.output.panel.facts import RankStatus, RunBoard
from nbaccel.output.panel.live_html import live_html
from nbaccel.output.panel.run_panel import RunPanel, may_take_clicks
from nbaccel.output.panel.words import live_text
from nbaccel.output.report.report_html import summary_html
from nbaccel.output.report.report_text import finished_line
from nbaccel.output.report.run_facts import facts_of
from nbaccel.output.report.run_report import note_latest

if TYPE_CHECKING:
    from nbaccel.plan import Plan
    from nbaccel.workers.messaging import Metrics

__all__ = ["Dashboard"]

FIRST_S = 1.0
REDRAW_INTERVAL_S = 1.0
NEWS_S = 0.25
_OPEN_CHARTS = 3  # enough to compare two runs of a cell with a third
_PANEL_S = 10.0
"""How long a front end is given to open a subshell for clicks."""
_IN_A_TERMINAL_S = (1.0, 5.0, 15.0, 60.0)


class Dashboard:
    """Shows what ranks do while they run, and a summary afterwards.

    Attributes:
        board: What is known of them.
        was_shown: Whether something has been shown, so that there will be a summary.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        *,
        plan: Plan,
        stop: Callable[[], None] | None = None,
        say: Callable[[str], None] | None = None,
        place: CellPlace | None = None,
        is_wanted: bool = True,
        read_clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = read_clock
        self.board = RunBoard(ranks, began_at=read_clock(), plan=plan)
        self.was_shown = False
        self._plan = plan
        self._say = say or _say
        self._place = place or CellPlace()
        # A widget that stands there cannot become a panel with a button of its own.
        self._stop = None if self._place.is_widget else stop
        self._is_wanted = is_wanted and env.flag("NBACCEL_DASHBOARD") is not False
        self._next = self.board.began + FIRST_S
        self._line_times = _less_and_less()
        self._next_line = next(self._line_times)
        self._panel: RunPanel | None = None
        self._shows_panel = False
        self._view_stands = False  # whether the panel is what stands in the place
        self._has_news = False
        self._drawn_at = 0.0
        self._clicked = False

    # ---- when

    def due_in(self) -> float:
        """Seconds until `update` or `refresh` shows something."""
        return max(0.0, min(self._next, self._news_due()) - self._clock())

    @property
    def is_due(self) -> bool:
        """Whether it is time to look at the ranks, and to `update`."""
        return self._clock() >= self._next

    @property
    def has_progress(self) -> bool:
        """Whether a loop had a bar: it is nowhere else, however short the loop was."""
        return any(facts.has_bar for facts in self.board.ranks.values())

    def _news_due(self) -> float:
        """Only a panel is updated early; an output that is replaced as a whole may flicker."""
        if not (self._has_news and self._shows_panel):
            return float("inf")
        return self._drawn_at + NEWS_S

    # ---- what is known

    def receive(self, rank: int, message: Metrics) -> None:
        """Take in what a rank has reported of its training."""
        self.board.receive(rank, message)
        self._has_news = True

    def update(self, rows: Sequence[RankStatus]) -> None:
        """Show the ranks, if it is time."""
        now = self._clock()
        if now < self._next:
            return
        # Whole intervals are skipped: looks that were missed are not made up for.
        self._next += REDRAW_INTERVAL_S * (1 + (now - self._next) // REDRAW_INTERVAL_S)
        self.board.now = now
        self.board.see(rows)
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
        self._say(_with_prefix(live_text(self.board)))

    def refresh(self) -> None:
        """Show what has been reported since the last look, if it is time."""
        now = self._clock()
        if now >= self._news_due():
            self.board.now = now
            self._draw()

    # ---- the place

    def _draw(self) -> None:
        self._has_news = False
        self._drawn_at = self._clock()
        self._watch_panel()
        if self._panel is not None and self._shows_panel:
            self._panel.show(self.board, is_stopping=self._clicked)
            if self._view_stands:
                return
            self._view_stands = True
        # Beside a panel, the HTML is for who cannot show widgets.
        self._show_in_place(live_html(self.board, by_hand=True), live_text(self.board))

    def _watch_panel(self) -> None:
        """Make the panel at first; show it once its button has an effect."""
        if self._stop is None or self._shows_panel:
            return
        if self._panel is None:
            if not self.was_shown and may_take_clicks():
                self._panel = self._new_panel()
        elif self._panel.takes_clicks:
            self._shows_panel = True
        # The front end has opened no subshell in time: a button would have no effect.
        elif self.board.seconds > FIRST_S + _PANEL_S:
            self._panel.close()
            self._panel = self._stop = None

    def _new_panel(self) -> RunPanel | None:
        try:
            return RunPanel(list(self.board.ranks), self._on_click, self._on_choice)
        except Exception:  # an unknown ipywidgets must not end the training
            return None

    def _on_click(self) -> None:
        self._clicked = self._has_news = True
        if self._stop is not None:
            self._stop()

    def _on_choice(self) -> None:
        self._has_news = True

    def _show_in_place(self, html: str, text: str) -> None:
        data = _as_data(html, text)
        if self._panel is not None and self._shows_panel:
            data[VIEW_MIME] = self._panel.view
        self._place.show(data)

    # ---- the end

    def finish(
        self,
        rows: Sequence[RankStatus] = (),
        *,
        has_failed: bool = False,
        was_interrupted: bool = False,
        timed_out: bool = False,
    ) -> None:
        """Leave the summary, if there has been anything to see."""
        # First: a click from here on must not interrupt what follows the call.
        panel = self._panel
        self._panel = None
        self._stop = None
        board = self.board
        board.now = self._clock()
        board.see(rows)
        if was_interrupted:
            board.ending = "stopped"
        elif timed_out:
            board.ending = "timed out"
        else:
            board.ending = "failed" if has_failed else ""
        note_latest(board)
        if self._is_wanted and (self.was_shown or self.has_progress):
            self._show_summary()
        elif self._place.is_there:
            # What was waited for may still be there.
            self._place.show({})
        if panel is not None:
            panel.close()

    def _show_summary(self) -> None:
        facts = facts_of(self.board, self._plan)
        line = finished_line(facts)
        if self._place.is_there:
            self._show_in_place(summary_html(self.board, facts), line)
            folded_html = summary_html(self.board, facts, folds_chart=True)
            _fold_earlier(self._place, _as_data(folded_html, line))
        elif self.was_shown:
            self._say(_with_prefix(line))


def _as_data(html: str, text: str) -> dict[str, Any]:
    return {"text/plain": text, "text/html": html}


@dataclass(frozen=True, slots=True)
class _ShownSummary:
    """A summary whose chart is in sight."""

    request_id: str
    place: CellPlace
    folded_data: dict[str, Any]


_SHOWN_SUMMARIES: list[_ShownSummary] = []


def _fold_earlier(place: CellPlace, data: dict[str, Any]) -> None:
    """Fold the charts of earlier runs of this cell: of a loop of launches they fill screens."""
    newest = _ShownSummary(publish.request_id(), place, data)
    _SHOWN_SUMMARIES[:] = [
        *(shown for shown in _SHOWN_SUMMARIES if shown.request_id == newest.request_id),
        newest,
    ]
    while len(_SHOWN_SUMMARIES) > _OPEN_CHARTS:
        earliest = _SHOWN_SUMMARIES.pop(0)
        earliest.place.show(earliest.folded_data)


def _less_and_less() -> Iterator[float]:
    yield from _IN_A_TERMINAL_S
    last_seconds = _IN_A_TERMINAL_S[-1]
    yield from (last_seconds * 2**position for position in itertools.count(1))


def _with_prefix(text: str) -> str:
    return "\n".join(f"nbaccel: {line}" for line in text.split("\n"))


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
