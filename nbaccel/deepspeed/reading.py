"""A DeepSpeed configuration as it stands, wherever it comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nbaccel.config.json_text import plain_object, read_file, read_object
from nbaccel.config.mistakes import shown
from nbaccel.deepspeed.config import ZeroConfig
from nbaccel.deepspeed.kinds import AUTO
from nbaccel.errors import ConfigError

__all__ = ["auto_keys", "load_settings"]

# "auto" is a word of DeepSpeed's own here.
_OWN_AUTO = frozenset({"data_types.keep_in_fp32_modules", "pipeline.stages"})


def load_settings(config: Mapping[str, Any] | str | Path | ZeroConfig) -> dict[str, Any]:
    """The settings as they stand, as plain values.

    Args:
        config: A dictionary, the path of a JSON file, JSON text, or a :class:`ZeroConfig`.

    Returns:
        A copy.

    Raises:
        ConfigError: The file cannot be read, or it or the dictionary is nothing that JSON holds.
    """
    if isinstance(config, ZeroConfig):
        return config.to_dict()
    if isinstance(config, Mapping):
        return plain_object(config, "A DeepSpeed configuration")
    if isinstance(config, str) and config.lstrip().startswith("{"):
        return read_object(config, "A DeepSpeed configuration")
    if not isinstance(config, (str, Path)):
        raise ConfigError(
            f"A DeepSpeed configuration cannot be a {type(config).__name__}: got {shown(config)}. "
            "There is nothing to read in it. Give a dictionary, a path or a ZeroConfig."
        )
    return read_file(config)


def auto_keys(settings: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """The keys whose value is ``"auto"``, except where that is a word of DeepSpeed's.

    Args:
        settings: A DeepSpeed configuration.
        path: The section it is.

    Yields:
        Dotted paths.
    """
    for key, value in settings.items():
        here = f"{path}{key}"
        if isinstance(value, Mapping):
            yield from auto_keys(value, f"{here}.")
        elif value == AUTO and isinstance(value, str) and here not in _OWN_AUTO:
            yield here
