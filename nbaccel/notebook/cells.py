"""The code of a `%%accelerate` cell, with the line numbers that the user sees."""

from __future__ import annotations

import itertools
import linecache
import sys
from collections.abc import Iterator
from types import FrameType

from IPython.core.interactiveshell import ExecutionInfo, InteractiveShell

from nbaccel.frames import Frame, cell_number, is_module
from nbaccel.pool.source import Source

__all__ = ["MAGIC", "Cells", "is_for_us"]

MAGIC = "%%accelerate"


def is_for_us(line: str) -> bool:
    """Whether a line is that of our cell magic."""
    return line.split(maxsplit=1)[:1] == [MAGIC]


class Cells:
    """Knows the cell that is being run as it was written."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._serial = itertools.count(1)
        self._raw = ""

    def load(self) -> None:
        """Begin to listen."""
        self._shell.events.register("pre_run_cell", self._note)
        self._shell.input_transformers_cleanup.extend((below_comments, with_a_body))

    def unload(self) -> None:
        """Listen no more."""
        self._shell.events.unregister("pre_run_cell", self._note)
        self._shell.input_transformers_cleanup.remove(with_a_body)
        self._shell.input_transformers_cleanup.remove(below_comments)

    def source(self, line: str, text: str) -> Source:
        """The record of a cell for the workers; its lines are published in this process, too.

        Args:
            line: What stands behind the magic.
            text: What stands below it.
        """
        lines, above = self._lines(line, text)
        count = self._count()
        # Each execution has a name of its own: a function keeps the lines it was made of.
        name = f"<ipython-input-{count}-accelerate-{next(self._serial)}>"
        source = Source(
            text=text,
            filename=name,
            cell=tuple(f"{line}\n" for line in lines),
            first_line=above + 1,
            count=count,
        )
        source.publish()
        # How IPython says In[7]; before 8 it has the number from the name.
        getattr(self._shell.compile, "_filename_map", {})[name] = count
        return source

    def _note(self, info: ExecutionInfo) -> None:
        self._raw = info.raw_cell or ""

    def _count(self) -> int:
        """The number that the running cell is shown with."""
        # IPython 9 counts up before it runs a cell, earlier ones do afterwards. What the cell was
        # compiled under is right in both.
        numbers = (cell_number(file) for file, _ in _user_lines())
        found = (number for number in numbers if number is not None)
        return next(found, int(self._shell.execution_count))

    def _lines(self, line: str, text: str) -> tuple[list[str], int]:
        """The cell's lines as the user sees them, and how many stand above the code."""
        raw, body = self._raw.splitlines(), text.splitlines()
        while body and not body[-1].strip():
            body.pop()
        while raw and not raw[-1].strip():
            raw.pop()
        above = len(raw) - len(body)
        # IPython drops blank lines at the top, and `%%time` may stand above us. Where the cell
        # that runs does not end in our code, it was called by code: then ours is all there is.
        if above > 0 and [r.strip() for r in raw[above:]] == [b.strip() for b in body]:
            return raw, above
        return [f"{MAGIC} {line}".rstrip(), *body], 1

    def as_written(self) -> None:
        """Let errors show our line as it was written, not the call that IPython makes of it."""
        for name, number in _user_lines():
            entry = linecache.cache.get(name)
            if entry is None or len(entry) != 4 or number > len(entry[2]):
                continue
            shown, raw = list(entry[2]), self._raw.strip("\n").splitlines()
            call = shown[number - 1]
            if "run_cell_magic(" in call and any(map(is_for_us, raw)):
                shown = [f"{line}\n" for line in raw]
            elif "run_line_magic(" in call and len(shown) == len(raw):
                shown[number - 1] = f"{raw[number - 1]}\n"
            entry = (sum(map(len, shown)), None, shown, name)
            linecache.cache[name] = entry
            # IPython 7 restores the lines of cells from here whenever the cache is checked.
            getattr(linecache, "_ipython_cache", {})[name] = entry


def below_comments(lines: list[str]) -> list[str]:
    """Lets `%%accelerate` stand below comments: IPython knows a magic on the first line only.

    Args:
        lines: The lines of any cell.

    Returns:
        The same; or the magic first, then the comments, so that the code keeps its line numbers.
    """
    above = 0
    while above < len(lines) and lines[above].strip()[:1] in ("", "#"):
        above += 1
    if not above or above == len(lines) or not is_for_us(lines[above]):
        return lines
    return [lines[above], *lines[:above], *lines[above + 1 :]]


def with_a_body(lines: list[str]) -> list[str]:
    """Gives `%%accelerate` without code a blank line: IPython would not call a magic without one.

    Args:
        lines: The lines of any cell.

    Returns:
        The same, or with one more.
    """
    filled = [line for line in lines if line.strip()]
    return [*lines, "\n"] if len(filled) == 1 and is_for_us(filled[0]) else lines


def _user_lines() -> Iterator[tuple[str, int]]:
    """File and line of each top-level frame of the user's code that we were called by."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the only way to the frames above
    while frame is not None:
        code = frame.f_code
        if (
            is_module(code.co_name)
            and not Frame(file=code.co_filename, line=0, function="").is_library
        ):
            yield code.co_filename, frame.f_lineno
        frame = frame.f_back
