"""The configuration file of ``--config-file``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from nbaccel.base.errors import ConfigError
from nbaccel.config import RunConfig
from nbaccel.config.config_files import load_config_file, peek_config_file


class SettingsFile(NamedTuple):
    """The settings of a file, and how those of flags come over them.

    Attributes:
        config: The file's settings; values may be anything where the file alone is wrong.
        name: What to call their source.
        merge: Puts settings over the file's, and judges them together.
    """

    config: RunConfig
    name: str
    merge: Callable[[Mapping[str, Any]], RunConfig]


def read_settings_file(file_path: str | None) -> SettingsFile:
    """Read the settings of a run: nbaccel's file or Accelerate's."""
    try:
        loaded_file = load_config_file(file_path)
        is_judged = True
    except ConfigError:
        loaded_file = peek_config_file(file_path)
        is_judged = False

    def merge(changes: Mapping[str, Any]) -> RunConfig:
        # Accelerate's files count the processes of all machines, whatever is said of these.
        is_counted_anew = loaded_file.is_accelerate and "num_nodes" in changes
        if is_judged and not is_counted_anew:
            return loaded_file.config.changed(**changes)
        return load_config_file(file_path, changes).config

    name = "" if loaded_file.path is None else loaded_file.path.name
    return SettingsFile(loaded_file.config, name, merge)
