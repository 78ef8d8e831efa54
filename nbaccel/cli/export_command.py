"""``nbaccel export NOTEBOOK``: a script out of a notebook, and what runs it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nbaccel.base.errors import ConfigError
from nbaccel.cli.launch_options import ConfigFile, add_command, own_option

if TYPE_CHECKING:
    from nbaccel.cli.job_files import ExportedFile
    from nbaccel.cli.script_making import MadeScript
    from nbaccel.config import RunConfig

_CLUSTERS = ("slurm", "ray")
_TARGETS = ("nbaccel", "torchrun", "accelerate", "deepspeed", *_CLUSTERS)
_EXPORT_HELP = """\
Write a script out of a notebook, and the command line or job that runs it.

    nbaccel export train.ipynb --to slurm --nproc-per-node 8 --num-nodes 2

The script has the cells with the tag `export`, or else the function of the notebook's call of
notebook_launcher with all that it needs. Cells with the tag `nbaccel-skip` are left out. Settings
are those of the call over what nbaccel config has saved; --config-file, and flags as after
nbaccel launch, come last.
"""


def add_to(app: typer.Typer) -> None:
    """Add the subcommand."""
    add_command(
        app,
        "export",
        _export,
        description=_EXPORT_HELP,
        short_help="a script and a job out of a notebook",
        takes_script=False,
    )


_NotebookOption = Annotated[
    str, typer.Argument(metavar="NOTEBOOK", help="A saved .ipynb file.", show_default=False)
]
_ToOption = Annotated[
    str, own_option("--to", metavar="|".join(_TARGETS), meaning="What runs the script.")
]
_OutputOption = Annotated[
    str | None,
    own_option(
        *("-o", "--output"),
        metavar="SCRIPT",
        meaning="The script's file; left out: the notebook's name, here.",
        show_default=False,
    ),
]
_FunctionOption = Annotated[
    str,
    own_option(
        "--function",
        metavar="NAME",
        meaning="The launched function, where the notebook launches several.",
        show_default=False,
    ),
]
_ReplaceOption = Annotated[bool, own_option("--overwrite", meaning="Replace files that are there.")]


def _export(
    notebook: _NotebookOption,
    to: _ToOption = "nbaccel",
    output: _OutputOption = None,
    function: _FunctionOption = "",
    overwrite: _ReplaceOption = False,
    config_file: ConfigFile = None,
    **further_options: Any,
) -> None:
    from nbaccel.cli.script_making import make_script, read_notebook

    if to not in _TARGETS:
        raise ConfigError(
            f"--to must be one of {', '.join(_TARGETS)}: got {to!r}. It says what runs the script. "
            "Leave it out for nbaccel launch."
        )
    notebook_path = Path(notebook)
    script_path = Path(output or f"{_module_name(notebook_path.stem)}.py")
    made_script = make_script(read_notebook(notebook_path), notebook_path.name, function)
    _check_script(made_script.text)
    if to in _CLUSTERS:
        # The job finds its first node itself.
        further_options["master_addr"] = "first-node"
    config = _settings(made_script, config_file, further_options)
    exported_files, command = _files(to, config, script_path, made_script.text)
    _write_files(script_path.parent, exported_files, overwrite=overwrite)
    _tell_result(script_path.parent, exported_files, made_script, command)
    if made_script.launch is not None and made_script.launch.unread and config_file is None:
        print(
            f"nbaccel: {', '.join(made_script.launch.unread)} of the launch cannot be read without "
            "running the notebook: give flags as after nbaccel launch, or --config-file.",
            file=sys.stderr,
        )


def _module_name(stem: str) -> str:
    """A notebook's name as that of a script that can be imported: no blanks and dashes."""
    plain_name = "".join(letter if letter.isalnum() else "_" for letter in stem)
    return f"notebook_{plain_name}" if plain_name[:1].isdecimal() else plain_name


def _check_script(script_text: str) -> None:
    try:
        compile(script_text, "script", "exec")
    except SyntaxError as error:
        raise ConfigError(
            f"The script would not run: line {error.lineno}: {error.msg}: got "
            f"{(error.text or '').strip()!r}. Nothing was written. Put what the function needs "
            "into cells with the tag export."
        ) from error


def _settings(
    made_script: MadeScript, config_file: str | None, further_options: dict[str, Any]
) -> RunConfig:
    from nbaccel.cli.launch_request import SettingsFile, read_launch_request, read_settings_file

    file = read_settings_file(config_file)
    if made_script.launch is not None:
        file_config = file.merge({})
        defaults = type(file_config)()
        settings = {
            name: value
            for name, value in dict(file_config).items()
            if value != getattr(defaults, name)
        }
        told = made_script.launch.settings
        # A file that was given for this comes after the notebook, one that was saved before it.
        config = defaults.changed(**({**told, **settings} if config_file else {**settings, **told}))
        file = SettingsFile(config=config, name=file.name or "the notebook")
    request = read_launch_request(further_options, file)
    for note in request.notes:
        print(f"nbaccel: {note}", file=sys.stderr)
    return request.config


def _files(
    target: str, config: RunConfig, script_path: Path, script_text: str
) -> tuple[list[ExportedFile], str]:
    """The files to write, the script first, and the command that starts it."""
    from nbaccel.cli.job_files import (
        COMMANDS,
        JOBS,
        ExportedFile,
        command_line,
        companion_files,
    )

    script_file = ExportedFile(name=script_path.name, text=script_text)
    if target in COMMANDS:
        command = command_line(target, config, script_path.name)
        return [script_file, *companion_files(target, config)], command
    job = JOBS[target](config, script_path.stem)
    return [script_file, job], job.submit


def _write_files(folder: Path, exported_files: list[ExportedFile], *, overwrite: bool) -> None:
    from nbaccel.base import atomic

    there_already = [
        str(folder / exported_file.name)
        for exported_file in exported_files
        if (folder / exported_file.name).exists()
    ]
    if there_already and not overwrite:
        raise ConfigError(
            f"{', '.join(there_already)} would be replaced: what is in there may be yours. Give "
            "--overwrite, or another --output."
        )
    folder.mkdir(parents=True, exist_ok=True)
    for exported_file in exported_files:
        atomic.write_text(folder / exported_file.name, exported_file.text)


def _tell_result(
    folder: Path, exported_files: list[ExportedFile], made_script: MadeScript, command: str
) -> None:
    cells = ", ".join(map(str, made_script.cell_numbers))
    print(f"{folder / exported_files[0].name}: code cells {cells}")
    for exported_file in exported_files[1:]:
        print(folder / exported_file.name)
    if made_script.num_magics:
        print(
            f"nbaccel: {made_script.num_magics} lines of magics and commands are comments now.",
            file=sys.stderr,
        )
    print(f"Run it:\n\n    {command}\n")
