"""Help of commands without what typer adds of Python."""

from __future__ import annotations

from typing import Any

import typer


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
