"""The command ``nbaccel``: a strategy's module adds its subcommand and does its work."""

from __future__ import annotations

import argparse
import pkgutil
import sys
import textwrap
from collections.abc import Sequence

from nbaccel import __version__
from nbaccel.capabilities import STRATEGIES
from nbaccel.errors import InternalError, NbaccelError

__all__ = ["main"]

_MISTAKE = 2  # as argparse exits where an option is wrong
_INTERRUPTED = 130  # the shell's status for SIGINT
_WIDTH = 100


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: What comes after ``nbaccel``; None for those of this process.

    Returns:
        The exit status: 0, 2 for what the user can correct, 130 after an interrupt.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        status: int = options.run(options)
    except InternalError:
        # A bug of nbaccel needs its traceback.
        raise
    except NbaccelError as error:
        print(_paragraph(parser.prog, str(error)), file=sys.stderr)
        return _MISTAKE
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted; nothing has been changed", file=sys.stderr)
        return _INTERRUPTED
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nbaccel", description="Train on every chip of this machine, from a notebook cell."
    )
    parser.add_argument("--version", action="version", version=f"nbaccel {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for row in STRATEGIES:
        if row.command:
            pkgutil.resolve_name(row.command)(commands)
    return parser


def _paragraph(program: str, text: str) -> str:
    lines = f"{program}: {text}".splitlines()
    return "\n".join(
        textwrap.fill(line, _WIDTH, break_long_words=False, break_on_hyphens=False)
        for line in lines
    )
