"""The configuration file of ``--config-file``."""

from __future__ import annotations

from pathlib import Path

from nbaccel.config import RunConfig
from nbaccel.errors import ConfigError

__all__ = ["read_settings_file"]


def read_settings_file(file_path: str | None) -> tuple[RunConfig, str]:
    """Read the settings of a run.

    Args:
        file_path: A YAML file with settings of `RunConfig`; None for no file.

    Returns:
        The settings, and what to call their source.

    Raises:
        ConfigError: It cannot be read, or something in it is wrong; every mistake is listed.
    """
    if file_path is None:
        return RunConfig(), ""
    try:
        file_text = Path(file_path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--config-file={file_path!r} cannot be read: {error}. The run would have other "
            "settings than you mean. Give the path of a YAML file."
        ) from error
    return RunConfig.from_yaml(file_text), Path(file_path).name
