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
    """One option of a magic line."""

    name: str
    """The setting of ``RunConfig``, or a name of its own."""
    flags: tuple[str, ...]
    meaning: str
    value: str = ""
    """A placeholder for its value, for help: ``N``; empty where it takes none."""
    choices: tuple[str, ...] = ()
    is_setting: bool = False
    negative: str = ""
    """The flag that says the opposite: ``--no-share-back``."""
    none: bool = False
    """Whether the word ``none`` leaves the choice to the plan."""
    is_json: bool = False
    """Then its braces are its own."""

    @property
    def flag(self) -> str:
        """Its whole name, as messages write it."""
        # Short names come first in `flags`.
        return self.flags[-1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Subcommand:
    """What `%accelerate` can do, with its options, and whether it takes names of variables."""

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
    names = next(one.options for one in SUBCOMMANDS if one.name == subcommand)
    own = (option for option in OWN_OPTIONS if option.name in (*names, "help"))
    return (*(setting_options() if "*" in names else ()), *own)


def find_option(magic_options: Iterable[MagicOption], flag_name: str) -> MagicOption | None:
    """The option that is written so; underscores stand for dashes, as in the setting's name."""
    # Only long options: a short one such as `-n` has no other spelling.
    flag = flag_name if not flag_name.startswith("--") else flag_name.replace("_", "-")
    return next((one for one in magic_options if flag and flag in (*one.flags, one.negative)), None)


def _setting_option(field_name: str) -> MagicOption:
    model_field = RunConfig.model_fields[field_name]
    kinds = kinds_of(model_field.annotation)
    words = tuple(map(str, words_of(model_field.annotation)))
    meaning = model_field.description or ""
    kebab_name = field_name.replace("_", "-")
    is_truth = kinds == (bool,)
    # A dict, or settings of its own.
    is_json = any(
        get_origin(kind) is dict or (isinstance(kind, type) and issubclass(kind, BaseModel))
        for kind in kinds
    )
    value = "N" if kinds[0] in (int, float) else "TEXT"
    value = "SECONDS" if meaning.startswith("Seconds") else value
    value = "|".join(words) or ("JSON" if is_json else value)
    return MagicOption(
        name=field_name,
        flags=(*_FLAG_ALIASES.get(field_name, ()), f"--{kebab_name}"),
        meaning=meaning,
        value="" if is_truth else value,
        choices=words,
        is_setting=True,
        negative=f"--no-{kebab_name}" if is_truth else "",
        none=type(None) in _all_kinds(model_field.annotation),
        is_json=is_json,
    )


def kinds_of(annotation: Any) -> tuple[Any, ...]:
    """The types that a field may have, None left out."""
    return tuple(kind for kind in _all_kinds(annotation) if kind is not type(None))


def words_of(annotation: Any) -> tuple[Any, ...]:
    """The values of a field that takes one of a list; nothing for others."""
    lists = [get_args(kind) for kind in kinds_of(annotation) if get_origin(kind) is Literal]
    return tuple(word for words in lists for word in words)


def _all_kinds(annotation: Any) -> tuple[Any, ...]:
    is_union = get_origin(annotation) in (Union, UnionType)
    return get_args(annotation) if is_union else (annotation,)
