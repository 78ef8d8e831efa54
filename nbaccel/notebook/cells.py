"""The code of a `%%accelerate` cell, with the line numbers that the user sees."""

from __future__ import annotations

import inspect
import itertools
import linecache
from collections.abc import Callable

from IPython.core.interactiveshell import ExecutionInfo, InteractiveShell

from nbaccel.base import ipython_private
from nbaccel.base.frames import Frame, cell_number, is_module
from nbaccel.calls.pool_planning import CellSource

CELL_MAGIC = "%%accelerate"


def is_for_us(line: str) -> bool:
    """Whether a line is that of nbaccel's cell magic."""
    return line.split(maxsplit=1)[:1] == [CELL_MAGIC]


class Cells:
    """Knows the cell that is being run as it was written."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._serial = itertools.count(1)
        self._raw = ""
        self._stack: list[tuple[str, int]] = []

    def load(self) -> Callable[[], None]:
        """Register for events and transform cells; returns what undoes that."""
        cleanup = self._shell.input_transformers_cleanup
        # IPython's own transformers look for a cell magic on the first line; these run before them.
        transformers = (below_comments, with_a_body)
        self._shell.events.register("pre_run_cell", self._note)
        cleanup.extend(transformers)

        def unload() -> None:
            self._shell.events.unregister("pre_run_cell", self._note)
            for transformer in transformers:
                cleanup.remove(transformer)

        return unload

    def source(self, arguments: str, text: str) -> CellSource:
        """The record of a cell for the workers; its lines are published in this process, too."""
        lines, lines_above = self._lines(arguments, text)
        count = self._count()
        # A new name per execution, because a function keeps the lines it was made of.
        name = f"<ipython-input-{count}-accelerate-{next(self._serial)}>"
        source = CellSource(
            text=text,
            filename=name,
            cell=tuple(f"{line}\n" for line in lines),
            first_line=lines_above + 1,
            count=count,
        )
        source.publish()
        # How IPython says In[7]; before 8 it has the number from the name.
        ipython_private.number_cell(self._shell.compile, name, count)
        return source

    def _note(self, info: ExecutionInfo) -> None:
        self._raw = info.raw_cell or ""

    def _count(self) -> int:
        # IPython 9 increments its counter before a cell, others afterwards; the name is right.
        cell_numbers = (cell_number(name) for name, _ in self._stack)
        return next(filter(None, cell_numbers), int(self._shell.execution_count))

    def _lines(self, arguments: str, text: str) -> tuple[list[str], int]:
        """The cell's lines as the user sees them, and how many stand above the code."""
        raw_lines = self._raw.rstrip().splitlines()
        code_lines = text.rstrip().splitlines()
        lines_above = len(raw_lines) - len(code_lines)
        # Blank lines and `%%time` may stand above. Code may call the magic, without a cell.
        if lines_above > 0 and [line.strip() for line in raw_lines[lines_above:]] == [
            code_line.strip() for code_line in code_lines
        ]:
            return raw_lines, lines_above
        return [f"{CELL_MAGIC} {arguments}".rstrip(), *code_lines], 1

    def as_written(self) -> None:
        """Let errors show the magic's line as written, not the call that IPython makes of it."""
        self._stack = _user_lines()
        for name, line_number in self._stack:
            entry = linecache.cache.get(name)
            # An entry that linecache fills in later has one item and no lines yet.
            if entry is None or len(entry) != 4 or line_number > len(entry[2]):
                continue
            lines = list(entry[2])
            raw_lines = self._raw.strip("\n").splitlines()
            call = lines[line_number - 1]
            if "run_cell_magic(" in call and any(map(is_for_us, raw_lines)):
                lines = [f"{line}\n" for line in raw_lines]
            elif "run_line_magic(" in call and len(lines) == len(raw_lines):
                lines[line_number - 1] = f"{raw_lines[line_number - 1]}\n"
            # Without a time of change, or `linecache.checkcache` drops an entry that has no file.
            entry = (sum(map(len, lines)), None, lines, name)
            linecache.cache[name] = entry
            ipython_private.keep_cell_lines(name, entry)


def below_comments(lines: list[str]) -> list[str]:
    """Lets `%%accelerate` stand below comments: IPython finds a magic on the first line only."""
    code_lines = (n for n, line in enumerate(lines) if line.strip()[:1] not in ("", "#"))
    lines_above = next(code_lines, 0)
    if not lines_above or not is_for_us(lines[lines_above]):
        return lines
    return [lines[lines_above], *lines[:lines_above], *lines[lines_above + 1 :]]


def with_a_body(lines: list[str]) -> list[str]:
    """Gives `%%accelerate` without code a blank line: IPython calls no magic without one."""
    filled = [line for line in lines if line.strip()]
    return [*lines, "\n"] if len(filled) == 1 and is_for_us(filled[0]) else lines


def _user_lines() -> list[tuple[str, int]]:
    """File and line of each top-level frame of the user's code in the present call stack."""
    found = []
    frame = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        is_top = code.co_name[0] == "<" and is_module(code.co_name)
        if is_top and not Frame(file=code.co_filename, line=0, function="").is_library:
            # Only here: a frame works out its line when it is asked, and a stack has dozens.
            found.append((code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return found
