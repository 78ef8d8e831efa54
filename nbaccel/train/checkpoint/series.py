"""Numbered checkpoints of a project: ``<project_dir>/checkpoints/checkpoint_<number>``."""

from __future__ import annotations

import re
from pathlib import Path

from nbaccel.config.handlers import ProjectConfiguration
from nbaccel.errors import ConfigError
from nbaccel.train.checkpoint.folder import discard

__all__ = ["folder_of", "latest", "next_number", "number_of", "rotate"]


def folder_of(configuration: ProjectConfiguration) -> Path:
    """The folder of all numbered checkpoints.

    Raises:
        ConfigError: The project has no folder.
    """
    if configuration.project_dir is None:
        raise ConfigError(
            "ProjectConfiguration(automatic_checkpoint_naming=True) has "
            f"project_dir={configuration.project_dir!r}: checkpoints are numbered in a project's "
            "folder. Give Accelerator(project_dir=...) or ProjectConfiguration(project_dir=...)."
        )
    return Path(configuration.project_dir).expanduser() / "checkpoints"


def number_of(folder: Path) -> int | None:
    """The number in a checkpoint's name; None for any other name."""
    match = re.fullmatch(r"checkpoint_(\d+)", folder.name)
    return int(match[1]) if match else None


def _existing(folder: Path) -> dict[int, Path]:
    if not folder.is_dir():
        return {}
    numbers = ((number_of(path), path) for path in folder.iterdir() if path.is_dir())
    return dict(sorted((n, path) for n, path in numbers if n is not None))


def next_number(configuration: ProjectConfiguration) -> int:
    """The number of the next checkpoint: behind those that are there, of an earlier run maybe."""
    there = _existing(folder_of(configuration))
    return max(configuration.iteration, max(there, default=-1) + 1)


def latest(configuration: ProjectConfiguration) -> Path:
    """The checkpoint of the highest number.

    Raises:
        ConfigError: There is none.
    """
    folder = folder_of(configuration)
    there = _existing(folder)
    if not there:
        raise ConfigError(
            f"load_state() found no checkpoint_<number> in {str(folder)!r}: there is nothing to go "
            "on from. Save one first, or give load_state the folder of a checkpoint."
        )
    return there[max(there)]


def rotate(folder: Path, total_limit: int | None) -> None:
    """Delete the checkpoints of the lowest numbers beyond a limit.

    Args:
        folder: Of all numbered checkpoints.
        total_limit: How many stay; None keeps all.
    """
    there = list(_existing(folder).values())
    for path in there[: -total_limit if total_limit else 0]:
        discard(path)
