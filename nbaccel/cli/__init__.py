"""The command nbaccel and its subcommands, to which strategies may add; what a terminal shows."""

from __future__ import annotations

import pkgutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

import typer
from rich.console import Console as TerminalConsole
from rich.table import Table
from typer.main import get_command

from nbaccel import __version__
from nbaccel.base import errors
from nbaccel.config.capabilities import STRATEGIES


def as_people_read_it(command: Any, parent: typer.Context | None = None) -> Any:
    """Leave Python's types out of the help that Typer writes, and put the group `config` first."""
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
    return TerminalConsole(width=None if sys.stdout.isatty() else _WIDTH_CHARS, highlight=False)


def plain_table(title: str, *columns: str) -> Table:
    """A table without lines, whose long cells are wrapped."""
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, header_style="bold", overflow="fold")
    return table


__all__ = ["build_app", "main"]

_FAILED = 1
_MISTAKE = 2  # as typer exits where an option is wrong
_INTERRUPTED = 130  # the shell's status for SIGINT

_COMMANDS: tuple[str, ...] = (
    "nbaccel.cli.config_command:add_to",
    "nbaccel.cli.launch_command:add_to",
    "nbaccel.cli.commands:add_others",
)
"""Functions that add a subcommand to the app, as `module:function`, in the order of `--help`.

Their modules import nothing heavy: `nbaccel --help` answers without torch and pydantic.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    command = as_people_read_it(get_command(build_app()))
    try:
        # `standalone_mode` prints usage errors itself, and raises SystemExit for them.
        command.main(args=arguments, prog_name="nbaccel", standalone_mode=True)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        # Typer ends so after an interrupt, without a word.
        return _tell_interrupt() if status == _INTERRUPTED else status
    except errors.InternalError:
        # A bug of nbaccel needs its traceback.
        raise
    except errors.NbaccelError as error:
        for line in f"nbaccel: {error}".splitlines():
            text = textwrap.fill(line, _WIDTH_CHARS, break_long_words=False, break_on_hyphens=False)
            print(text, file=sys.stderr)
        correctable = (errors.UserMistake, errors.MissingBackend, errors.PlatformUnsupported)
        return _MISTAKE if isinstance(error, correctable) else _FAILED
    except KeyboardInterrupt:
        return _tell_interrupt()
    return 0


def build_app() -> typer.Typer:
    """The command with all its subcommands."""
    app = typer.Typer(
        name="nbaccel",
        help="Train on every chip of this machine: from a notebook cell, a shell or a cluster.",
        no_args_is_help=True,
        # Errors of the user's code and ours have their own reports.
        pretty_exceptions_enable=False,
        context_settings={
            "help_option_names": ["-h", "--help"],
            # Accelerate's users write --config_file and --num-processes alike.
            "token_normalize_func": lambda token: token.replace("_", "-"),
        },
    )
    app.callback()(_options)
    strategy_commands = [row.command for row in STRATEGIES if row.command]
    for add_command in (*_COMMANDS, *strategy_commands):
        pkgutil.resolve_name(add_command)(app)
    return app


def _tell_interrupt() -> int:
    print("nbaccel: interrupted", file=sys.stderr)
    return _INTERRUPTED


def _version(is_asked: bool) -> None:
    if is_asked:
        print(f"nbaccel {__version__}")
        raise typer.Exit


def _options(
    version: bool = typer.Option(
        False, "--version", help="Show the version and exit.", callback=_version, is_eager=True
    ),
) -> None:
    """Options of the command itself."""
