"""Lines out of the chunks that are read from a pipe: decoded, joined, rewritten, shortened.

Each character is copied a bounded number of times, however long its line is.
"""

from __future__ import annotations

import codecs
import itertools
from collections import deque
from collections.abc import Sequence

from nbaccel.units import left_out

__all__ = ["Lines"]

_BAR_CHARS = 1_000


class Lines:
    """Makes lines of what one stream of one process writes.

    Args:
        max_chars: Of a longer line only head and tail are kept; None for no limit.
    """

    def __init__(self, max_chars: int | None = None) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._max_chars = max_chars
        self._begin()
        self.bar = ""
        """The unfinished line, if it has been rewritten with carriage returns."""

    def _begin(self) -> None:
        self._under = ""  # what stands on the line when its last carriage return comes
        self._is_rewritten = False
        self._last = _Text(self._max_chars)  # what came after that

    def feed(self, data: bytes, *, at_most: int | None = None) -> tuple[list[str], int]:
        """Take in a chunk.

        Args:
            data: What was read.
            at_most: Only so many of the finished lines, the last ones, are wanted.

        Returns:
            The finished lines without their ends, and how many others there were.
        """
        text = self._decoder.decode(data)
        dropped = 0 if at_most is None else max(0, text.count("\n") - at_most)
        if at_most is not None and dropped:
            self._begin()
            first, *more = text.rsplit("\n", at_most + 1)[1:]
        else:
            first, *more = text.split("\n")
        self._add(first)
        lines = []
        if more:
            lines = [self._take(), *map(_rewritten, more[:-1])]
            self._add(more[-1])
        self.bar = self._bar() if self._is_rewritten else ""
        return lines, dropped

    def finish(self) -> str | None:
        """The line that has no end yet, if there is one; nothing of it is left here."""
        self._add(self._decoder.decode(b"", final=True))
        is_empty = not self._last and not self._under
        line, self.bar = self._take(), ""
        return None if is_empty else line

    def _add(self, text: str) -> None:
        if "\r" in text:
            first, *more, text = text.split("\r")
            self._last.add(first)
            self._under = _overlaid([self._under, self._last.text(), *more])
            self._last, self._is_rewritten = _Text(self._max_chars), True
        self._last.add(text)

    def _take(self) -> str:
        line = self._last.text()
        if self._is_rewritten:
            line = _overlaid([self._under, line]).rstrip()
        self._begin()
        return line

    def _bar(self) -> str:
        shown = [self._under[:_BAR_CHARS], self._last.start(_BAR_CHARS)]
        return _overlaid(shown).rstrip()


class _Text:
    """Text that grows at its end. Of a long one the middle is left out."""

    def __init__(self, max_chars: int | None) -> None:
        self._max_chars = max_chars
        self._head = ""
        self._pieces: deque[str] = deque()
        self._num_chars = 0  # in the pieces
        self._num_dropped = 0

    def __bool__(self) -> bool:
        return bool(self._head or self._num_chars)

    def add(self, text: str) -> None:
        if not text:
            return
        self._pieces.append(text)
        self._num_chars += len(text)
        if self._max_chars is not None and self._num_chars > self._max_chars:
            self._shorten(self._max_chars // 2)

    def _shorten(self, half: int) -> None:
        """Half of the limit is cut away each time, so that the copies stay linear."""
        rest = "".join(self._pieces)
        if not self._head:
            self._head, rest = rest[:half], rest[half:]
        tail = rest[-half:]
        self._num_dropped += len(rest) - len(tail)
        self._pieces, self._num_chars = deque([tail]), len(tail)

    def text(self) -> str:
        tail = "".join(self._pieces)
        if self._max_chars is not None and self._head:
            cut = max(0, len(tail) - self._max_chars // 2)
            return left_out(self._head, self._num_dropped + cut, tail[cut:])
        return self._head + tail

    def start(self, num_chars: int) -> str:
        """The first characters."""
        return (
            self._head[:num_chars] or "".join(itertools.islice(self._pieces, num_chars))[:num_chars]
        )


def _rewritten(text: str) -> str:
    return _overlaid(text.split("\r")).rstrip() if "\r" in text else text


def _overlaid(parts: Sequence[str]) -> str:
    """What is seen of texts that are written over each other, each from the line's first column."""
    pieces: list[str] = []
    width = 0
    for part in reversed(parts):
        if len(part) > width:
            pieces.append(part[width:])
            width = len(part)
    return "".join(pieces)
