"""What a disk has left, also for a folder that is still to be made."""

from __future__ import annotations

import shutil
from pathlib import Path


def free_bytes(folder: Path) -> int:
    """What is free on the disk that a folder is, or will be, on."""
    return shutil.disk_usage(nearest_folder(folder)).free


def nearest_folder(folder: Path) -> Path:
    """The folder, or the nearest above it that is there."""
    absolute_folder = folder.expanduser().absolute()
    return next(
        existing_folder
        for existing_folder in (absolute_folder, *absolute_folder.parents)
        if existing_folder.exists()
    )
