"""``nbaccel status``: what trains, for how long, how far; and stopping it."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from nbaccel.output.panel.run_notes import RunNote


def add_to(app: typer.Typer) -> None:
    """Add the subcommand."""
    app.command(
        "status",
        help="Show the runs of this user on this machine that go on: of notebooks, scripts and "
        "nbaccel launch. Runs that have ended are not shown.",
        short_help="what trains on this machine, and how far it is",
    )(_show)


def _show(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
    stop: Annotated[
        str | None,
        typer.Option(
            "--stop",
            metavar="ID",
            help="Stop a run, as its Stop button does: its id, or the number of its process.",
        ),
    ] = None,
) -> None:
    # Here, so that `nbaccel --help` does not wait for it.
    from nbaccel.output.panel.run_notes import interrupt_run, noted_runs

    if stop is not None:
        note = interrupt_run(stop)
        print(f"nbaccel: {note.name} (process {note.pid}) has been told to stop")
        return
    notes = noted_runs()
    if as_json:
        print(json.dumps([asdict(note) for note in notes], indent=1))
    elif notes:
        _print_table(notes)
    else:
        print("nbaccel: no run goes on")


def _print_table(notes: list[RunNote]) -> None:
    from nbaccel.base.units import format_number, format_seconds
    from nbaccel.cli.terminal import plain_table, terminal_console

    table = plain_table("", "id", "what", "for", "workers", "progress", "loss", "left")
    for note in notes:
        of_words = f" of {note.steps_in_all:,}" if note.steps_in_all else ""
        step = f"step {note.step:,}{of_words}" if note.step else ""
        in_words = f" in this {note.left_of}" if note.left_of else ""
        left_s = None if note.left_s is None else max(0.0, note.left_s - time.time() + note.seen)
        table.add_row(
            note.id,
            note.name,
            format_seconds(time.time() - note.began),
            str(note.num_workers),
            ", ".join(filter(None, (note.epoch, step))),
            format_number(note.loss),
            "-" if left_s is None else f"{format_seconds(left_s)}{in_words}",
        )
    terminal_console().print(table)
