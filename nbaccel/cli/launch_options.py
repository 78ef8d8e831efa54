"""The options of ``nbaccel launch``: settings of `RunConfig`, its own, and those of its peers.

One source each: a setting's option is made from its field, as the options of `%%accelerate` are; a
peer's from its row in `peer_options`. All become one signature, from which typer makes the parser.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.main import get_command

from nbaccel.base import env
from nbaccel.cli.terminal import as_people_read_it

if TYPE_CHECKING:
    from nbaccel.cli.peer_options import PeerOption
    from nbaccel.notebook.magic_line import MagicOption


def own_option(*flags: str, meaning: str, metavar: str | None = None, **more: Any) -> Any:
    """An option of a command's own, beside those of a launch."""
    panel = "What to run, and what is shown"
    return typer.Option(*flags, metavar=metavar, help=meaning, rich_help_panel=panel, **more)


ConfigFile = Annotated[
    str | None,
    own_option("--config-file", metavar="FILE", meaning="YAML with settings.", show_default=False),
]
_COMPLETION_VARIABLE = "_NBACCEL_COMPLETE"  # click's name for the command nbaccel
_SETTINGS_PANEL = "Settings of the run"
# A setting whose option means something else here than in a magic's line.
_OTHER_MEANINGS = {
    "num_processes": "Workers on all machines together, as after accelerate launch; "
    "--nproc-per-node counts those of one machine. Left out, the plan chooses.",
}


def add_command(
    app: typer.Typer,
    name: str,
    own_function: Callable[..., None],
    *,
    description: str,
    short_help: str,
    takes_script: bool = True,
) -> None:
    """Add a subcommand that takes the options of a launch beside its own."""

    def add_with_options(parent: typer.Typer) -> None:
        parent.command(
            name,
            help=description,
            short_help=short_help,
            context_settings={
                "help_option_names": ["-h", "--help"],
                "allow_interspersed_args": not takes_script,
                "token_normalize_func": lambda word: word.replace("_", "-"),
            },
        )(_with_all_options(own_function))

    # A shell that completes an option needs to know all of them.
    if env.read(_COMPLETION_VARIABLE):
        add_with_options(app)
        return

    def parse_later(words: Annotated[list[str] | None, typer.Argument()] = None) -> None:
        # A command of its own, so that `nbaccel --help` does not read all settings.
        inner_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        add_with_options(inner_app)
        command = as_people_read_it(get_command(inner_app))
        command.main(args=words or [], prog_name=f"nbaccel {name}")

    app.command(
        name,
        help=description,
        short_help=short_help,
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    )(parse_later)


def _with_all_options(own_function: Callable[..., None]) -> Callable[..., None]:
    """The function with a parameter for each option, from which typer makes a parser."""

    def with_all_options(**given_options: Any) -> None:
        own_function(**given_options)

    signature = launch_signature(own_function)
    with_all_options.__signature__ = signature  # type: ignore[attr-defined]
    with_all_options.__annotations__ = {
        name: parameter.annotation for name, parameter in signature.parameters.items()
    }
    return with_all_options


def launch_signature(own_function: Callable[..., Any]) -> inspect.Signature:
    """The signature of the command: its own parameters, then one for each further option."""
    # Here, so that `nbaccel --help` needs no pydantic.
    from nbaccel.cli.peer_options import PEER_OPTIONS
    from nbaccel.notebook.magic_line import setting_options

    parameters = list(inspect.signature(own_function, eval_str=True).parameters.values())[:-1]
    taken_flags = {
        flag
        for parameter in parameters
        for info in getattr(parameter.annotation, "__metadata__", ())
        for flag in getattr(info, "param_decls", None) or ()
    }
    further_parameters = [
        # With other spellings that people know from another command.
        _setting_parameter(
            option,
            [
                flag
                for peer in PEER_OPTIONS
                if option.flag in peer.flags
                for flag in peer.flags
                if flag != option.flag
            ],
        )
        for option in setting_options()
    ]
    taken_flags |= set(setting_flags())
    further_parameters += [
        _peer_parameter(option, taken_flags)
        for option in PEER_OPTIONS
        if option.flag not in taken_flags
    ]
    # Keyword-only, so that the parser's order of arguments is that of the function alone.
    return inspect.Signature([*parameters, *further_parameters])


@cache
def setting_flags() -> dict[str, str]:
    """Every flag of a setting, and the setting's name."""
    from nbaccel.notebook.magic_line import setting_options

    return {
        flag: option.name
        for option in setting_options()
        for flag in (*option.flags, option.negative)
        if flag
    }


def _setting_parameter(option: MagicOption, short_flags: list[str]) -> inspect.Parameter:
    is_switch = bool(option.negative)
    flags = [*short_flags, *option.flags]
    if is_switch:
        flags[-1] = f"{flags[-1]}/{option.negative}"
    # Long lists of words would leave no room for what the option means.
    metavar = "WORD" if option.choices else option.value
    meaning = _OTHER_MEANINGS.get(option.name, option.meaning)
    choices = f" One of {', '.join(option.choices)}." if option.choices else ""
    return _keyword(
        option.name,
        bool if is_switch else str,
        typer.Option(
            *flags,
            metavar=None if is_switch else metavar,
            help=f"{meaning}{choices}",
            rich_help_panel=_SETTINGS_PANEL,
            show_default=False,
        ),
    )


def _peer_parameter(option: PeerOption, taken_flags: set[str]) -> inspect.Parameter:
    value_type: type = list[str] if option.name == "env" else str
    return _keyword(
        option.name,
        bool if option.is_switch else value_type,
        typer.Option(
            *(flag for flag in option.flags if flag not in taken_flags),
            metavar=None if option.is_switch else "VALUE",
            help=option.meaning,
            # A hundred and fifty of them would hide the settings; they have a list of their own.
            hidden=True,
            show_default=False,
        ),
    )


def _keyword(name: str, kind: Any, option_info: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option_info],
    )
