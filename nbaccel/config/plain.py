"""What people pass where a setting wants a plain value: NumPy numbers, enums, digits as text."""

from __future__ import annotations

import math
from datetime import timedelta
from enum import Enum
from typing import Any

__all__ = ["number", "numbers_read", "plain", "port", "truth", "whole", "word"]


def plain(value: Any) -> Any:
    """A Python value for a scalar of NumPy or torch and for a member of an enum.

    Args:
        value: Anything.

    Returns:
        The plain value, or the same object.
    """
    if isinstance(value, Enum):
        return value.value
    if getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)):
        return value.item()
    return value


def number(value: Any) -> Any:
    """A number for a number; a truth value is none, though Python counts with it.

    Args:
        value: What was given for a number; a ``timedelta`` counts as seconds.

    Returns:
        What the validator goes on with.

    Raises:
        ValueError: It is True or False.
    """
    if isinstance(value, bool):
        raise ValueError("a truth value is not a number")
    return value.total_seconds() if isinstance(value, timedelta) else value


def whole(value: Any) -> Any:
    """A whole number for one of a list, which is compared and not converted.

    Args:
        value: What was given for it.

    Returns:
        What the validator goes on with.

    Raises:
        ValueError: It is True or False.
    """
    value = number(value)
    if isinstance(value, str):
        value = numbers_read(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def numbers_read(value: Any) -> Any:
    """A number for text that is one, also inside of lists and mappings: ``"3e-5"``.

    YAML 1.1 has no number without a point before the exponent, so that its readers make text of
    ``lr: 3e-5``.

    Args:
        value: Parameters of which none is text that looks like a number and is none.

    Returns:
        The same with numbers; what is no number stays.
    """
    if isinstance(value, dict):
        return {key: numbers_read(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [numbers_read(entry) for entry in value]
    if not isinstance(value, str):
        return value
    for read in (int, float):
        try:
            found = read(value)
        except ValueError:
            continue
        return found if math.isfinite(found) else value
    return value


def port(value: Any) -> Any:
    """A port, where 0 and an empty text ask for a free one, as they do for a socket.

    Args:
        value: What was given for a port.

    Returns:
        None for a free port, otherwise what the validator goes on with.
    """
    text = value.strip() if isinstance(value, str) else value
    return None if text in (0, "0", "") and not isinstance(text, bool) else number(text)


def word(value: Any) -> Any:
    """A word of a list, in lower case; None and YAML's bare ``no`` are the word "no".

    Args:
        value: What was given for a word.

    Returns:
        What the validator goes on with.
    """
    # YAML 1.1 reads `mixed_precision: no` as False.
    if value is None or value is False:
        return "no"
    return value.strip().lower() if isinstance(value, str) else value


def truth(value: Any) -> Any:
    """A truth value; a number other than 0 and 1 is refused by the validator itself.

    Args:
        value: What was given for a truth value.

    Returns:
        What the validator goes on with.

    Raises:
        ValueError: It is None, which means neither.
    """
    if value is None:
        raise ValueError("None is neither true nor false")
    return value
