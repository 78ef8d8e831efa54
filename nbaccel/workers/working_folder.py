"""The folder that this process works in, and what it imports from: also where it has been deleted.

Standard library only, because `template` imports it at load time.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["current_folder", "explain_here", "import_path", "installed_first"]


_IMPORTED_BY_THE_TEMPLATE = ("nbaccel", "torch", "numpy", "IPython")
_STANDARD_LIBRARY_FOLDERS = os.path.dirname(os.__file__)


def current_folder() -> str:
    """The working folder; if it has been deleted, the next folder above it that exists."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        deleted_folder = Path(_deleted_folder())
        return str(
            next(
                (folder for folder in deleted_folder.parents if folder.is_dir()),
                Path.home(),
            )
        )


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
    working_folder = current_folder()
    return [os.path.normpath(os.path.join(working_folder, entry)) for entry in sys.path]


def installed_first() -> list[str]:
    """The same for a process that imports installed packages only: the user's own folders go last.

    A `random.py` or a `torch.py` beside the notebook hides the real one from every process that
    starts there, also where the notebook imported the real one before it went there.
    """
    # A stable sort: within both groups the order of the notebook is kept.
    return sorted(import_path(), key=lambda path_entry: not _has_packages(path_entry))


def _has_packages(entry: str) -> bool:
    """Whether a folder is the standard library's, or one that packages are installed in."""
    in_library = entry.startswith(_STANDARD_LIBRARY_FOLDERS) or entry.endswith(".zip")
    if in_library or "-packages" in entry or entry in _folders_of_packages():
        return True
    return any(Path(entry).glob("*.dist-info"))  # pip install --target


def _folders_of_packages() -> set[str]:
    """Where this process has imported them from, which may be a folder of sources."""
    package_files = (
        getattr(sys.modules.get(name), "__file__", None) for name in _IMPORTED_BY_THE_TEMPLATE
    )
    return {str(Path(package_file).parent.parent) for package_file in package_files if package_file}


def _deleted_folder() -> str:
    """The path of the deleted folder, as far as the system remembers it."""
    try:
        return os.readlink("/proc/self/cwd").removesuffix(" (deleted)")
    except OSError:
        return ""
