"""What a function reports that runs in the notebook's own process: its loops, bars and memory."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from nbaccel.calls.inline_bars import InlineBars, taking_bar_text
from nbaccel.output.cell_place import CellPlace
from nbaccel.output.dashboard.board import RankStatus, RunBoard
from nbaccel.output.dashboard.display import Dashboard
from nbaccel.plan import Plan, registry
from nbaccel.workers.resource_use import process_use

__all__ = ["observing_here"]

_POLL_INTERVAL_S = 1.0


class BoardChannel:
    """Takes the place of a worker's channel to the notebook: messages go to the board at once.

    With the first of them the panel has its place in the cell. It is drawn whenever something is
    reported, since nothing else runs meanwhile; it has no button, because no click would arrive.

    Attributes:
        dashboard: The board of the run, and how it is shown.
        draws_bars: Whether loops are shown in a panel, so that they need no bar of their own.
    """

    def __init__(self) -> None:
        self._place = CellPlace()
        self.draws_bars = (
            self._place.has_panel and threading.current_thread() is threading.main_thread()
        )
        self.dashboard = Dashboard([0], place=self._place, is_wanted=self.draws_bars)
        self._launching_thread = threading.get_ident()
        self._bars = InlineBars()
        self._next_poll = 0.0

    def try_send(self, message: Any) -> bool:
        """Take in what the function reports."""
        if self.draws_bars:
            self._place.hold()
        self.dashboard.receive(0, message)
        self._refresh_if_due()
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
            self._refresh_if_due()

    def _refresh_if_due(self) -> None:
        if time.monotonic() >= self._next_poll:
            self.refresh()

    def refresh(self) -> None:
        """Look how much memory the process has, and show what is known."""
        self._next_poll = time.monotonic() + _POLL_INTERVAL_S
        rows = [self._own_row("running")]
        if self.dashboard.is_due:
            self.dashboard.update(rows)
        else:
            self.dashboard.board.see(rows)

    def end(self, ending: str) -> None:
        """Leave the summary."""
        self.dashboard.finish(
            [self._own_row(ending or "done")],
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
    board_channel = BoardChannel()
    ending = ""
    with contextlib.ExitStack() as clean_up:
        clean_up.callback(lambda: board_channel.end(ending))
        if board_channel.draws_bars:
            clean_up.enter_context(taking_bar_text(sys.stderr, board_channel.note_bar_text))
        # Else nothing can report: torch takes a second to import, and the function need not use it.
        if "torch" in sys.modules:
            from nbaccel.workers import metrics_reporter

            hardware = registry.device(plan.device)
            device_name = str(hardware.torch_device(0))
            clean_up.enter_context(
                metrics_reporter.reporting_to(board_channel, hardware, device_name)
            )
        try:
            yield board_channel.dashboard.board
        except KeyboardInterrupt:
            ending = "stopped"
            raise
        except BaseException:  # whatever the function raises, SystemExit too, it has failed
            ending = "failed"
            raise
