"""A dashboard in its place: an output of the cell that is changed, or lines in a terminal.

    0 s   nothing: a short launch leaves no trace
    1 s   the facts as HTML; where a click would be heard, widgets are made
    then  the panel with its Stop button takes the same place, if the front end is ready for it
    end   the summary as HTML takes the place; the widgets are gone

A terminal cannot change what it has shown, so there lines are added now and then.
"""

from __future__ import annotations

import itertools
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from nbaccel import env
from nbaccel.launch import publish
from nbaccel.launch.dashboard import drawing
from nbaccel.launch.dashboard.board import Board, RankStatus
from nbaccel.launch.dashboard.panel import VIEW, Panel, may_be_heard

if TYPE_CHECKING:  # it brings torch, which a dashboard can do without
    from nbaccel.launch.wire import Metrics

__all__ = ["Dashboard"]

FIRST_S = 1.0
EVERY_S = 1.0
NEWS_S = 0.25
_PANEL_S = 10.0
"""How long a front end is given to open a way for clicks."""
_IN_A_TERMINAL_S = (1.0, 5.0, 15.0, 60.0)


class Dashboard:
    """Tells what ranks are at while they run, and afterwards what it came to.

    Args:
        ranks: The ranks.
        stop: What the Stop button does, from any thread; None for no button.
        say: Prints lines where there is no notebook; by default to stderr.
        make_room: Called before a new output is shown.
        is_wanted: Whether anything is shown at all.
        clock: Seconds of a clock that never goes back.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        *,
        stop: Callable[[], None] | None = None,
        say: Callable[[str], None] | None = None,
        make_room: Callable[[], None] | None = None,
        is_wanted: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self.board = Board(ranks, began=clock())
        self._stop = stop
        self._say = say or _say
        self._make_room = make_room
        self._in_place = publish.has_cells()
        self._is_wanted = is_wanted and env.flag("NBACCEL_DASHBOARD") is not False
        self._next = self.board.began + FIRST_S
        self._lines = _less_and_less()
        self._next_line = next(self._lines)
        self._id = uuid.uuid4().hex
        self._panel: Panel | None = None
        self._shows_panel = False
        self._told = False  # whether something has been shown
        self._stands = False  # whether it is still there
        self._has_news = False
        self._drawn_at = 0.0
        self._clicked = False

    # ---- when

    def due_in(self) -> float:
        """Seconds until `update` or `refresh` shows something."""
        return max(0.0, min(self._next, self._news_due()) - self._clock())

    @property
    def wants_a_look(self) -> bool:
        """Whether it is time to look at the ranks, and to `update`."""
        return self._clock() >= self._next

    def _news_due(self) -> float:
        """A panel is changed in little; a whole output that is replaced may flicker."""
        if not (self._has_news and self._shows_panel):
            return float("inf")
        return self._drawn_at + NEWS_S

    # ---- what is known

    def hear(self, rank: int, message: Metrics) -> None:
        """Take in what a rank has told of its training."""
        self.board.hear(rank, message)
        self._has_news = True

    def update(self, rows: Sequence[RankStatus]) -> None:
        """Show the ranks, if it is time.

        Args:
            rows: One per rank.
        """
        now = self._clock()
        if now < self._next:
            return
        self._next += EVERY_S * (1 + (now - self._next) // EVERY_S)  # what was missed is gone
        self.board.now = now
        self.board.see(rows)
        if not self._is_wanted:
            return
        if self._in_place:
            self._draw()
        else:
            self._add_line()
        self._told = True

    def _add_line(self) -> None:
        if self.board.seconds < self._next_line:
            return
        while self._next_line <= self.board.seconds:
            self._next_line = next(self._lines)
        self._say(_told(drawing.live_text(self.board)))

    def refresh(self) -> None:
        """Show what has been heard since the last look, if it is time."""
        now = self._clock()
        if now >= self._news_due():
            self.board.now = now
            self._draw()

    def cleared(self) -> None:
        """The cell has been cleared, and what stood there is gone."""
        self._stands = False

    # ---- the place

    def _draw(self) -> None:
        self._has_news = False
        self._drawn_at = self._clock()
        comes_up = self._watch_panel()
        if self._panel is not None and self._shows_panel:
            facts = drawing.live_html(self.board, by_hand=False)
            self._panel.show(facts, is_stopping=self._clicked)
            if self._stands and not comes_up:
                return
        self._place(drawing.live_html(self.board, by_hand=True), drawing.live_text(self.board))

    def _watch_panel(self) -> bool:
        """Make the panel at first; returns True when its button would be heard from now on."""
        if self._stop is None or self._shows_panel:
            return False
        if self._panel is None:
            if not self._told and may_be_heard():
                self._panel = self._new_panel()
        elif self._panel.is_heard:
            self._shows_panel = True
        elif self.board.seconds > FIRST_S + _PANEL_S:
            self._panel.close()
            self._panel = self._stop = None
        return self._shows_panel

    def _new_panel(self) -> Panel | None:
        try:
            return Panel(self._on_click)
        except Exception:  # widgets of another age, or half of them: no training ends for a button
            return None

    def _on_click(self) -> None:
        self._clicked = self._has_news = True
        if self._stop is not None:
            self._stop()

    def _place(self, html: str, text: str) -> None:
        data: dict[str, Any] = {"text/plain": text, "text/html": html}
        if self._panel is not None and self._shows_panel:
            data[VIEW] = self._panel.view
        content: dict[str, Any] = {
            "data": data,
            "metadata": {},
            "transient": {"display_id": self._id},
        }
        if self._stands:
            content["update"] = True
        elif self._make_room is not None:
            self._make_room()
        publish.display(content)
        self._stands = True

    # ---- the end

    def finish(
        self,
        rows: Sequence[RankStatus] = (),
        *,
        failed: bool = False,
        interrupted: bool = False,
        timed_out: bool = False,
    ) -> None:
        """Leave the summary, if there has been anything to see.

        Args:
            rows: The ranks, as they ended.
            failed: A rank raised or died.
            interrupted: The user stopped it.
            timed_out: It took longer than it may.
        """
        panel, self._panel, self._stop = self._panel, None, None
        board = self.board
        board.now = self._clock()
        board.see(rows)
        board.ending = (
            "stopped" if interrupted else "timed out" if timed_out else "failed" if failed else ""
        )
        if self._told and self._in_place:
            self._place(drawing.static_html(board), drawing.summary(board))
        elif self._told:
            self._say(_told(drawing.summary(board)))
        if panel is not None:
            panel.close()


def _less_and_less() -> Iterator[float]:
    yield from _IN_A_TERMINAL_S
    last = _IN_A_TERMINAL_S[-1]
    yield from (last * 2**i for i in itertools.count(1))


def _told(text: str) -> str:
    return "\n".join(f"nbaccel: {line}" for line in text.split("\n"))


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
