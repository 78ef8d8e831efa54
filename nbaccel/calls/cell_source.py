"""The code of one cell, as it is sent to the workers."""

from __future__ import annotations

import linecache
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CellSource:
    """What is to be run, and how frames in it are shown to the user.

    The same record serves both sides: notebook and workers know the lines under the same name, so
    that a traceback reads the same wherever it is shown.
    """

    text: str
    """The code: a cell without its magic line."""
    filename: str
    """Under which frames name it."""
    cell: tuple[str, ...]
    """The lines of the cell as the user sees them, each with its line end."""
    first_line: int = 1
    """Number of the text's first line in the cell: 2 behind a line with `%%accelerate`."""
    count: int | None = None
    """The cell's execution count: 7 for `In [7]`."""

    @classmethod
    def of_text(
        cls, text: str, *, filename: str, magic_line: str = "", count: int | None = None
    ) -> CellSource:
        """The source of a cell."""
        lines_above = [magic_line + "\n"] if magic_line else []
        cell_lines = [cell_line + "\n" for cell_line in text.splitlines()]
        return cls(
            text=text,
            filename=filename,
            cell=tuple(lines_above + cell_lines),
            first_line=len(lines_above) + 1,
            count=count,
        )

    def publish(self) -> None:
        """Let tracebacks of this process find the lines."""
        lines = list(self.cell)
        linecache.cache[self.filename] = (
            sum(map(len, lines)),
            # No modification time, or linecache would look for the file and drop the lines.
            None,
            lines,
            self.filename,
        )
