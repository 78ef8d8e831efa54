"""A dashboard in its place: an output of the cell that is changed, or lines in a terminal.

Front ends whose clicks arrive while a cell runs get a panel with a Stop button.

    0 s   nothing: a short launch leaves no trace
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

import contextlib
import functools
import importlib
import importlib.util
import itertools
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from nbaccel import env, ipython_private
from nbaccel.output import publish
from nbaccel.output.dashboard import drawing
from nbaccel.output.dashboard.board import RankStatus, RunBoard

if TYPE_CHECKING:
    from nbaccel.workers.messaging import Metrics


__all__ = ["VIEW_MIME", "Dashboard", "StopPanel", "may_be_heard"]


FIRST_S = 1.0
REDRAW_INTERVAL_S = 1.0
NEWS_S = 0.25
_PANEL_S = 10.0
"""How long a front end is given to open a subshell for clicks."""
_IN_A_TERMINAL_S = (1.0, 5.0, 15.0, 60.0)


class Dashboard:
    """Shows what ranks do while they run, and a summary afterwards.

    Args:
        worker_ranks: The ranks.
        stop_launch: What the Stop button does, from any thread; None for no button.
        say_line: Prints lines where there is no notebook; by default to stderr.
        make_room: Called before a new output is shown.
        is_wanted: Whether anything is shown at all.
        read_clock: Seconds of a clock that never goes back.
    """

    def __init__(
        self,
        worker_ranks: Sequence[int],
        *,
        stop_launch: Callable[[], None] | None = None,
        say_line: Callable[[str], None] | None = None,
        make_room: Callable[[], None] | None = None,
        is_wanted: bool = True,
        read_clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = read_clock
        self.board = RunBoard(worker_ranks, began_at=read_clock())
        self._stop = stop_launch
        self._say = say_line or _say
        self._make_room = make_room
        self._in_place = publish.has_cells()
        self._is_wanted = is_wanted and env.flag("NBACCEL_DASHBOARD") is not False
        self._next = self.board.began + FIRST_S
        self._lines = _less_and_less()
        self._next_line = next(self._lines)
        self._panel: StopPanel | None = None
        self._shows_panel = False
        self._was_shown = False  # whether something has been shown
        self._stands = False  # whether it is still there
        self._has_news = False
        self._drawn_at = 0.0
        self._clicked = False

    # ---- when

    def due_in(self) -> float:
        """Seconds until `update` or `refresh` shows something."""
        return max(0.0, min(self._next, self._news_due()) - self._clock())

    @functools.cached_property
    def _id(self) -> str:
        """Of the output that is replaced."""
        return uuid.uuid4().hex

    @property
    def wants_a_look(self) -> bool:
        """Whether it is time to look at the ranks, and to `update`."""
        return self._clock() >= self._next

    @property
    def was_shown(self) -> bool:
        """Whether something has been shown, so that there will be a summary."""
        return self._was_shown

    def _news_due(self) -> float:
        """Only a panel is updated early; an output that is replaced as a whole may flicker."""
        if not (self._has_news and self._shows_panel):
            return float("inf")
        return self._drawn_at + NEWS_S

    # ---- what is known

    def hear(self, worker_rank: int, metrics_message: Metrics) -> None:
        """Take in what a rank has reported of its training."""
        self.board.hear(worker_rank, metrics_message)
        self._has_news = True

    def update(self, rank_rows: Sequence[RankStatus]) -> None:
        """Show the ranks, if it is time.

        Args:
            rank_rows: One per rank.
        """
        current_time = self._clock()
        if current_time < self._next:
            return
        # Whole intervals are skipped: looks that were missed are not made up for.
        self._next += REDRAW_INTERVAL_S * (1 + (current_time - self._next) // REDRAW_INTERVAL_S)
        self.board.now = current_time
        self.board.see(rank_rows)
        if not self._is_wanted:
            return
        if self._in_place:
            self._draw()
        else:
            self._add_line()
        self._was_shown = True

    def _add_line(self) -> None:
        if self.board.seconds < self._next_line:
            return
        # Several times that have passed since the last look make one line.
        while self._next_line <= self.board.seconds:
            self._next_line = next(self._lines)
        self._say(_with_prefix(drawing.live_text(self.board)))

    def refresh(self) -> None:
        """Show what has been reported since the last look, if it is time."""
        current_time = self._clock()
        if current_time >= self._news_due():
            self.board.now = current_time
            self._draw()

    def cleared(self) -> None:
        """The cell has been cleared, so the output no longer exists."""
        self._stands = False

    # ---- the place

    def _draw(self) -> None:
        self._has_news = False
        self._drawn_at = self._clock()
        comes_up = self._watch_panel()
        if self._panel is not None and self._shows_panel:
            board_facts = drawing.live_html(self.board, by_hand=False)
            self._panel.show(board_facts, is_stopping=self._clicked)
            if self._stands and not comes_up:
                return
        self._place(drawing.live_html(self.board, by_hand=True), drawing.live_text(self.board))

    def _watch_panel(self) -> bool:
        """Make the panel at first; returns True when its button has an effect from now on."""
        if self._stop is None or self._shows_panel:
            return False
        if self._panel is None:
            if not self._was_shown and may_be_heard():
                self._panel = self._new_panel()
        elif self._panel.is_heard:
            self._shows_panel = True
        # The front end has opened no subshell in time: a button would have no effect.
        elif self.board.seconds > FIRST_S + _PANEL_S:
            self._panel.close()
            self._panel = self._stop = None
        return self._shows_panel

    def _new_panel(self) -> StopPanel | None:
        try:
            return StopPanel(self._on_click)
        except Exception:  # an unknown ipywidgets must not end the training
            return None

    def _on_click(self) -> None:
        self._clicked = self._has_news = True
        if self._stop is not None:
            self._stop()

    def _place(self, board_html: str, output_text: str) -> None:
        display_data: dict[str, Any] = {"text/plain": output_text, "text/html": board_html}
        if self._panel is not None and self._shows_panel:
            display_data[VIEW_MIME] = self._panel.view
        display_content: dict[str, Any] = {
            "data": display_data,
            "metadata": {},
            "transient": {"display_id": self._id},
        }
        if self._stands:
            # With the same display id, so that the front end replaces the output.
            display_content["update"] = True
        elif self._make_room is not None:
            self._make_room()
        publish.publish_display(display_content)
        self._stands = True

    # ---- the end

    def finish(
        self,
        rank_rows: Sequence[RankStatus] = (),
        *,
        has_failed: bool = False,
        was_interrupted: bool = False,
        timed_out: bool = False,
    ) -> None:
        """Leave the summary, if there has been anything to see.

        Args:
            rank_rows: The ranks, as they ended.
            has_failed: A rank raised or died.
            was_interrupted: The user stopped it.
            timed_out: It took longer than it may.
        """
        # First: a click from here on must not interrupt what follows the call.
        stop_panel, self._panel, self._stop = self._panel, None, None
        run_board = self.board
        run_board.now = self._clock()
        run_board.see(rank_rows)
        run_board.ending = (
            "stopped"
            if was_interrupted
            else "timed out"
            if timed_out
            else "failed"
            if has_failed
            else ""
        )
        if self._was_shown and self._in_place:
            self._place(drawing.final_html(run_board), drawing.summary_line(run_board))
        elif self._was_shown:
            self._say(_with_prefix(drawing.summary_line(run_board)))
        if stop_panel is not None:
            stop_panel.close()


def _less_and_less() -> Iterator[float]:
    yield from _IN_A_TERMINAL_S
    last_seconds = _IN_A_TERMINAL_S[-1]
    yield from (last_seconds * 2**position for position in itertools.count(1))


def _with_prefix(output_text: str) -> str:
    return "\n".join(f"nbaccel: {told_line}" for told_line in output_text.split("\n"))


def _say(told_line: str) -> None:
    sys.stderr.write(f"{told_line}\n")
    sys.stderr.flush()


VIEW_MIME = "application/vnd.jupyter.widget-view+json"

_STOP_LABEL = "■ Stop"
_STOPPING_LABEL = "■ Stopping… press again to end at once"
_STOP_TOOLTIP = (
    "Interrupts all ranks, as interrupting the cell does. Pressed again, it ends them at once."
)


def may_be_heard() -> bool:
    """Whether kernel and front end support subshells, and there are widgets."""
    running_kernel = _running_kernel()
    return (
        running_kernel is not None
        and threading.current_thread() is threading.main_thread()
        and _subshell_lister(running_kernel) is not None
        and "subshell_id" in (running_kernel.get_parent("shell") or {}).get("header", {})
        and importlib.util.find_spec("ipywidgets") is not None
    )


class StopPanel:
    """The facts, and a button.

    Its widgets exist from now on; `is_heard` says whether they can be shown.

    Args:
        on_click: What the button does, in a thread of the front end's.
    """

    def __init__(self, on_click: Callable[[], None]) -> None:
        widget_library = importlib.import_module("ipywidgets")
        self._facts = widget_library.HTML()
        # No icon: a server refuses Notebook 7 the font of its icons.
        self._button = widget_library.Button(
            description=_STOP_LABEL, button_style="danger", tooltip=_STOP_TOOLTIP
        )
        self._button.add_class("nbaccel-stop")
        self._button.on_click(lambda _: on_click())
        self._box = widget_library.VBox([self._facts, self._button])
        self._box.layout.align_items = "flex-start"
        self._button.layout.width = "auto"
        ipython_private.reply_where_sent(self._button.comm)

    @property
    def is_heard(self) -> bool:
        """Whether the front end has opened a subshell, which takes clicks while the cell runs."""
        running_kernel = _running_kernel()
        subshell_ids = _subshell_lister(running_kernel) if running_kernel is not None else None
        return bool(subshell_ids and subshell_ids())

    @property
    def view(self) -> dict[str, Any]:
        """What shows it, as the content of `VIEW_MIME`."""
        return {"version_major": 2, "version_minor": 0, "model_id": self._box.model_id}

    def show(self, board_facts: str, *, is_stopping: bool) -> None:
        """Change what it shows.

        Args:
            board_facts: As HTML.
            is_stopping: Whether Stop has been pressed.
        """
        self._facts.value = board_facts
        self._button.description = _STOPPING_LABEL if is_stopping else _STOP_LABEL

    def close(self) -> None:
        """Close its widgets, here and in the front end."""
        for closed_widget in (self._button, self._facts, self._box):
            for widget_part in (
                closed_widget,
                closed_widget.layout,
                getattr(closed_widget, "style", None),
            ):
                if widget_part is not None:
                    # A front end that is gone may raise anything.
                    with contextlib.suppress(Exception):
                        widget_part.close()


def _running_kernel() -> Any:
    ipython_module = sys.modules.get("IPython")
    running_shell = ipython_module.get_ipython() if ipython_module is not None else None
    return getattr(running_shell, "kernel", None)


def _subshell_lister(running_kernel: Any) -> Callable[[], list[str]] | None:
    """What lists the kernel's subshells; None in a kernel without them."""
    channel_thread = getattr(running_kernel, "shell_channel_thread", None)
    return getattr(getattr(channel_thread, "manager", None), "list_subshell", None)
