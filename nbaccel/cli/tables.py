"""Plain tables of rich, as the subcommands print them."""

from __future__ import annotations

import sys

from rich.console import Console as TerminalConsole
from rich.table import Table

_WIDTH_CHARS = 100


def terminal_console() -> TerminalConsole:
    """Where tables are printed: as wide as the terminal, or as a page of text."""
    # A pipe has no width; a file is read by people, too.
    width = None if sys.stdout.isatty() else _WIDTH_CHARS
    return TerminalConsole(width=width, highlight=False)


def plain_table(title: str, *columns: str) -> Table:
    """A table without lines, whose long cells are wrapped."""
    table = Table(
        title=title or None, title_justify="left", box=None, pad_edge=False, show_edge=False
    )
    for column in columns:
        table.add_column(column, header_style="bold", overflow="fold")
    return table
