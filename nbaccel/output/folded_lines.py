"""Lines that are folded away and counted.

A run of transformers' Trainer on two ranks was seen to begin with a dozen lines of warnings.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from nbaccel.base.units import number_ranges, shorten_text

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
_FIRST_LETTERS = "[/WI"
"""Of all lines that may be taken."""
# What installed packages say of themselves, in the forms of `warnings` and their loggers. Seen of
# torch 2.6 to 2.13, transformers 5, DeepSpeed 0.19.
_LINES_OF_PACKAGES = (
    r"\S*/(?:site|dist)-packages/\S+:\d+: \w*Warning: .*",
    _TORCH_HEAD + r"Warning: .*",
    r"[WI]\d{4} \d\d:\d\d:\d\d\.\d+ \d+ torch/\S+\] .*",
    r"\[\d{4}-\d\d-\d\d [\d:,]+\] \[(?:INFO|WARNING)\] \[\w+\.py:\d+:\w+\] .*",
    r"\[transformers\] .*",
)
_OF_PACKAGES = re.compile("|".join(_LINES_OF_PACKAGES))
# As `warnings` writes one, "file:line: Category: text", and as loggers and C++ code imitate it.
_WARNING_LINE = re.compile(r"(?:^|[\s:\[(])(?P<text>[A-Z]\w*Warning: .*)")


@dataclass(slots=True)
class SeenLine:
    """How often a line was seen, and on which ranks."""

    count: int = 0
    ranks: set[int] = field(default_factory=set)


class SeenLines:
    """Counts lines by their text, in bounded memory."""

    max_texts = 200
    max_chars = 500

    def __init__(self) -> None:
        self.by_text: dict[str, SeenLine] = {}
        self.num_left_out = 0
        """Lines that were not kept, because there were too many different ones."""
        self.count = 0

    def note(self, rank: int, line: str) -> None:
        """Count a line."""
        self.count += 1
        text = shorten_text(line, self.max_chars)
        if text not in self.by_text and len(self.by_text) >= self.max_texts:
            self.num_left_out += 1
            return
        seen = self.by_text.setdefault(text, SeenLine())
        seen.count += 1
        seen.ranks.add(rank)


class SeenWarnings(SeenLines):
    """Warnings in the output of workers: a report tells each once."""

    max_texts = 50
    max_chars = 400

    def take_in(self, rank: int, lines: Sequence[str]) -> None:
        """Count the warnings among lines that a rank has written."""
        for line in lines:
            # First what nearly all lines lack: thousands of lines a second are asked.
            if "Warning: " in line and (found := _WARNING_LINE.search(line)):
                self.note(rank, found["text"].strip())


class LibraryMessages(SeenLines):
    """Lines that libraries print when all is well, which say nothing to who trains a model.

    They are told in full where something has failed. Only lines that are known are taken, each as a
    whole: a line that says something else is shown as ever. Where a panel folds them away, warnings
    and logs of installed packages are taken, too.
    """

    def __init__(self, *, has_panel: bool = False) -> None:
        super().__init__()
        self._has_panel = has_panel
        self._warned: set[tuple[int, str]] = set()
        """Ranks and streams whose last line was a package's warning: its line of code is next."""

    def take_from(self, rank: int, lines: Sequence[str], stream: str = "stderr") -> Sequence[str]:
        """Take out the harmless lines; returns the others."""
        source = (rank, stream)
        # First what nearly all lines lack: thousands of lines a second are asked.
        if source not in self._warned and not any(text[:1] in _FIRST_LETTERS for text in lines):
            return lines
        return [text for text in lines if not self._take(source, text)]

    def _take(self, source: tuple[int, str], text: str) -> bool:
        if source in self._warned:
            self._warned.remove(source)
            if text.startswith("  "):
                return True
        is_of_package = self._has_panel and _OF_PACKAGES.fullmatch(text) is not None
        if not (is_of_package or (text[:1] == "[" and _IS_HARMLESS.fullmatch(text))):
            return False
        if is_of_package and "Warning: " in text:
            self._warned.add(source)
        self.note(source[0], text)
        return True

    def lines(self) -> list[str]:
        """`[0-1] text`, each different one once."""
        return [f"[{number_ranges(seen.ranks)}] {text}" for text, seen in self.by_text.items()]
