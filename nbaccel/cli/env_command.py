"""``nbaccel env``: what to paste in a bug report."""

from __future__ import annotations

from typing import Annotated

import typer


def add_to(app: typer.Typer) -> None:
    """Add the subcommand."""
    app.command(
        "env",
        help="Show versions, hardware, variables and the default configuration, to paste in a bug "
        "report. Nothing is initialised for it, and values that may be secret are left out.",
        short_help="what to paste in a bug report",
    )(_show)


def _show(
    config_file: Annotated[
        str | None,
        typer.Option("--config-file", metavar="FILE", help="Show this configuration file."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    # Here, so that `nbaccel --help` does not wait for it.
    from nbaccel.cli.environment_report import environment_facts, report_json, report_text

    facts = environment_facts(config_file)
    print(report_json(facts) if as_json else report_text(facts))
