"""Warnings in the output of workers, counted by text: a report tells each once.

A run of transformers' Trainer on two ranks was seen to begin with a dozen lines of warnings.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from nbaccel.base.units import shorten_text

__all__ = ["SeenWarnings", "WarningCount"]

_MOST_TEXTS = 50
_MOST_CHARS = 400
# As `warnings` writes one, "file:line: Category: text", and as loggers and C++ code imitate it.
_WARNING_LINE = re.compile(r"(?:^|[\s:\[(])(?P<text>[A-Z]\w*Warning: .*)")


@dataclass(slots=True)
class WarningCount:
    """How often a warning was seen, and on which ranks."""

    count: int = 0
    ranks: set[int] = field(default_factory=set)


class SeenWarnings:
    """Collects warnings from lines, in bounded memory.

    Attributes:
        by_text: Category and text → how often it was seen, in the order of the first time.
        num_left_out: Warnings that were not counted, because there were too many different ones.
    """

    def __init__(self) -> None:
        self.by_text: dict[str, WarningCount] = {}
        self.num_left_out = 0

    def count(self, worker_rank: int, output_lines: Sequence[str]) -> None:
        """Count the warnings among lines that a rank has written."""
        # First what nearly all lines lack: thousands of lines a second are asked.
        for output_line in output_lines:
            if "Warning: " in output_line:
                self._count(worker_rank, output_line)

    def _count(self, rank: int, line: str) -> None:
        warning_match = _WARNING_LINE.search(line)
        if warning_match is None:
            return
        text = shorten_text(warning_match["text"].strip(), _MOST_CHARS)
        if text not in self.by_text and len(self.by_text) >= _MOST_TEXTS:
            self.num_left_out += 1
            return
        warning_count = self.by_text.setdefault(text, WarningCount())
        warning_count.count += 1
        warning_count.ranks.add(rank)
