"""One line that says what a start of workers waits for, and goes away when they run."""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Callable

from nbaccel.base.units import count_noun
from nbaccel.output.cell_place import CellPlace

__all__ = ["WaitingLine"]


SHOWN_AFTER_S = 0.5
"""A start that takes less leaves no trace."""
_CLEAR_TO_END = "\r\x1b[K"  # ECMA-48: erase in line


class WaitingLine:
    """The line of one start of workers.

    Attributes:
        place: Where in a cell it stands; the call's panel comes there, too.
    """

    def __init__(
        self, num_workers: int, *, read_clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._headline = f"starting {count_noun(num_workers, 'worker')}"
        self._clock = read_clock
        self._began_at = read_clock()
        self.place = CellPlace()
        self._is_wanted = self.place.is_there or sys.stderr.isatty()
        self._shown = ""
        self._is_over = False

    def due_in(self) -> float:
        """Seconds until there is something to show; infinite afterwards."""
        if self._shown or self._is_over:
            return float("inf")
        return max(0.0, self._began_at + SHOWN_AFTER_S - self._clock())

    def say(self, waited_for: str) -> None:
        """Show what is being waited for, if it has taken long enough. Cheap to call often."""
        text = f"{self._headline}: {waited_for} …" if waited_for else f"{self._headline} …"
        if (
            self._is_over
            or not self._is_wanted
            or text == self._shown
            or self._clock() < self._began_at + SHOWN_AFTER_S
        ):
            return
        self._show(text)
        self._shown = text

    def close(self, *, is_replaced: bool = False) -> None:
        """Remove it."""
        if self._shown and not self._is_over and not (is_replaced and self.place.is_there):
            self._show("")
        self._is_over = True

    def _show(self, text: str) -> None:
        if self.place.is_there:
            self.place.show({"text/plain": text, "text/html": _as_html(text)} if text else {})
            return
        sys.stderr.write(f"{_CLEAR_TO_END}nbaccel: {text}" if text else _CLEAR_TO_END)
        sys.stderr.flush()


def _as_html(text: str) -> str:
    return f'<span style="opacity:0.7">{html.escape(text)}</span>'
