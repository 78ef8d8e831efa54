"""What a function reports that runs in the notebook's own process: its loops, its memory."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from nbaccel import _catalog
from nbaccel.output.dashboard.board import RankStatus, RunBoard
from nbaccel.plan import Plan
from nbaccel.workers.process_use import process_use

__all__ = ["observing_here"]

_LOOK_INTERVAL_S = 1.0


class BoardChannel:
    """Takes the place of a worker's channel to the notebook: messages go to the board at once.

    Args:
        run_board: The facts of the run.
    """

    def __init__(self, run_board: RunBoard) -> None:
        self._board = run_board
        self._next_look = 0.0

    def try_send(self, message: Any) -> bool:
        """Take in what the function reports."""
        self._board.hear(0, message)
        if time.monotonic() >= self._next_look:
            self.look()
        return True

    def send(self, message: Any) -> None:
        """Take in what the function reports."""
        self.try_send(message)

    def look(self) -> None:
        """Look how much memory the process has."""
        current_time = time.monotonic()
        self._next_look = current_time + _LOOK_INTERVAL_S
        own_use = process_use(os.getpid())
        rank_row = RankStatus(
            rank=0,
            state="running",
            seconds=current_time - self._board.began,
            rss_bytes=own_use.rss_bytes if own_use is not None else 0,
        )
        self._board.now = current_time
        self._board.see([rank_row])


@contextlib.contextmanager
def observing_here(plan: Plan) -> Iterator[RunBoard]:
    """A block in which loops of this process report to a board.

    Args:
        plan: What was planned.

    Yields:
        The board; its time is that of the block's end afterwards.
    """
    run_board = RunBoard([0], began_at=time.monotonic())
    board_channel = BoardChannel(run_board)
    with contextlib.ExitStack() as clean_up:
        clean_up.callback(board_channel.look)
        # Else nothing can report: torch takes a second to import, and the function need not use it.
        if "torch" in sys.modules:
            from nbaccel.workers import metrics_reporter

            hardware = _catalog.device(plan.device)
            device_name = str(hardware.torch_device(0))
            clean_up.enter_context(
                metrics_reporter.reporting_to(board_channel, hardware, device_name)
            )
        yield run_board
