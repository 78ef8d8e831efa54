"""``nbaccel launch script.py``: a script in every worker, with all that a notebook's launch has.

words ─► launch_options ─► launch_request ─► RunConfig ─► resolve ─► Plan
                                                             │
                 exit status ◄─ script_run ◄── run_script ◄──┘   (or --dry-run: a table)
"""

from __future__ import annotations

import importlib.machinery
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nbaccel.base.errors import ConfigError
from nbaccel.cli.launch_options import ConfigFile, add_command, own_option

if TYPE_CHECKING:
    from nbaccel.config.call_arguments import Script

_LAUNCH_HELP = """\
Run a script in one worker per device, as `torchrun` and `accelerate launch` do.

    nbaccel launch -n 2 --mixed-precision bf16 train.py --lr 0.1

What comes after the script belongs to the script. Options are written with `-` or `_`, and those
of `accelerate launch`, `torchrun` and `deepspeed` are understood, too, or said to have no effect.
Flags are stronger than the file of --config-file, which is stronger than the defaults; --dry-run
shows where each value is from and what would happen.
"""


def add_to(app: typer.Typer) -> None:
    """Add the subcommand."""
    short_help = "a script on all devices"
    add_command(app, "launch", _launch, description=_LAUNCH_HELP, short_help=short_help)


def _launch(
    script: str | None = typer.Argument(
        None, metavar="SCRIPT", help="A script; a module with -m.", show_default=False
    ),
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGS...", help="The script's own arguments.", show_default=False),
    ] = None,
    config_file: ConfigFile = None,
    module: bool = own_option(False, "-m", "--module", help="SCRIPT is a module: python -m."),
    no_python: bool = own_option(False, "--no-python", help="SCRIPT is a program."),
    dry_run: bool = own_option(
        False, "--dry-run", help="Show every setting, where it is from and the plan; start nothing."
    ),
    debug: bool = own_option(
        False, "--debug", help="Show whole tracebacks; sets ACCELERATE_DEBUG_MODE."
    ),
    quiet: bool = own_option(
        False, "-q", "--quiet", help="Leave out notes and warnings before the start."
    ),
    **further_options: Any,
) -> None:
    from nbaccel.cli import launch_request

    request = launch_request.read_launch_request(
        {**further_options, "debug": debug}, launch_request.read_settings_file(config_file)
    )
    read_script = _read_script(script or "SCRIPT", tuple(arguments or ()), module, no_python)
    if not dry_run:
        _check_script(read_script, is_given=script is not None)
    from nbaccel.cli.script_commands import command_of_engine

    command = command_of_engine(request, read_script)
    notes = (*request.notes, *(command.notes if command else ()))
    for note in notes if not quiet else ():
        print(f"nbaccel: {note}", file=sys.stderr)
    if dry_run:
        launch_request.show_dry_run(request, str(command or ""))
        raise typer.Exit
    if command is not None:
        command.take_over()
    from nbaccel.cli.script_run import run_to_exit_status

    raise typer.Exit(run_to_exit_status(read_script, request, is_quiet=quiet, is_debug=debug))


def _read_script(
    target: str, arguments: tuple[str, ...], is_module: bool, is_program: bool
) -> Script:
    # Here, so that --help needs none of the machinery of launches.
    from nbaccel.config.call_arguments import Script

    if is_module and is_program:
        raise ConfigError(
            f"-m and --no-python contradict each other for {target!r}. Leave one of them out."
        )
    if is_module:
        return Script(kind="module", target=target, arguments=arguments)
    return Script(kind="program" if is_program else "file", target=target, arguments=arguments)


def _check_script(script: Script, *, is_given: bool) -> None:
    target = script.target
    if not is_given:
        raise ConfigError(
            f"SCRIPT must be given, not {script!r}: nbaccel launch [options] script.py [arguments]."
        )
    if script.kind == "module":
        top_name = target.partition(".")[0]
        # Not find_spec of the whole name, which imports the packages above it.
        found = importlib.machinery.PathFinder.find_spec(top_name, [str(Path.cwd()), *sys.path])
        if found is None and top_name not in sys.builtin_module_names:
            raise ConfigError(
                f"-m {target!r}: there is no module {top_name!r} here or among the installed "
                f"packages. Nothing would run. Start where it can be imported: now {Path.cwd()}."
            )
    elif script.kind == "program" and shutil.which(target) is None:
        raise ConfigError(
            f"--no-python {target!r}: there is no such program. Nothing would run. Give its "
            "path, or leave --no-python out for a Python script."
        )
    elif script.kind == "file" and not Path(target).exists():
        raise ConfigError(
            f"{target!r} is not there: looked for it in {Path.cwd()}. Nothing would run. Give the "
            "path of the script, after all options and before its own arguments."
        )
