"""Turns what a validator found into sentences a user can act on.

A validator knows what is wrong; a :class:`Hint` beside each setting knows what would be right,
why it matters and what to do. Here they meet. Nothing in this file knows which settings exist.
"""

from __future__ import annotations

import difflib
import itertools
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ValidationError

from nbaccel.errors import ConfigError

__all__ = ["Hint", "closest", "explain", "hint_of", "shown"]

_MAX_SHOWN_CHARS = 80
_LITERAL = "literal_error"
_UNKNOWN = "extra_forbidden"


@dataclass(frozen=True, kw_only=True)
class Hint:
    """What a user needs to hear when a setting is wrong.

    Attributes:
        must: What it must be, after "must be".
        why: What the setting does, or what a wrong one would do: one clause.
        do: The remedy, as an instruction.
        words: Words that people write for one of the allowed values.
    """

    must: str
    why: str
    do: str
    words: Mapping[str, str] = field(default_factory=dict)


def explain(model: type[BaseModel], error: ValidationError) -> tuple[str, ...]:
    """One sentence group per setting that is wrong.

    Args:
        model: The model that was validated.
        error: What its validation raised.

    Returns:
        Messages in the order in which the mistakes were found.
    """
    found: dict[str, tuple[str, ...]] = {}
    for detail in error.errors(include_url=False):
        name = str(detail["loc"][0]) if detail["loc"] else model.__name__
        # A union reports each of its branches; the user made one mistake.
        if name in found:
            continue
        inner = detail.get("ctx", {}).get("error")
        if isinstance(inner, ConfigError):  # the setting is a group with settings of its own
            found[name] = tuple(
                f"{name}{': ' if text[0].isupper() else '.'}{text}" for text in inner.mistakes
            )
        else:
            found[name] = (_message(model, name, detail),)
    return tuple(itertools.chain.from_iterable(found.values()))


def hint_of(model: type[BaseModel], name: str) -> Hint:
    """The hint that stands beside a setting.

    Args:
        model: The model that has the setting.
        name: The setting.

    Returns:
        Its hint; every setting has one, which a test checks.
    """
    metadata = model.model_fields[name].metadata
    return next(item for item in metadata if isinstance(item, Hint))


def closest(word: str, allowed: Iterable[str], words: Mapping[str, str] | None = None) -> str:
    """What somebody probably meant.

    Args:
        word: What was written.
        allowed: What could have been written.
        words: Known other words for the allowed ones.

    Returns:
        `` Did you mean 'x'?`` with a blank in front, or nothing where no word is close.
    """
    lowered = word.strip().lower()
    names = {name.lower(): name for name in allowed}
    meant = dict(words or {}).get(lowered)
    if meant is None:
        near = difflib.get_close_matches(lowered, names, n=1, cutoff=0.6)
        meant = names[near[0]] if near else None
    return f" Did you mean {meant!r}?" if meant else ""


def shown(value: object) -> str:
    """A value as it appears in a message.

    Args:
        value: Anything.

    Returns:
        Its ``repr``, short and on one line.
    """
    short = reprlib.Repr()
    short.maxstring = short.maxother = _MAX_SHOWN_CHARS
    try:
        return " ".join(short.repr(value).split())
    except ValueError:  # Python writes no number of thousands of digits
        return f"a {type(value).__name__} too large to show"


def _message(model: type[BaseModel], name: str, detail: Mapping[str, Any]) -> str:
    value = detail["input"]
    if detail["type"] == _UNKNOWN:
        meant = closest(name, model.model_fields)
        remedy = meant or f" The settings are: {', '.join(model.model_fields)}."
        return (
            f"{model.__name__} has no setting {name!r}: got {name}={shown(value)}. "
            f"It would change nothing, without a word.{remedy}"
        )
    if name not in model.model_fields:
        return f"{model.__name__} cannot be built from {shown(value)}: {detail['msg']}."
    hint = hint_of(model, name)
    meant = ""
    if detail["type"] == _LITERAL and isinstance(value, str):
        meant = closest(value, _allowed(detail), hint.words)
    return f"{name} must be {hint.must}: got {shown(value)}. {hint.why}.{meant or f' {hint.do}.'}"


def _allowed(detail: Mapping[str, Any]) -> tuple[str, ...]:
    # The message lists them as "'a', 'b' or 'c'".
    return tuple(str(detail["ctx"]["expected"]).replace("'", "").replace(" or ", ", ").split(", "))
