"""The command nbaccel and its subcommands.

Each has a module, and a strategy's module may add its own.
"""

from __future__ import annotations

import pkgutil
import sys
import textwrap
from collections.abc import Sequence

import typer
from typer.main import get_command

from nbaccel import __version__
from nbaccel.base.errors import (
    InternalError,
    MissingBackend,
    NbaccelError,
    PlatformUnsupported,
    UserMistake,
)
from nbaccel.cli.terminal import as_people_read_it
from nbaccel.config.capabilities import STRATEGIES

__all__ = ["build_app", "main"]

_FAILED = 1
_MISTAKE = 2  # as typer exits where an option is wrong
_INTERRUPTED = 130  # the shell's status for SIGINT
_WIDTH = 100

_COMMANDS: tuple[str, ...] = (
    "nbaccel.cli.config_command:add_to",
    "nbaccel.cli.test_command:add_to",
    "nbaccel.cli.launch_command:add_to",
    "nbaccel.cli.export_command:add_to",
    "nbaccel.cli.estimate_command:add_to",
    "nbaccel.cli.merge_command:add_to",
    "nbaccel.cli.status_command:add_to",
    "nbaccel.cli.env_command:add_to",
)
"""Functions that add a subcommand to the app, as `module:function`, in the order of `--help`.

Their modules import nothing heavy: `nbaccel --help` answers without torch and pydantic.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    command = as_people_read_it(get_command(build_app()))
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        # `standalone_mode` prints usage errors itself, and raises SystemExit for them.
        command.main(args=given, prog_name="nbaccel", standalone_mode=True)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        # Typer ends so after an interrupt, without a word.
        return _tell_interrupt() if status == _INTERRUPTED else status
    except InternalError:
        # A bug of nbaccel needs its traceback.
        raise
    except NbaccelError as error:
        for line in f"nbaccel: {error}".splitlines():
            filled = textwrap.fill(line, _WIDTH, break_long_words=False, break_on_hyphens=False)
            print(filled, file=sys.stderr)
        is_correctable = isinstance(error, (UserMistake, MissingBackend, PlatformUnsupported))
        return _MISTAKE if is_correctable else _FAILED
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
        False,
        "--version",
        help="Show the version and exit.",
        callback=_version,
        is_eager=True,
    ),
) -> None:
    """Options of the command itself."""
