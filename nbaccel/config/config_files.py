"""The configuration file of the command: where it is, read in nbaccel's form or Accelerate's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbaccel.base import atomic, env
from nbaccel.base.errors import ConfigError
from nbaccel.config.accelerate_yaml import (
    MappedKey,
    is_accelerate_file,
    read_accelerate_yaml,
    setting_of,
    unjudged_settings,
)
from nbaccel.config.given_values import shown
from nbaccel.config.run_config import RunConfig, merged_settings
from nbaccel.config.text_forms import read_yaml, unreadable

CONFIG_VARIABLE = "NBACCEL_CONFIG"
_SCHEMA_NAME = "run_config.schema.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedConfig:
    """A configuration file that was read.

    Attributes:
        config: The settings.
        path: The file; None where there is no default file, and the settings are the defaults.
        is_accelerate: Whether it has Accelerate's form.
        mapped_keys: What each of Accelerate's keys became; empty for a file of ours.
    """

    config: RunConfig
    path: Path | None = None
    is_accelerate: bool = False
    mapped_keys: tuple[MappedKey, ...] = ()


def default_config_path() -> Path:
    """Where the command keeps its file: ``NBACCEL_CONFIG``, or in the user's cache folder."""
    if named_path := env.read(CONFIG_VARIABLE):
        return Path(named_path).expanduser()
    folder = env.read("XDG_CACHE_HOME") or "~/.cache"
    return Path(folder).expanduser() / "nbaccel" / "default_config.yaml"


def load_config_file(
    path: str | Path | None = None, changes: Mapping[str, Any] | None = None
) -> LoadedConfig:
    """Read a configuration file, of nbaccel or of Accelerate.

    Args:
        path: The file; None for the default file, which need not be there.
        changes: Settings that replace the file's, before all are judged together.

    Returns:
        The settings, and what became of Accelerate's keys.

    Raises:
        ConfigError: It cannot be read, or settings in it are wrong; all mistakes.
    """
    changes = changes or {}
    file_path = Path(path).expanduser() if path is not None else default_config_path()
    if path is None and not file_path.exists():
        return LoadedConfig(config=RunConfig(**changes))
    file_settings = _read_settings(file_path)
    if is_accelerate_file(file_settings):
        accelerate_file = read_accelerate_yaml(file_path, changes)
        return LoadedConfig(
            config=accelerate_file.config,
            path=file_path,
            is_accelerate=True,
            mapped_keys=accelerate_file.mapped_keys,
        )
    try:
        return LoadedConfig(
            config=RunConfig(**merged_settings(file_settings, changes)), path=file_path
        )
    except ConfigError as error:
        raise ConfigError(
            *(
                mistake if setting_of(mistake) in changes else f"{file_path}: {mistake}"
                for mistake in error.mistakes
            )
        ) from error


def peek_config_file(path: str | Path | None = None) -> LoadedConfig:
    """What a configuration file says, whatever is wrong with it: values may be anything."""
    file_path = Path(path).expanduser() if path is not None else default_config_path()
    settings = _read_settings(file_path)
    is_accelerate = is_accelerate_file(settings)
    if is_accelerate:
        settings = unjudged_settings(settings, file_path)
    known_settings = {
        name: settings[name] for name in RunConfig.model_fields.keys() & settings.keys()
    }
    config = RunConfig.model_construct(**known_settings)
    return LoadedConfig(config=config, path=file_path, is_accelerate=is_accelerate)


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The configuration file {path} cannot be read: {error}. Nothing would be "
            "launched as it says. Give the path of a file that is there, or write one with "
            "nbaccel config."
        ) from error
    try:
        settings = read_yaml(text)
    except ValueError as error:
        raise unreadable(f"The configuration file {path}", "YAML", error) from error
    if settings is not None and not isinstance(settings, dict):
        raise ConfigError(
            f"{path}: it holds no settings: got {shown(settings)}. Settings need names. "
            "Write names and values: num_processes: 2, for example."
        )
    return {str(name): value for name, value in (settings or {}).items()}


def schema_path() -> Path:
    """Where the schema is, which editors complete and check files by."""
    return default_config_path().parent / _SCHEMA_NAME


def schema_text() -> str:
    """The JSON schema of a configuration file."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **RunConfig.json_schema()}
    return f"{json.dumps(schema, indent=2)}\n"


def config_text(config: RunConfig) -> str:
    """A configuration as a file has it, with the line that names its schema."""
    text = config.to_yaml()
    schema_uri = schema_path().absolute().as_uri()
    # An empty mapping would be written as `{}`, which reads like a mistake.
    text = "" if text.strip() == "{}" else text
    return f"# yaml-language-server: $schema={schema_uri}\n{text}"


def write_config_file(config: RunConfig, path: Path) -> None:
    """Write a configuration file and the schema that it names; each appears whole or not at all."""
    file = schema_path()
    try:
        for folder in (file.parent, path.parent):
            folder.mkdir(parents=True, exist_ok=True)
        atomic.write_text(file, schema_text())
        atomic.write_text(path, config_text(config))
    except OSError as error:
        raise ConfigError(
            f"The configuration cannot be written to {path}: {error}. Give a file in a folder "
            "that you may write to, with --config_file."
        ) from error
