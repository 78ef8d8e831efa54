"""The options of `%%accelerate` and `%accelerate`: made from `RunConfig`, so that no list is kept.

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

__all__ = [
    "OWN",
    "SUBCOMMANDS",
    "Option",
    "Subcommand",
    "find",
    "kinds_of",
    "options_of",
    "settings",
    "words_of",
]

# Short or usual names beside the setting's own.
_ALIASES = {
    "num_processes": ("-n",),
    "mixed_precision": ("--precision",),
    "zero_stage": ("--zero",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One option of a magic line.

    Attributes:
        name: The setting of ``RunConfig``, or a name of its own.
        flags: How it is written: ``-n`` and ``--num-processes``.
        meaning: What it does, with its unit.
        value: What its value is, for help: ``N``; empty where it takes none.
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


OWN: tuple[Option, ...] = (
    Option(
        name="ranks",
        flags=("--ranks",),
        value="0,2-3",
        meaning="Only these ranks; the others rest and keep their variables.",
    ),
    Option(
        name="out",
        flags=("--out",),
        value="NAME[,NAME]",
        meaning="Bring these names into the notebook afterwards: a list by rank each, or the "
        "value itself where --ranks names one.",
    ),
    Option(
        name="config",
        flags=("--config",),
        value="NAME",
        meaning="Take all settings from a RunConfig of the notebook, or from the config of an "
        "object that has one.",
    ),
    Option(
        name="dist",
        flags=("--dist",),
        meaning="Join the workers' process group at once, so that torch.distributed is ready.",
    ),
    Option(
        name="autoreload",
        flags=("--autoreload",),
        value="on|off",
        choices=("on", "off"),
        meaning="Reload source files that changed before each cell, in the workers; "
        "stays until switched off.",
    ),
    Option(name="help", flags=("-h", "--help"), meaning="Show all options and run nothing."),
)

_START = ("config", "dist")

SUBCOMMANDS: tuple[Subcommand, ...] = (
    Subcommand(name="status", meaning="What each worker is, has and does. Also without a word."),
    Subcommand(
        name="restart",
        meaning="Start new workers, with these settings changed; variables of the old are lost.",
        options=("*", *_START),
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
        options=("*", *_START),
        names=True,
    ),
    Subcommand(
        name="traceback",
        meaning="Show the whole tracebacks of the last launch or cell that failed, of all ranks.",
    ),
    Subcommand(name="help", meaning="Show this."),
)


@cache
def settings() -> tuple[Option, ...]:
    """An option for each setting of `RunConfig`, in its order."""
    return tuple(_setting(name) for name in RunConfig.model_fields)


def options_of(subcommand: str = "") -> tuple[Option, ...]:
    """The options that a line takes.

    Args:
        subcommand: A word of `%accelerate`; empty for `%%accelerate`.

    Returns:
        The options, settings first.
    """
    if not subcommand:
        return (*settings(), *OWN)
    wanted = next(sub.options for sub in SUBCOMMANDS if sub.name == subcommand)
    own = tuple(option for option in OWN if option.name in (*wanted, "help"))
    return (*(settings() if "*" in wanted else ()), *own)


def find(options: Iterable[Option], flag: str) -> Option | None:
    """The option that is written so; underscores stand for dashes, as in the setting's name."""
    word = flag if not flag.startswith("--") else flag.replace("_", "-")
    for option in options:
        if word in option.flags or (option.negative and word == option.negative):
            return option
    return None


def _setting(name: str) -> Option:
    field = RunConfig.model_fields[name]
    kinds = kinds_of(field.annotation)
    kebab = name.replace("_", "-")
    is_truth = kinds == (bool,)
    is_json = any(get_origin(kind) is dict or _is_group(kind) for kind in kinds)
    words = tuple(map(str, words_of(field.annotation)))
    meaning = field.description or ""
    value = "|".join(words) or _metavar(kinds, is_json=is_json, meaning=meaning)
    return Option(
        name=name,
        flags=(*_ALIASES.get(name, ()), f"--{kebab}"),
        meaning=meaning,
        value="" if is_truth else value,
        choices=words,
        is_setting=True,
        negative=f"--no-{kebab}" if is_truth else "",
        none=type(None) in _all_kinds(field.annotation),
        is_json=is_json,
    )


def _is_group(kind: Any) -> bool:
    """Whether a setting holds settings of its own."""
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def kinds_of(annotation: Any) -> tuple[Any, ...]:
    """The types that a field may have, None left out.

    Args:
        annotation: The field's.
    """
    return tuple(kind for kind in _all_kinds(annotation) if kind is not type(None))


def words_of(annotation: Any) -> tuple[Any, ...]:
    """The values of a field that takes one of a list; nothing for others.

    Args:
        annotation: The field's.
    """
    lists = [get_args(kind) for kind in kinds_of(annotation) if get_origin(kind) is Literal]
    return tuple(word for words in lists for word in words)


def _all_kinds(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) in (Union, UnionType):
        return get_args(annotation)
    return (annotation,)


def _metavar(kinds: tuple[Any, ...], *, is_json: bool, meaning: str) -> str:
    if is_json:
        return "JSON"
    if meaning.startswith("Seconds"):
        return "SECONDS"
    return "N" if kinds[0] in (int, float) else "TEXT"
