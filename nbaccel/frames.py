"""Frames of code, told as a notebook's user knows them: `Cell In[7], line 3`, with the source.

Whether a frame is the user's own or a library's is judged by its file alone, so that frames which
came from another process can be told, too.
"""

from __future__ import annotations

import linecache
import re
import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

__all__ = ["Frame", "of_traceback", "place", "source", "source_line", "user_frame"]

_HOUSE = Path(__file__).resolve().parent
_LIBRARY = re.compile(
    r"/(site|dist)-packages/|/lib/python3[^/]*/|<frozen |<string>|<__array_function__"
)
_LINE_CHARS = 300
_INSTALLED = re.compile(r".*/(?:(?:site|dist)-packages|lib/python3[^/]*)/")


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """One call on a stack."""

    file: str
    line: int
    function: str

    @property
    def is_house(self) -> bool:
        """Whether it is nbaccel's own."""
        return self.file.startswith(f"{_HOUSE}/")

    @property
    def is_library(self) -> bool:
        """Whether it is in an installed package, the standard library or nbaccel."""
        return self.is_house or bool(_LIBRARY.search(self.file))


def of_traceback(tb: TracebackType | None) -> tuple[Frame, ...]:
    """The frames of a traceback, outermost first."""
    return tuple(
        Frame(file=f.filename, line=f.lineno or 0, function=f.name)
        for f in traceback.extract_tb(tb)
    )


def user_frame(frames: Iterable[Frame]) -> Frame | None:
    """The innermost frame of the user's own code; `frames` come innermost first."""
    return next((f for f in frames if not f.is_library), None)


def place(frame: Frame) -> str:
    """Where a frame stands, without the folders of this machine.

    Returns:
        `Cell In[7], line 3` for code of a cell, `torch/nn/functional.py:3` for a package's, and
        `file.py:3` for the rest.
    """
    shell = _shell()
    names = getattr(getattr(shell, "compile", None), "_filename_map", {})
    if frame.file in names:
        return f"Cell In[{names[frame.file]}], line {frame.line}"
    if "ipykernel_" in frame.file or frame.file.startswith("<ipython-input"):
        return f"a cell, line {frame.line}"
    if frame.is_house:
        return f"{Path(frame.file).relative_to(_HOUSE.parent)}:{frame.line}"
    if _LIBRARY.search(frame.file):
        return f"{_INSTALLED.sub('', frame.file)}:{frame.line}"
    return f"{Path(frame.file).name}:{frame.line}"


def source_line(frame: Frame) -> str:
    """The line of code a frame stands at, if its source is known here."""
    return linecache.getline(frame.file, frame.line).strip()


def source(frame: Frame, *, around: int) -> list[str]:
    """The frame's line with an arrow, and the lines around it; none if they are not known.

    Args:
        frame: The frame.
        around: How many lines before and after.
    """
    if not source_line(frame):
        return []
    shown = []
    for number in range(frame.line - around, frame.line + around + 1):
        text = linecache.getline(frame.file, number).rstrip()
        if text:
            mark = "---->" if number == frame.line else "     "
            shown.append(f"  {mark} {number:3d} {text[:_LINE_CHARS]}")
    return shown


def _shell() -> object | None:
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None
