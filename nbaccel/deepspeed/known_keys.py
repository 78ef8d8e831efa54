"""Misspelt keys found where DeepSpeed is not installed, by the keys that nbaccel itself knows.

These are fewer than DeepSpeed reads. So a key is a mistake only where it is nearly one of them; a
test compares that with every key of the installed DeepSpeed.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from nbaccel.config.field_rules import FieldMistake
from nbaccel.config.mistakes import shown
from nbaccel.deepspeed.field_types import Section, section_of
from nbaccel.deepspeed.zero_config import ZERO, ZERO_KEYS, ZeroConfig

__all__ = ["misspelt_keys"]

_NEAR_ENOUGH = 0.83
"""`devise` is 0.833 like `device`; keys of DeepSpeed unknown here are up to 0.828 like a known
one."""


def misspelt_keys(
    config_settings: Mapping[str, Any], section_path: str = ""
) -> Iterator[FieldMistake]:
    """Look at every key of a configuration, section by section."""
    keys = _known_sections().get(section_path)
    if keys is None:
        return  # its keys are DeepSpeed's, or the user's own
    prefix = f"{section_path}." if section_path else ""
    for config_key, value in config_settings.items():
        meant_key = config_key
        advice = ""
        if config_key not in keys:
            meant_key, advice = _meant_key(str(config_key), section_path, keys)
        if advice:
            yield FieldMistake(
                f"{prefix}{config_key} is no key that nbaccel knows of DeepSpeed: got "
                f"{prefix}{config_key}={shown(value)}. It would have no effect. {advice}",
                f"{prefix}{config_key}",
            )
        # Inside a misspelt section, too, so that its mistakes are reported at once.
        if isinstance(value, Mapping):
            yield from misspelt_keys(value, f"{prefix}{meant_key}")


def _meant_key(config_key: str, path: str, known_keys: frozenset[str]) -> tuple[str, str]:
    """The key that was probably meant, and the sentence that says so; empty where none is near."""
    if not path and config_key in ZERO_KEYS:
        return config_key, f"It belongs in {ZERO}."
    near_keys = difflib.get_close_matches(
        config_key.strip().lower(), known_keys, n=1, cutoff=_NEAR_ENOUGH
    )
    return (near_keys[0], f"Did you mean {near_keys[0]!r}?") if near_keys else (config_key, "")


@lru_cache(maxsize=1)
def _known_sections() -> dict[str, frozenset[str]]:
    """Keys of each section by its path; the top level is the empty path."""
    sections = dict(_sections_of(ZeroConfig, ""))
    top_keys = sections[""]
    # `ZeroConfig` has the keys of this section at the top level.
    zero_sections = {
        f"{ZERO}.{path}": keys
        for path, keys in sections.items()
        if path.partition(".")[0] in ZERO_KEYS
    }
    other_sections = {
        path: keys for path, keys in sections.items() if path.partition(".")[0] not in ZERO_KEYS
    }
    return {
        **other_sections,
        **zero_sections,
        ZERO: frozenset(ZERO_KEYS),
        "": (top_keys - frozenset(ZERO_KEYS)) | {ZERO},
    }


def _sections_of(
    section_class: type[Section], section_path: str
) -> Iterator[tuple[str, frozenset[str]]]:
    field_names = frozenset(section_class.model_fields) - {"extra"}
    yield section_path, field_names
    for field_name in field_names:
        inner_class = section_of(section_class.model_fields[field_name])
        if inner_class is not None:
            inner_path = f"{section_path}.{field_name}" if section_path else field_name
            yield from _sections_of(inner_class, inner_path)
