"""The help of `%%accelerate` and `%accelerate`, made from their options."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from nbaccel.config import RunConfig
from nbaccel.notebook.options import OWN, SUBCOMMANDS, Option, Subcommand, options_of, settings

__all__ = ["cell_manual", "line_manual", "subcommand_manual"]

_LINE_CHARS = 92
_COLUMN_CHARS = 30

_CELL = """\
Run this cell in worker processes that live on, with their variables, from cell to cell.

    %%accelerate -n 2 --precision bf16 --out loss
    model = nn.Linear(4, 4)
    loss = step(model)

Variables and functions of the notebook that the cell reads are sent when they are first needed
and when they have changed since. The last expression is shown by rank, once where all agree.
Trained weights of the notebook's own modules come back after the cell.

The first cell starts the workers. Their settings stay until %accelerate restart.
"""

_LINE = """\
Look after the workers that %%accelerate cells run in.

    %accelerate restart -n 4 --precision bf16
    %accelerate pull loss model --ranks 0
"""


def cell_manual() -> str:
    """What `%%accelerate?` shows."""
    parts = [
        _CELL,
        _section("Options of the cell:", _rows(OWN)),
        _section("Settings of the workers:", _rows(settings())),
        _VALUES,
    ]
    return "\n".join(parts)


def line_manual() -> str:
    """What `%accelerate?` shows."""
    subcommands = [line for sub in SUBCOMMANDS for line in _row(_written(sub), sub.meaning)]
    more = [option for option in options_of("restart") if not option.is_setting]
    parts = [
        _LINE,
        _section("Subcommands:", subcommands),
        _section("Options of restart and config: all settings of %%accelerate?, and", _rows(more)),
        _section("Options of pull and push:", _rows(options_of("pull"))),
        _VALUES,
    ]
    return "\n".join(parts)


def subcommand_manual(name: str) -> str:
    """What `%accelerate restart --help` shows.

    Args:
        name: The subcommand.
    """
    sub = next(sub for sub in SUBCOMMANDS if sub.name == name)
    return "\n".join(
        [f"%accelerate {_written(sub)}", "", sub.meaning, "", *_rows(options_of(name))]
    )


_VALUES = """\
"none" leaves a choice to the plan. $name and {expression} are replaced by the notebook's values."""


def _section(title: str, rows: Iterable[str]) -> str:
    return "\n".join([title, *rows, ""])


def _written(sub: Subcommand) -> str:
    parts = [sub.name]
    if sub.names:
        parts.append("NAME...")
    if sub.options:
        parts.append("[options]")
    return " ".join(parts)


def _rows(options: Iterable[Option]) -> list[str]:
    return [line for option in options for line in _row(_head(option), _meaning(option))]


def _head(option: Option) -> str:
    flags = ", ".join(option.flags)
    if option.negative:
        return f"{flags}, {option.negative}"
    return f"{flags} {option.value}".rstrip()


def _meaning(option: Option) -> str:
    if not option.is_setting:
        return option.meaning
    default = RunConfig.model_fields[option.name].default
    if default in (None, ""):
        return option.meaning
    if option.negative:
        return f"{option.meaning} (default {'yes' if default else 'no'})"
    return f"{option.meaning} (default {default})"


def _row(head: str, meaning: str) -> list[str]:
    """One entry: what is written, and beside or under it what it means."""
    indent = " " * (_COLUMN_CHARS + 2)
    lines = textwrap.wrap(meaning, _LINE_CHARS - len(indent), break_on_hyphens=False)
    if len(head) > _COLUMN_CHARS - 2:
        return [f"  {head}", *(indent + line for line in lines)]
    first = f"  {head:<{_COLUMN_CHARS}}{lines[0]}"
    return [first, *(indent + line for line in lines[1:])]
