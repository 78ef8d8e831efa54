"""A DeepSpeed configuration as it stands, wherever it comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbaccel.base.errors import ConfigError
from nbaccel.config.deepspeed_document import DOCUMENT_NAME
from nbaccel.config.mistakes import shown
from nbaccel.config.text_forms import read_source
from nbaccel.deepspeed.field_types import AUTO

if TYPE_CHECKING:
    from nbaccel.deepspeed.zero_config import ZeroConfig

__all__ = ["auto_keys", "load_settings"]


# Here "auto" is a value that DeepSpeed itself defines.
_OWN_AUTO = frozenset({"data_types.keep_in_fp32_modules", "pipeline.stages"})


def load_settings(config: Mapping[str, Any] | str | Path | ZeroConfig) -> dict[str, Any]:
    """The settings as they stand, as plain values."""
    settings = read_source(config, DOCUMENT_NAME)
    if not isinstance(settings, dict):
        raise ConfigError(
            f"{DOCUMENT_NAME} cannot be a {type(config).__name__}: got "
            f"{shown(config)}. There is nothing to read in it. Give a dictionary, a path or "
            "a ZeroConfig."
        )
    return settings


def auto_keys(config_settings: Mapping[str, Any], section_path: str = "") -> Iterator[str]:
    """The keys whose value is ``"auto"``, except where DeepSpeed itself defines that value."""
    for config_key, value in config_settings.items():
        key_path = f"{section_path}{config_key}"
        if isinstance(value, Mapping):
            yield from auto_keys(value, f"{key_path}.")
        elif value == AUTO and isinstance(value, str) and key_path not in _OWN_AUTO:
            yield key_path
