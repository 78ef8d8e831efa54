"""The folder that this process works in, and what it imports from: also where it has been deleted.

Standard library only, as `warmup` is.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["here", "import_path", "installed_first", "told_here"]

_IMPORTED_BY_THE_TEMPLATE = ("nbaccel", "torch", "numpy", "IPython")
_STANDARD_LIBRARY = os.path.dirname(os.__file__)


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


def installed_first() -> list[str]:
    """The same for a process that imports installed packages only: the user's own folders go last.

    A `random.py` or a `torch.py` beside the notebook hides the real one from every process that
    starts there, also where the notebook imported the real one before it went there.
    """
    return sorted(import_path(), key=lambda entry: not _has_packages(entry))


def _has_packages(entry: str) -> bool:
    """Whether a folder is the standard library's, or one that packages are installed in."""
    in_library = entry.startswith(_STANDARD_LIBRARY) or entry.endswith(".zip")
    if in_library or "-packages" in entry or entry in _folders_of_packages():
        return True
    return any(Path(entry).glob("*.dist-info"))  # pip install --target


def _folders_of_packages() -> set[str]:
    """Where this process has imported them from, which may be a folder of sources."""
    files = (getattr(sys.modules.get(name), "__file__", None) for name in _IMPORTED_BY_THE_TEMPLATE)
    return {str(Path(file).parent.parent) for file in files if file}


def _deleted() -> str:
    """The folder that was there, as far as the system remembers it."""
    try:
        return os.readlink("/proc/self/cwd").removesuffix(" (deleted)")
    except OSError:
        return ""
