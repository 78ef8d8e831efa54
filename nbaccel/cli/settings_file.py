"""The configuration file of ``--config-file``."""

from __future__ import annotations

from nbaccel.config import RunConfig
from nbaccel.config.config_file import load_config_file

__all__ = ["read_settings_file"]


def read_settings_file(file_path: str | None) -> tuple[RunConfig, str]:
    """Read the settings of a run: nbaccel's file or Accelerate's.

    Args:
        file_path: A YAML file; None for the one that `nbaccel config` has written, if there is one.

    Returns:
        The settings, and what to call their source.

    Raises:
        ConfigError: It cannot be read, or something in it is wrong; every mistake is listed.
    """
    loaded_file = load_config_file(file_path)
    return loaded_file.config, "" if loaded_file.path is None else loaded_file.path.name
