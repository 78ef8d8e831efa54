"""Reading and changing nested mappings by dotted keys: ``zero_optimization.stage``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


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
    # A new object equals no value, not even None.
    missing_marker = object()
    return value_at(settings, dotted_key, missing_marker) is not missing_marker


def put_at(settings: dict[str, Any], dotted_key: str, new_value: Any) -> None:
    """Write a value, and the sections that are not there yet."""
    *section_steps, last_step = dotted_key.split(".")
    for key_step in section_steps:
        settings = settings.setdefault(key_step, {})
    settings[last_step] = new_value


def drop_at(settings: dict[str, Any], dotted_key: str) -> None:
    """Take a key out, and the sections that it leaves empty."""
    # Recursive, because sections are removed from the innermost outwards.
    first_step, separator, remaining_key = dotted_key.partition(".")
    inner_section = settings.get(first_step)
    if not separator:
        settings.pop(first_step, None)
    elif isinstance(inner_section, dict):
        drop_at(inner_section, remaining_key)
        if not inner_section:
            del settings[first_step]
