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
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = [
    "MODULE",
    "Frame",
    "cell_number",
    "has_magic",
    "is_module",
    "of_traceback",
    "place",
    "source",
    "source_line",
    "user_frame",
]

MODULE = "<module>"
_HOUSE = Path(__file__).resolve().parent
_LIBRARY = re.compile(
    r"/(site|dist)-packages/|/lib/python3[^/]*/|<frozen |<string>|<__array_function__"
)
_CELL = re.compile(r"/ipykernel_|[</]ipython-input-")  # the latter in a terminal, and on Colab
_COUNTED = re.compile(r"[</]ipython-input-(\d+)-")
_BLANK_LINES = 4
_LINE_CHARS = 300
_INSTALLED = re.compile(r".*/(?:(?:site|dist)-packages|lib/python3[^/]*)/")


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """One call on a stack."""

    file: str
    line: int
    function: str

    def __post_init__(self) -> None:
        if is_module(self.function):
            object.__setattr__(self, "function", MODULE)

    @property
    def is_house(self) -> bool:
        """Whether it is nbaccel's own."""
        return self.file.startswith(f"{_HOUSE}/")

    @property
    def is_library(self) -> bool:
        """Whether it is in an installed package, the standard library or nbaccel."""
        return self.is_house or bool(_LIBRARY.search(self.file))


def is_module(function: str) -> bool:
    """Whether code of this name stands outside of functions, at the top of a cell or file.

    Args:
        function: The name of a frame's code. IPython 7.34 and 8 have a name of their own for it.
    """
    return function == MODULE or function.startswith("<cell line: ")


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
    if (number := cell_number(frame.file)) is not None:
        return f"Cell In[{number}], line {frame.line}"
    if _CELL.search(frame.file):
        return f"a cell, line {frame.line}"
    if frame.is_house:
        return f"{Path(frame.file).relative_to(_HOUSE.parent)}:{frame.line}"
    if _LIBRARY.search(frame.file):
        return f"{_INSTALLED.sub('', frame.file)}:{frame.line}"
    return f"{Path(frame.file).name}:{frame.line}"


def cell_number(file: str) -> int | None:
    """The number that a cell was last run under, as in `In[7]`.

    Args:
        file: What its code was compiled as.

    Returns:
        The number; None where no cell that this process has run is called so.
    """
    shell = _shell()
    compiler = getattr(shell, "compile", None)
    names = getattr(compiler, "_filename_map", None)
    if names is not None:
        number = names.get(file)
    elif found := _COUNTED.search(file):
        number = found[1]
    else:
        number = _in_history(shell, compiler, file) if _CELL.search(file) else None
    return None if number is None else int(number)


def _in_history(shell: Any, compiler: Any, file: str) -> int | None:
    """Before IPython 8, nothing but the text of a cell tells under which name it was compiled."""
    history = getattr(shell, "history_manager", None)
    if history is None or compiler is None:  # a shell in a worker
        return None
    inputs = list(zip(history.input_hist_raw, history.input_hist_parsed, strict=False))
    for number in reversed(range(1, len(inputs))):
        raw, parsed = inputs[number]
        for num_blank in range(_BLANK_LINES):  # the history drops them at the end
            if _named(compiler, number, raw, parsed, num_blank) == file:
                return number
    return None


@lru_cache(maxsize=1024)
def _named(compiler: Any, number: int, raw: str, parsed: str, num_blank: int) -> str:
    end = "\n" * num_blank
    return str(compiler.get_code_name(raw + end, parsed + end, number))


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


def has_magic(name: str) -> bool:
    """Whether the IPython of this process has a line magic of nbaccel's extension.

    Args:
        name: The magic's name.
    """
    manager = getattr(_shell(), "magics_manager", None)
    found = manager.magics["line"].get(name) if manager is not None else None
    return getattr(found, "__module__", "").startswith("nbaccel.notebook.")


def _shell() -> object | None:
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None
