"""``nbaccel config``: questions about a run, whose answers later launches take as defaults."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from nbaccel.base.errors import ConfigError

if TYPE_CHECKING:
    from nbaccel.config import LoadedConfig, RunConfig

_FileOption = Annotated[
    Path | None,
    typer.Option(
        "--config-file",
        metavar="FILE",
        help="The file (default: $NBACCEL_CONFIG, or nbaccel/default_config.yaml in the user's "
        "cache folder).",
    ),
]
_OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", help="Replace a file that is there without asking.")
]
_PrecisionOption = Annotated[
    str | None,
    typer.Option("--mixed-precision", metavar="WORD", help="no, fp16, bf16 or fp8 (default: no)."),
]


def add_to(app: typer.Typer) -> None:
    """Add the subcommand."""
    config_app = typer.Typer(
        help="Ask how to train, and keep the answers in a file for later launches.",
        short_help="questions whose answers later launches take as defaults",
        invoke_without_command=True,
    )
    config_app.callback()(_ask)
    config_app.command("default", help="Write the defaults of this machine; ask nothing.")(_default)
    config_app.command(
        "update", help="Read a file, also one of Accelerate, and write it as this version does."
    )(_update)
    config_app.command(
        "import", help="Take over a file of Accelerate, of any version, and show what was mapped."
    )(_import)
    config_app.command("show", help="Show a file as it is read, and where it is.")(_show)
    config_app.command("schema", help="Print the JSON schema of the file, for editors.")(_schema)
    app.add_typer(config_app, name="config")


def _ask(
    context: typer.Context,
    config_file: _FileOption = None,
    is_default: bool = typer.Option(
        False, "--default", help="Ask nothing: write the defaults of this machine."
    ),
    mixed_precision: _PrecisionOption = None,
    overwrite: _OverwriteOption = False,
) -> None:
    if context.invoked_subcommand is not None:
        return
    if is_default:
        _default(config_file, mixed_precision, overwrite)
        return
    from nbaccel.cli.config_questions import ask_config
    from nbaccel.plan.inspecting import inspect_machine

    console = Console(highlight=False)
    path = _file_path(config_file)
    if path.exists():
        console.print(
            f"[yellow]{path} is there already;[/yellow] it stays until you confirm at the end.",
            soft_wrap=True,
        )
    config = ask_config(console, inspect_machine(), mixed_precision=mixed_precision)
    _save(console, config, path, overwrite=overwrite)


def _default(
    config_file: _FileOption = None,
    mixed_precision: _PrecisionOption = None,
    overwrite: _OverwriteOption = False,
) -> None:
    from nbaccel.config import RunConfig
    from nbaccel.plan.resolving import resolve

    console = Console(highlight=False)
    # Resolved first: a precision that this machine lacks is refused before anything is written.
    plan = resolve(RunConfig(mixed_precision=mixed_precision or "no"))
    config = RunConfig(
        num_processes=plan.num_processes,
        device=plan.device,
        mixed_precision=plan.config.mixed_precision,
    )
    _save(console, config, _file_path(config_file), overwrite=overwrite)


def _update(config_file: _FileOption = None, overwrite: _OverwriteOption = False) -> None:
    path = _existing_file(config_file)
    console = Console(highlight=False)
    loaded = _load_and_show_mapped(console, path)
    # Accelerate could not read the file any more, so that its owner is asked.
    _save(console, loaded.config, path, overwrite=overwrite or not loaded.is_accelerate)


def _import(
    source: Annotated[
        Path | None,
        typer.Argument(metavar="SOURCE", help="Accelerate's file (default: where it keeps it)."),
    ] = None,
    config_file: _FileOption = None,
    overwrite: _OverwriteOption = False,
) -> None:
    from nbaccel.config.config_files import accelerate_path

    if source is None and not accelerate_path().is_file():
        raise ConfigError(
            f"Accelerate has no configuration file {accelerate_path()} to take over. Give a path."
        )
    console = Console(highlight=False)
    loaded = _load_and_show_mapped(console, source or accelerate_path())
    _save(console, loaded.config, _file_path(config_file), overwrite=overwrite)


def _show(config_file: _FileOption = None) -> None:
    console = Console(highlight=False)
    loaded = _load_and_show_mapped(console, _existing_file(config_file))
    console.print(f"[bold]{loaded.path}[/bold]", soft_wrap=True)
    _show_yaml(console, loaded.config.to_yaml())


def _schema() -> None:
    from nbaccel.config.config_files import schema_text

    print(schema_text(), end="")


def _file_path(config_file: Path | None) -> Path:
    from nbaccel.config import default_config_path

    return default_config_path() if config_file is None else config_file.expanduser()


def _existing_file(config_file: Path | None) -> Path:
    path = _file_path(config_file)
    if not path.is_file():
        raise ConfigError(
            f"There is no configuration file {path}. Without one every launch takes the defaults. "
            "Write one with nbaccel config, or give --config_file."
        )
    return path


def _save(console: Console, config: RunConfig, path: Path, *, overwrite: bool) -> None:
    from rich.prompt import Confirm
    from rich.syntax import Syntax

    from nbaccel.config.config_files import config_text, write_config_file

    new_text = config_text(config)
    old_text = path.read_text(encoding="utf-8") if path.is_file() else None
    if old_text == new_text:
        console.print(f"{path} says this already; nothing was changed.", soft_wrap=True)
        return
    if old_text is not None and not overwrite:
        lines, new_lines = old_text.splitlines(), new_text.splitlines()
        changes = "\n".join(
            difflib.unified_diff(lines, new_lines, "as it is", "as it would be", lineterm="")
        )
        console.print(f"[yellow]{path} is there already. It would change:[/yellow]", soft_wrap=True)
        console.print(Syntax(changes, "diff", theme="ansi_dark", background_color="default"))
        try:
            is_confirmed = Confirm.ask("Replace it?", console=console, default=False)
        except EOFError as error:
            raise ConfigError(
                f"{path} is there already, and there is nobody to ask. It was left as it is. Give "
                "--overwrite, or another --config_file."
            ) from error
        if not is_confirmed:
            console.print("Nothing was written.")
            raise typer.Exit(1)
    write_config_file(config, path)
    _show_yaml(console, config.to_yaml())
    console.print(f"[green]Written to {path}.[/green]", soft_wrap=True)


def _show_yaml(console: Console, yaml_text: str) -> None:
    from rich.syntax import Syntax

    text = yaml_text.rstrip() or "{}"
    console.print(Syntax(text, "yaml", theme="ansi_dark", background_color="default"))


def _load_and_show_mapped(console: Console, path: Path) -> LoadedConfig:
    """Read a file; of one of Accelerate's, tell what became of each key."""
    from nbaccel.config import load_config_file

    loaded = load_config_file(path)
    if not loaded.is_accelerate:
        return loaded
    table = Table(title=f"{loaded.path}: what was mapped", title_justify="left")
    for title in ("Accelerate's key", "value", "what it became"):
        table.add_column(title, overflow="fold")
    for key in loaded.mapped_keys:
        if key.outcome != "empty":
            outcome = key.outcome if key.is_used else f"[dim]- {key.outcome}[/dim]"
            table.add_row(key.key, str(key.value), outcome)
    console.print(table)
    num_empty = sum(key.outcome == "empty" for key in loaded.mapped_keys)
    if num_empty:
        console.print(f"[dim]Empty, and left out: {num_empty} more.[/dim]")
    return loaded
