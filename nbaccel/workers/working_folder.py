"""The folder that this process works in, and what it imports from: also where it has been deleted.

Standard library only, because `template` imports it at load time.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_IMPORTED_BY_THE_TEMPLATE = ("nbaccel", "torch", "numpy", "IPython")
_STANDARD_LIBRARY_FOLDERS = os.path.dirname(os.__file__)


def current_folder() -> str:
    """The working folder; if it has been deleted, the next folder above it that exists."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        above = (folder for folder in Path(_deleted_folder()).parents if folder.is_dir())
        return str(next(above, Path.home()))


def explain_here() -> str:
    """The same, with a message to the user if it is not the working folder."""
    folder = current_folder()
    try:
        os.getcwd()
    except FileNotFoundError:
        sys.stderr.write(
            f"nbaccel: the notebook's working folder {_deleted_folder() or ''} has been deleted, "
            f"so its workers run in {folder}. Go to a folder that exists: "
            f"%cd {folder}\n"
        )
    return folder


def import_path() -> list[str]:
    """`sys.path` for a process that works elsewhere: without relative entries."""
    here = current_folder()
    return [os.path.normpath(os.path.join(here, entry)) for entry in sys.path]


def installed_first() -> list[str]:
    """The same for a process that imports installed packages only: the user's own folders go last.

    A `random.py` or a `torch.py` beside the notebook hides the real one from every process that
    starts there, also where the notebook imported the real one before it went there.
    """
    imported_from = _folders_of_packages()

    def is_users(entry: str) -> bool:
        is_pythons = entry.startswith(_STANDARD_LIBRARY_FOLDERS) or entry.endswith(".zip")
        if is_pythons or "-packages" in entry or entry in imported_from:
            return False
        return not any(Path(entry).glob("*.dist-info"))  # pip install --target

    # A stable sort: within both groups the order of the notebook is kept.
    return sorted(import_path(), key=is_users)


def _folders_of_packages() -> set[str]:
    """Where this process has imported them from, which may be a folder of sources."""
    files = [getattr(sys.modules.get(name), "__file__", None) for name in _IMPORTED_BY_THE_TEMPLATE]
    return {str(Path(file).parent.parent) for file in files if file}


def _deleted_folder() -> str:
    """The path of the deleted folder, as far as the system remembers it."""
    try:
        return os.readlink("/proc/self/cwd").removesuffix(" (deleted)")
    except OSError:
        return ""
