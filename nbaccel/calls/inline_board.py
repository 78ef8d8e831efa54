"""What a function reports that runs in the notebook's own process: its loops, bars and memory.

    tqdm ── text ──► sys.stderr.write ── its own text ──► RankBars ──► the panel's row
                                      ── other text ────► the cell, as ever
    tqdm.notebook ── widget in the cell; its numbers ──► the panel's first line: time left

A bar's text is read as that of a worker's bar is, so it is known to the last digit when the bar is
closed. The numbers of bars that are not in the panel come from the bars themselves.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from nbaccel.output.bars import (
    BarText,
    RankBars,
    is_bar_writing,
    living_bars,
    numbers_of_bar,
    read_bar,
    release_bar_lock,
)
from nbaccel.output.cell_place import CellPlace
from nbaccel.output.panel.display import Dashboard
from nbaccel.output.panel.facts import RankStatus, RunBoard
from nbaccel.plan import Plan, registry
from nbaccel.workers.resource_use import process_use

__all__ = ["InlineBars", "observing_here", "taking_bar_text"]

_POLL_INTERVAL_S = 1.0
_SHORT_S = 0.05
"""A function without a bar that is over by then leaves no place for a panel behind."""
_BAR_MOVES = re.compile(r"[\r\n]|\x1b\[A")  # from one bar's line to another's


class BoardChannel:
    """Takes the place of a worker's channel to the notebook: messages go to the board at once.

    With the first of them the panel has its place in the cell. It is drawn whenever something is
    reported, since nothing else runs meanwhile; it has no button, because no click would arrive.

    Attributes:
        dashboard: The board of the run, and how it is shown.
        draws_bars: Whether loops are shown in a panel, so that they need no bar of their own.
    """

    def __init__(self, plan: Plan) -> None:
        self._place = CellPlace()
        self.draws_bars = (
            self._place.has_panel and threading.current_thread() is threading.main_thread()
        )
        self.dashboard = Dashboard([0], plan=plan, place=self._place, is_wanted=self.draws_bars)
        self._launching_thread = threading.get_ident()
        self._bars = InlineBars()
        self._next_poll = 0.0

    def try_send(self, message: Any) -> bool:
        """Take in what the function reports."""
        self.dashboard.receive(0, message)
        is_short = time.monotonic() < self.dashboard.board.began + _SHORT_S
        if self.draws_bars and not (is_short and not self.dashboard.has_progress):
            self._place.hold()
        self._show_if_due()
        return True

    def send(self, message: Any) -> None:
        """Take in what the function reports."""
        self.try_send(message)

    def note_bar_text(self, bar_text: str) -> None:
        """Take in what a bar of tqdm has drawn of itself, from any thread."""
        self._bars.note_text(bar_text)
        # Other threads of the function may not display in its cell.
        if threading.get_ident() == self._launching_thread:
            self._place.hold()
            self._show_if_due()

    def _show_if_due(self) -> None:
        """Look how much memory the process has, and show what is known."""
        if time.monotonic() < self._next_poll:
            return
        self._next_poll = time.monotonic() + _POLL_INTERVAL_S
        rows = [self._own_row("running")]
        if self.dashboard.is_due:
            self.dashboard.update(rows)
        else:
            self.dashboard.board.see(rows)

    def end(self, ending: str) -> None:
        """Leave the summary."""
        self.dashboard.finish(
            [self._own_row(ending)],
            has_failed=ending == "failed",
            was_interrupted=ending == "stopped",
        )

    def _own_row(self, state: str) -> RankStatus:
        use = process_use(os.getpid())
        return RankStatus(
            rank=0,
            state=state,
            seconds=time.monotonic() - self.dashboard.board.began,
            rss_bytes=use.rss_bytes if use is not None else 0,
            bars=self._bars.shown() if self.draws_bars else (),
        )


@contextlib.contextmanager
def observing_here(plan: Plan) -> Iterator[RunBoard]:
    """A block in which loops of this process report to a board, and are shown in a panel."""
    __tracebackhide__ = True
    channel = BoardChannel(plan)
    ending = "done"
    with contextlib.ExitStack() as clean_up:
        clean_up.callback(lambda: channel.end(ending))
        if channel.draws_bars:
            clean_up.enter_context(taking_bar_text(sys.stderr, channel.note_bar_text))
        # Else nothing can report: torch takes a second to import, and the function need not use it.
        if "torch" in sys.modules:
            from nbaccel.workers import metrics_reporter

            hardware = registry.device(plan.device)
            device_name = str(hardware.torch_device(0))
            clean_up.enter_context(metrics_reporter.reporting_to(channel, hardware, device_name))
        try:
            yield channel.dashboard.board
        except KeyboardInterrupt:
            ending = "stopped"
            raise
        except BaseException:  # whatever the function raises, SystemExit too, it has failed
            ending = "failed"
            raise


# ---- bars


class InlineBars:
    """What is known of the bars that the function has drawn."""

    def __init__(self) -> None:
        self._text_bars = RankBars()
        self._unread_text = ""
        # Bars of earlier cells that were never closed: a traceback keeps them alive.
        self._counts_before = {id(bar): bar.n for bar in living_bars()}
        self._elsewhere: tuple[BarText, ...] = ()

    def note_text(self, bar_text: str) -> None:
        """Take in what a bar has drawn of itself."""
        for drawn_text in filter(None, map(str.rstrip, _BAR_MOVES.split(bar_text))):
            bar = read_bar(drawn_text)
            if bar is not None:
                self._text_bars.note(bar)
            else:  # its form is the user's own
                self._unread_text = drawn_text

    def shown(self) -> tuple[BarText, ...]:
        """All bars, the outer one first; what is not drawn in the panel is marked so."""
        bars = {_bar_key(bar): bar for bar in self._open_bars()}
        text_bars = tuple(
            _with_exact_time(bar, bars.get(_bar_key(bar)))
            for bar in self._text_bars.shown([self._unread_text])
        )
        text_keys = {_bar_key(bar) for bar in text_bars}
        self._elsewhere = _with_inner_bar(
            self._elsewhere, [bar for key, bar in bars.items() if key not in text_keys]
        )
        # One of either kind may be drawn around one of the other.
        if next(iter(bars), None) in text_keys:
            return (*text_bars, *self._elsewhere)
        return (*self._elsewhere, *text_bars)

    def _open_bars(self) -> list[BarText]:
        """The numbers of all bars that have moved since the launch began."""
        bars = (
            numbers_of_bar(bar)
            for bar in living_bars()
            if self._counts_before.get(id(bar)) != bar.n
        )
        return [replace(bar, is_elsewhere=True) for bar in bars if bar is not None]


def _bar_key(bar: BarText) -> tuple[str, str]:
    return bar.description, bar.total


def _with_exact_time(bar: BarText, same_bar: BarText | None) -> BarText:
    """A bar with the fractions of a second that its text leaves out."""
    if same_bar is None or same_bar.done != bar.done:
        return bar
    return replace(bar, elapsed_s=same_bar.elapsed_s)


def _with_inner_bar(bars_before: tuple[BarText, ...], bars: list[BarText]) -> tuple[BarText, ...]:
    """The outermost bar and the innermost; that stays between two rounds of the outer one."""
    if len(bars) > 1:
        return bars[0], bars[-1]
    is_between = len(bars_before) > 1 and [*map(_bar_key, bars)] == [_bar_key(bars_before[0])]
    return (*bars, bars_before[1]) if is_between else tuple(bars)


@contextlib.contextmanager
def taking_bar_text(stream: Any, note_text: Callable[[str], None]) -> Iterator[None]:
    """A block in which what bars of tqdm write to a stream does not get there.

    The stream stays the same object, with another method `write`: so it works for those who have
    held it before, such as handlers of `logging`, and all its other attributes are its own.
    """
    try:
        attributes = vars(stream)
    except TypeError:
        yield
        return
    had_own_write = "write" in attributes
    plain_write = stream.write
    launching_pid = os.getpid()
    takes_bars = True

    def write_no_bars(text: str) -> Any:
        # A forked DataLoader worker inherits the stream, and not the panel.
        if takes_bars and os.getpid() == launching_pid and is_bar_writing():
            note_text(text)
            return len(text)
        return plain_write(text)

    attributes["write"] = write_no_bars
    has_failed = True
    try:
        yield
        has_failed = False
    finally:
        is_still_own = attributes.get("write") is write_no_bars
        if is_still_own and had_own_write:
            attributes["write"] = plain_write
        elif is_still_own:
            del attributes["write"]
        # Bars keep the method that they were made with. Those of a function that has failed are
        # closed when its traceback is dropped, in whatever cell that is: they draw nothing there.
        takes_bars = has_failed and is_still_own
        if has_failed:
            release_bar_lock()
