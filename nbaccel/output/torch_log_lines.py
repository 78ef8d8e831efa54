"""Lines that libraries print when all is well, which say nothing to who trains a model.

They are counted, folded away, and told in full where something has failed. Only lines that are
known are taken, each as a whole: a line that says something else is shown as ever.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from nbaccel.base.units import number_ranges

__all__ = ["LibraryMessages"]

_MAX_MESSAGES = 200
_MAX_MESSAGE_CHARS = 500
# `[rank1]:[W1125 10:15:30.123456789 socket.cpp:767] `, in all versions of torch since 2.0.
_TORCH_HEAD = r"(?:\[rank\d+\]:)?\[W[^\]]*\] "
_HARMLESS_LINES = (
    # From each rank for every group, in the torch of Colab (2.9): sgl-project/sglang#9652
    # has pages of it. Where the two numbers differ somebody is missing, which is worth knowing.
    r"\[Gloo\] Rank \d+ is connected to (?P<peers>\d+) peer ranks\. "
    r"Expected number of connected peer ranks is : (?P=peers)",
    # A host whose address has no name, as in containers: pytorch/pytorch#159007.
    _TORCH_HEAD + r"\[c10d\] The (?:hostname|remote address) of the client socket cannot be "
    r"retrieved\. err=.*",
    # The process ends, and its groups with it: pytorch/pytorch#126275, "the wall of warning text".
    _TORCH_HEAD + r"Warning: WARNING: (?:destroy_process_group\(\) was not called before program "
    r"exit|process group has NOT been destroyed before we destruct ProcessGroupNCCL).*",
    # A worker uses the device of its local rank, which is what NCCL guesses: pytorch/pytorch#60752.
    _TORCH_HEAD + r"(?:Warning: )?(?:Guessing device ID based on global rank|.*using GPU \d+ (?:to "
    r"perform barrier )?as devices? used by this process (?:is|are) currently unknown).*",
)
_IS_HARMLESS = re.compile("|".join(_HARMLESS_LINES))


class _FoldedMessage(NamedTuple):
    ranks: list[int]
    text: str


class LibraryMessages:
    """The harmless lines of one call."""

    def __init__(self) -> None:
        self._messages: dict[str, _FoldedMessage] = {}
        self.count = 0
        """How many lines there have been, of all ranks."""

    def take_from(self, worker_rank: int, output_lines: Sequence[str]) -> Sequence[str]:
        """Take out the harmless lines; returns the others."""
        # First what nearly all lines lack: thousands of lines a second are asked.
        if not any(text[:1] == "[" for text in output_lines):
            return output_lines
        other_lines = []
        for text in output_lines:
            if text[:1] == "[" and _IS_HARMLESS.fullmatch(text):
                self._note(worker_rank, text)
            else:
                other_lines.append(text)
        return other_lines

    def _note(self, rank: int, line_text: str) -> None:
        self.count += 1
        text = line_text[:_MAX_MESSAGE_CHARS]
        message = self._messages.get(text)
        if message is not None:
            message.ranks.append(rank)
        elif len(self._messages) < _MAX_MESSAGES:
            self._messages[text] = _FoldedMessage([rank], text)

    def lines(self) -> list[str]:
        """`[0-1] text`, each different one once."""
        return [
            f"[{number_ranges(message.ranks)}] {message.text}"
            for message in self._messages.values()
        ]
