"""What ``nbaccel launch --dry-run`` and ``--peer-options`` show."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.table import Table

from nbaccel.base import env
from nbaccel.cli.engine_command import EngineCommand
from nbaccel.cli.launch_request import LaunchRequest, plan_of_command
from nbaccel.cli.peer_options import PEER_OPTIONS
from nbaccel.cli.terminal import plain_table, terminal_console
from nbaccel.config import RunConfig

_SHOWN_CHARS = 60


def show_dry_run(request: LaunchRequest, engine_command: EngineCommand | None) -> None:
    """Print every setting with its source, and the plan, or the command. Nothing is started."""
    console = terminal_console()
    console.print(_settings_table(request))
    if request.variables:
        console.print(_variables_table(request))
    console.print()
    # The plan's own text is for a fixed width: rich would break its lines anew.
    if engine_command is not None:
        sys.stdout.write(f"What would run:\n\n    {engine_command}\n")
    else:
        with env.applied(dict(request.variables)):
            sys.stdout.write(f"{plan_of_command(request.config).explain()}\n")
    sys.stdout.write("\nNothing was started: --dry-run.\n")


def show_peer_options() -> None:
    """Print each option of other commands, and what it does here."""
    console = terminal_console()
    for peer in dict.fromkeys(option.peer for option in PEER_OPTIONS):
        table = plain_table(f"Options of {peer}", "option", "here")
        for option in PEER_OPTIONS:
            if option.peer == peer:
                table.add_row(", ".join(option.flags), option.meaning)
        console.print(table)
        console.print()


def _settings_table(request: LaunchRequest) -> Table:
    table = plain_table("Settings", "setting", "value", "from")
    for name in RunConfig.model_fields:
        source = request.source_of(name)
        table.add_row(
            name,
            _shortened_value(getattr(request.config, name)),
            source,
            style="dim" if source == "default" else None,
        )
    return table


def _variables_table(request: LaunchRequest) -> Table:
    table = plain_table("Environment of workers", "variable", "value", "from")
    for name, value in request.variables.items():
        table.add_row(name, value, request.variable_sources[name])
    return table


def _shortened_value(value: Any) -> str:
    if isinstance(value, dict):
        text = json.dumps(value)
        return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 2]} …"
    return "" if value is None else str(value)
