"""The options of `%%accelerate` and `%accelerate`, made from the fields of `RunConfig`.

A setting of `RunConfig` is an option of the same name with its own description. Beside them stand
the few options that are the cell's own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from nbaccel.config import RunConfig

# Short or usual names besides the setting's own.
_FLAG_ALIASES = {
    "num_processes": ("-n",),
    "mixed_precision": ("--precision",),
    "zero_stage": ("--zero",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class MagicOption:
    """One option of a magic line.

    Attributes:
        name: The setting of ``RunConfig``, or a name of its own.
        flags: How it is written: ``-n`` and ``--num-processes``.
        meaning: What it does, with its unit.
        value: A placeholder for its value, for help: ``N``; empty where it takes none.
        choices: The words that its value can be, if they can be listed.
        is_setting: Whether it is a setting of ``RunConfig``.
        negative: The flag that says the opposite: ``--no-share-back``.
        none: Whether the word ``none`` leaves the choice to the plan.
        is_json: Whether the value is JSON, in which braces are its own.
    """

    name: str
    flags: tuple[str, ...]
    meaning: str
    value: str = ""
    choices: tuple[str, ...] = ()
    is_setting: bool = False
    negative: str = ""
    none: bool = False
    is_json: bool = False

    @property
    def flag(self) -> str:
        """Its whole name, as messages write it."""
        # Short names come first in `flags`.
        return self.flags[-1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Subcommand:
    """What `%accelerate` can do.

    Attributes:
        name: Its word.
        meaning: What it does, for help.
        options: The options it takes.
        names: Whether it takes names of variables.
    """

    name: str
    meaning: str
    options: tuple[str, ...] = ()
    names: bool = False


OWN_OPTIONS: tuple[MagicOption, ...] = (
    MagicOption(
        name="ranks",
        flags=("--ranks",),
        value="0,2-3",
        meaning="Only these ranks; the others rest and keep their variables.",
    ),
    MagicOption(
        name="out",
        flags=("--out",),
        value="NAME[,NAME]",
        meaning="Bring these names into the notebook afterwards: a list by rank each, or the "
        "value itself where --ranks names one.",
    ),
    MagicOption(
        name="config",
        flags=("--config",),
        value="NAME",
        meaning="Take all settings from a RunConfig of the notebook, or from the config of an "
        "object that has one.",
    ),
    MagicOption(
        name="dist",
        flags=("--dist",),
        meaning="Join the workers' process group at once, so that torch.distributed is ready.",
    ),
    MagicOption(
        name="autoreload",
        flags=("--autoreload",),
        value="on|off",
        choices=("on", "off"),
        meaning="Reload source files that changed before each cell, in the workers; "
        "stays until switched off.",
    ),
    MagicOption(name="help", flags=("-h", "--help"), meaning="Show all options and run nothing."),
)

_START_OPTIONS = ("config", "dist")

SUBCOMMANDS: tuple[Subcommand, ...] = (
    Subcommand(
        name="status",
        meaning="The workers: state, memory, process group, names; also without a subcommand.",
    ),
    Subcommand(
        name="restart",
        meaning="Start new workers, with these settings changed; variables of the old are lost.",
        options=("*", *_START_OPTIONS),
    ),
    Subcommand(name="stop", meaning="End the workers; the next cell starts new ones."),
    Subcommand(
        name="pull",
        meaning="Copy names from the workers into the notebook: lists by rank, or the value "
        "where --ranks names one.",
        options=("ranks",),
        names=True,
    ),
    Subcommand(
        name="push",
        meaning="Copy names from the notebook to the workers, changed or not.",
        options=("ranks",),
        names=True,
    ),
    Subcommand(
        name="config",
        meaning="Pick the settings for the next start; NAMES are a model, and a batch, for the "
        "memory that is shown. With options, change them.",
        options=("*", *_START_OPTIONS),
        names=True,
    ),
    Subcommand(
        name="report",
        meaning="Show curves, each rank's time, memory and warnings of the latest launch "
        "or cell, also of one that failed or was stopped; "
        "report = %accelerate report keeps it, for report.save(...).",
    ),
    Subcommand(
        name="runs",
        meaning="Lay the last launches and cells side by side: figures and curves.",
    ),
    Subcommand(
        name="traceback",
        meaning="Show the whole tracebacks of the last launch or cell that failed, of all ranks.",
    ),
    Subcommand(name="help", meaning="Show this."),
)


@cache
def setting_options() -> tuple[MagicOption, ...]:
    """An option for each setting of `RunConfig`, in its order."""
    return tuple(_setting_option(name) for name in RunConfig.model_fields)


def options_of(subcommand: str = "") -> tuple[MagicOption, ...]:
    """The options that a line takes."""
    if not subcommand:
        return (*setting_options(), *OWN_OPTIONS)
    names = next(
        each_subcommand.options
        for each_subcommand in SUBCOMMANDS
        if each_subcommand.name == subcommand
    )
    options = tuple(
        magic_option for magic_option in OWN_OPTIONS if magic_option.name in (*names, "help")
    )
    return (*(setting_options() if "*" in names else ()), *options)


def find_option(magic_options: Iterable[MagicOption], flag_name: str) -> MagicOption | None:
    """The option that is written so; underscores stand for dashes, as in the setting's name."""
    # Only long options: a short one such as `-n` has no other spelling.
    flag = flag_name if not flag_name.startswith("--") else flag_name.replace("_", "-")
    for magic_option in magic_options:
        if flag in magic_option.flags or (magic_option.negative and flag == magic_option.negative):
            return magic_option
    return None


