"""How errors look in a notebook: what happened, and the user's own lines.

IPython asks an exception for its `_render_traceback_` before it draws a traceback of its own,
which here would be a wall of frames of nbaccel.
"""

from __future__ import annotations

import re
import textwrap

from nbaccel import frames

__all__ = ["coloured", "render_failure", "render_mistake"]

_RED, _BOLD, _GREEN, _OFF = "\x1b[31m", "\x1b[1m", "\x1b[32m", "\x1b[39;49;00m"
_LINE_CHARS = 100
_SOURCE = re.compile(r"^  (---->|     ) ")
_ARROW = re.compile(r"^  ---->")
_FILE = re.compile(r'^  File "(.+)", line \d+', re.MULTILINE)
_PLACE = re.compile(r"^  (?P<place>.+, line \d+|\S+:\d+)(?P<rest>, in .+)$")
_SPELL = "import sys; print(sys.last_value.__cause__)"
_NO_DEBUGGER = (
    "%debug cannot enter a worker: run the function with num_processes=1, or the cell without "
    "%%accelerate, and it can."
)


def render_mistake(error: BaseException) -> list[str]:
    """An error whose reason is in the cell: the user's frames, then the text.

    Args:
        error: What was raised.

    Returns:
        Lines with colours (ANSI).
    """
    own = [f for f in frames.of_traceback(error.__traceback__) if not f.is_library]
    # What `%%time` compiles has no lines: IPython 7 shows its errors without the cell's own frame.
    own = [frame for frame in own if not frame.file.startswith("<timed ")]
    lines: list[str] = []
    for frame in own[-4:]:
        inside = "" if frame.function == frames.MODULE else f", in {frame.function}"
        lines.append(f"  {_GREEN}{frames.place(frame)}{_OFF}{inside}")
        lines += map(coloured, frames.source(frame, around=0))
    return [*lines, *_named(error)]


def render_failure(error: BaseException) -> list[str]:
    """An error whose reason is in another process: the text has the frames that matter.

    Args:
        error: What was raised.

    Returns:
        Lines with colours (ANSI).
    """
    lines = _named(error)
    own = [f for f in frames.of_traceback(error.__traceback__) if not f.is_library]
    if len(own) > 1:  # launched from a function: which one is not to be seen from the cell
        lines.append(f"Launched at {' → '.join(map(frames.place, own))}.")
    told = sum("---->" in line for line in lines)
    if len(_foreign_files(str(error.__cause__))) > told:
        spell = "%accelerate traceback" if frames.has_magic("accelerate") else _SPELL
        lines.append(f"The whole traceback: {spell}")
    if error.__cause__ is not None:
        lines.append(_NO_DEBUGGER)
    return lines


def _foreign_files(traceback: str) -> list[str]:
    """The file of each frame that is not nbaccel's own."""
    files = _FILE.findall(traceback)
    return [f for f in files if not frames.Frame(file=f, line=0, function="").is_house]


def _named(error: BaseException) -> list[str]:
    """The class and the text, coloured, in lines that a cell's width does not break in a word."""
    name = type(error).__name__
    first, *rest = f"{name}: {error}".rstrip(": ").split("\n")
    head, *more = _wrapped(first)
    lines = [f"{_BOLD}{_RED}{name}{_OFF}{head[len(name) :]}", *more]
    for line in rest:
        lines += [coloured(line)] if _SOURCE.match(line) else map(coloured, _wrapped(line))
    return lines


def _wrapped(line: str) -> list[str]:
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.wrap(
        line,
        _LINE_CHARS,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [""]


def coloured(line: str, *, bold: bool = False) -> str:
    """A line as it is shown: places green, the arrow and what stands out red.

    Args:
        line: Its text.
        bold: Whether it stands out.
    """
    if bold:
        return f"{_BOLD}{_RED}{line}{_OFF}"
    if _ARROW.match(line):
        return f"{_BOLD}{_RED}{line[:7]}{_OFF}{_BOLD}{line[7:]}{_OFF}"
    found = _PLACE.match(line)
    if found:
        return f"  {_GREEN}{found['place']}{_OFF}{found['rest']}"
    return line
