"""Readers of given values, which return what a validator compares.

Numbers come as text from YAML and environment variables, as scalars from NumPy and torch, and as
members of enums. Each reader here takes one such value and returns a plain one; what it cannot
read it returns unchanged, so that the validator refuses it with the value that was given.
"""

from __future__ import annotations

import math
from datetime import timedelta
from enum import Enum
from pathlib import PurePath
from typing import Any

RESUME_HERE = "here"
"""What a stopped launch keeps goes with this process."""


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
    """A number for text that is one, also inside of lists and mappings: ``"3e-5"``.

    YAML 1.1 has no number without a point before the exponent, so that its readers make text of
    ``lr: 3e-5``.
    """
    if isinstance(given_value, dict):
        return {
            entry_key: numbers_read(inner_value) for entry_key, inner_value in given_value.items()
        }
    if isinstance(given_value, list):
        return [numbers_read(inner_value) for inner_value in given_value]
    if not isinstance(given_value, str):
        return given_value
    # `int` first, so that "8" stays whole.
    for number_type in (int, float):
        try:
            parsed_number = number_type(given_value)
        except ValueError:
            continue
        return parsed_number if math.isfinite(parsed_number) else given_value
    return given_value


def read_path(value: Any) -> Any:
    """The text of a path."""
    return str(value) if isinstance(value, PurePath) else value


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


def read_truth(value: Any) -> Any:
    """A truth value; a number other than 0 and 1 is refused by the validator."""
    if value is None:
        raise ValueError("None is neither true nor false")
    return value
