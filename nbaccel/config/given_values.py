"""Given values: read (what cannot be is left to the validator), found by dotted keys, shown."""

from __future__ import annotations

import contextlib
import difflib
import math
import os
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from enum import Enum
from typing import Any

RESUME_HERE = "here"  # what a stopped launch keeps goes with this process


def plain_value(value: Any) -> Any:
    """A Python value for a scalar of NumPy or torch and for a member of an enum."""
    if isinstance(value, Enum):
        return value.value
    # By attributes, because this module must import neither NumPy nor torch.
    if getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)):
        return value.item()
    return value


def read_number(given_value: Any) -> Any:
    """A number for a number; a truth value is none, though Python's `bool` is an `int`."""
    given_value = plain_value(given_value)
    if isinstance(given_value, bool):
        raise ValueError("a truth value is not a number")
    return given_value.total_seconds() if isinstance(given_value, timedelta) else given_value


def read_whole(value: Any) -> Any:
    """A whole number for one of a list, which is compared and not converted."""
    value = read_number(value)
    if isinstance(value, str):
        value = numbers_read(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def numbers_read(given_value: Any) -> Any:
    """A number for text that is one, also in lists and mappings: ``lr: 3e-5`` of YAML 1.1."""
    if isinstance(given_value, dict):
        return {key: numbers_read(value) for key, value in given_value.items()}
    if isinstance(given_value, list):
        return [numbers_read(inner_value) for inner_value in given_value]
    if not isinstance(given_value, str):
        return given_value
    # `int` first, so that "8" stays whole.
    for number_type in (int, float):
        with contextlib.suppress(ValueError):
            parsed_number = number_type(given_value)
            return parsed_number if math.isfinite(parsed_number) else given_value
    return given_value


def read_path(value: Any) -> Any:
    """The text of a path."""
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def read_port(value: Any) -> Any:
    """A port, where 0 and an empty text mean a free one, as 0 does for a socket."""
    text = value.strip() if isinstance(value, str) else value
    return None if text in (0, "0", "") and not isinstance(text, bool) else read_number(text)


def read_word(value: Any) -> Any:
    """A word of a list, in lower case; None and YAML's bare ``no`` are the word "no"."""
    # YAML 1.1 reads `mixed_precision: no` as False.
    if value is None or value is False:
        return "no"
    return value.strip().lower() if isinstance(value, str) else value


def read_resume(value: Any) -> Any:
    """True as `here`, False as None; a folder as its path."""
    if isinstance(value, bool):
        return RESUME_HERE if value else None
    return read_path(value)


def value_at(settings: Mapping[str, Any] | None, dotted_key: str, default: Any = None) -> Any:
    """What is under a key."""
    value: Any = settings
    for step in dotted_key.split("."):
        if not isinstance(value, Mapping) or step not in value:
            return default
        value = value[step]
    return value


def has_key(settings: Mapping[str, Any] | None, dotted_key: str) -> bool:
    """Whether there is anything under a key, be it None."""
    missing = object()
    return value_at(settings, dotted_key, missing) is not missing


def put_at(settings: dict[str, Any], dotted_key: str, new_value: Any) -> None:
    """Write a value, and the sections that are not there yet."""
    *section_steps, last_step = dotted_key.split(".")
    for key_step in section_steps:
        settings = settings.setdefault(key_step, {})
    settings[last_step] = new_value


def drop_at(settings: dict[str, Any], dotted_key: str) -> None:
    """Take a key out, and the sections that it leaves empty."""
    # Recursive, because sections are removed from the innermost outwards.
    first_step, _, remaining_key = dotted_key.partition(".")
    inner_section = settings.get(first_step)
    if not remaining_key:
        settings.pop(first_step, None)
    elif isinstance(inner_section, dict):
        drop_at(inner_section, remaining_key)
        if not inner_section:
            del settings[first_step]


def dotted_items(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """What is in a mapping, and in those inside it, with dotted keys."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from dotted_items(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


_MAX_SHOWN_CHARS = 80
_MAX_TEXT_CHARS = 400


def closest(word: str, allowed: Iterable[str], words: Mapping[str, str] | None = None) -> str:
    """The allowed name that was probably meant."""
    lowered_word = word.strip().lower()
    names_by_lower = {allowed_name.lower(): allowed_name for allowed_name in allowed}
    # A known synonym first: by its letters "gpu", which means "cuda", is nearest to "cpu".
    meant_word = dict(words or {}).get(lowered_word)
    if meant_word is None:
        near_names = difflib.get_close_matches(lowered_word, names_by_lower, n=1, cutoff=0.6)
        meant_word = names_by_lower[near_names[0]] if near_names else None
    return f" Did you mean {meant_word!r}?" if meant_word else ""


def shown(value: object) -> str:
    """A value as it appears in a message."""
    short_repr = reprlib.Repr()
    short_repr.maxstring = short_repr.maxother = _MAX_SHOWN_CHARS
    try:
        text = " ".join(short_repr.repr(value).split())
    except ValueError:  # Python refuses to write numbers of thousands of digits
        return f"a {type(value).__name__} too large to show"
    # A few entries on each of several levels are still thousands of characters.
    return text if len(text) <= _MAX_TEXT_CHARS else f"{text[:_MAX_TEXT_CHARS]}…"
