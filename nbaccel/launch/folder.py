"""The folder that this process works in, and what it imports from: also where it has been deleted.

Standard library only, as `warmup` is.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["here", "import_path", "told_here"]


def here() -> str:
    """The working folder; if it has been deleted, the next folder above it that exists."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        deleted = Path(_deleted())
        return str(next((found for found in deleted.parents if found.is_dir()), Path.home()))


def told_here() -> str:
    """The same, with a word to the user if it is not the working folder."""
    found = here()
    try:
        os.getcwd()
    except FileNotFoundError:
        sys.stderr.write(
            f"nbaccel: the notebook's working folder {_deleted() or ''} has been deleted, so its "
            f"workers run in {found}. Go to a folder that exists: %cd {found}\n"
        )
    return found


def import_path() -> list[str]:
    """`sys.path` for a process that works elsewhere: without relative entries."""
    folder = here()
    return [os.path.normpath(os.path.join(folder, entry)) for entry in sys.path]


def _deleted() -> str:
    """The folder that was there, as far as the system remembers it."""
    try:
        return os.readlink("/proc/self/cwd").removesuffix(" (deleted)")
    except OSError:
        return ""
