"""The options of all commands as lines; run as a module, it renews ``options.txt``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

from nbaccel.cli import build_app

FROZEN_FILE = Path(__file__).parent / "options.txt"


def option_lines() -> list[str]:
    """``nbaccel config default --config-file``, one line for each option and argument."""
    return sorted(_lines_of(get_command(build_app()), "nbaccel"))


def _lines_of(command: Any, name: str) -> Iterator[str]:
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            yield f"{name} {parameter.name.upper()}"
        else:
            yield f"{name} {', '.join([*parameter.opts, *parameter.secondary_opts])}"
    for inner_name, inner_command in getattr(command, "commands", {}).items():
        yield from _lines_of(inner_command, f"{name} {inner_name}")


if __name__ == "__main__":
    FROZEN_FILE.write_text("\n".join(option_lines()) + "\n")
