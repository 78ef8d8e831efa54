"""What subcommands show in a terminal: help without what typer adds of Python, and plain tables."""

from __future__ import annotations

import sys
from typing import Any

import typer
from rich.console import Console as TerminalConsole
from rich.table import Table


def as_people_read_it(command: Any, parent: typer.Context | None = None) -> Any:
    """Leave `<bool>`, `<str>` and `<int range>` out of the help of a command and its subcommands.

    Typer writes Python's types there. It writes groups last, and `config`, a group, comes first.
    """
    context = typer.Context(command, parent=parent, **command.context_settings)
    for option in command.get_params(context):
        option.display_type = lambda _: ""
    subcommands = getattr(command, "commands", {})
    for subcommand in subcommands.values():
        as_people_read_it(subcommand, context)
    if "config" in subcommands:
        command.commands = {"config": subcommands["config"], **subcommands}
    return command


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