def _setting_option(field_name: str) -> MagicOption:
    model_field = RunConfig.model_fields[field_name]
    field_kinds = kinds_of(model_field.annotation)
    kebab_name = field_name.replace("_", "-")
    is_truth = field_kinds == (bool,)
    is_json = any(
        get_origin(field_kind) is dict or _is_group(field_kind) for field_kind in field_kinds
    )
    allowed_words = tuple(map(str, words_of(model_field.annotation)))
    field_meaning = model_field.description or ""
    value_metavar = "|".join(allowed_words) or _value_metavar(
        field_kinds, is_json=is_json, field_meaning=field_meaning
    )
    return MagicOption(
        name=field_name,
        flags=(*_FLAG_ALIASES.get(field_name, ()), f"--{kebab_name}"),
        meaning=field_meaning,
        value="" if is_truth else value_metavar,
        choices=allowed_words,
        is_setting=True,
        negative=f"--no-{kebab_name}" if is_truth else "",
        none=type(None) in _all_kinds(model_field.annotation),
        is_json=is_json,
    )


def _is_group(field_kind: Any) -> bool:
    """Whether a setting holds settings of its own."""
    return isinstance(field_kind, type) and issubclass(field_kind, BaseModel)


def kinds_of(annotation: Any) -> tuple[Any, ...]:
    """The types that a field may have, None left out."""
    return tuple(
        field_kind for field_kind in _all_kinds(annotation) if field_kind is not type(None)
    )


def words_of(annotation: Any) -> tuple[Any, ...]:
    """The values of a field that takes one of a list; nothing for others."""
    word_lists = [
        get_args(field_kind)
        for field_kind in kinds_of(annotation)
        if get_origin(field_kind) is Literal
    ]
    return tuple(word for word_list in word_lists for word in word_list)


def _all_kinds(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) in (Union, UnionType):
        return get_args(annotation)
    return (annotation,)


def _value_metavar(field_kinds: tuple[Any, ...], *, is_json: bool, field_meaning: str) -> str:
    if is_json:
        return "JSON"
    if field_meaning.startswith("Seconds"):
        return "SECONDS"
    return "N" if field_kinds[0] in (int, float) else "TEXT"
