"""Settings inside settings, by keys with dots: ``zero_optimization.stage``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["drop", "has", "put", "value_at"]


def value_at(settings: Mapping[str, Any] | None, key: str, default: Any = None) -> Any:
    """What is under a key.

    Args:
        settings: Nested mappings.
        key: With dots.
        default: What to answer where there is nothing.

    Returns:
        The value.
    """
    found: Any = settings
    for step in key.split("."):
        if not isinstance(found, Mapping) or step not in found:
            return default
        found = found[step]
    return found


def has(settings: Mapping[str, Any] | None, key: str) -> bool:
    """Whether there is anything under a key, be it None.

    Args:
        settings: Nested mappings.
        key: With dots.
    """
    nothing = object()
    return value_at(settings, key, nothing) is not nothing


def put(settings: dict[str, Any], key: str, value: Any) -> None:
    """Write a value, and the sections that are not there yet.

    Args:
        settings: Nested dictionaries; changed.
        key: With dots.
        value: The value.
    """
    *path, last = key.split(".")
    for step in path:
        settings = settings.setdefault(step, {})
    settings[last] = value


def drop(settings: dict[str, Any], key: str) -> None:
    """Take a key out, and the sections that it leaves empty.

    Args:
        settings: Nested dictionaries; changed.
        key: With dots; nothing happens where there is none.
    """
    first, dot, rest = key.partition(".")
    inner = settings.get(first)
    if not dot:
        settings.pop(first, None)
    elif isinstance(inner, dict):
        drop(inner, rest)
        if not inner:
            del settings[first]
