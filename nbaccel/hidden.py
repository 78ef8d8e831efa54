"""Modules that a file of the user's hides: a `torch.py` beside the notebook, imported as torch.

Standard library only, and nothing is imported: what has been imported is looked at.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from nbaccel.errors import MissingBackend

__all__ = ["importing", "refuse"]

_PACKAGES = {"torch": ("PyTorch", "Tensor"), "numpy": ("NumPy", "ndarray")}
"""Name → what it is called, and a name that only the real one has."""

_STANDARD_LIBRARY = str(Path(os.__file__).parent)


@contextlib.contextmanager
def importing(name: str) -> Iterator[None]:
    """Import a part of nbaccel in this block; if that fails, the cause is told.

    Args:
        name: What of nbaccel was asked for.

    Raises:
        MissingBackend: A file of the user's was imported in place of what nbaccel needs.
        ImportError: The import failed. `from nbaccel import …` keeps no AttributeError.
    """
    refuse()
    try:
        yield
    except (ImportError, AttributeError) as error:
        found = _hidden_package() or _hidden_library()
        if found:
            raise MissingBackend(found) from error
        if isinstance(error, AttributeError):
            raise ImportError(f"nbaccel.{name} cannot be imported: {error}") from error
        raise


def refuse() -> None:
    """See that the torch and the NumPy that have been imported are the real ones.

    Raises:
        MissingBackend: One is a file of the user's, which cannot do what is expected of it.
    """
    if found := _hidden_package():
        raise MissingBackend(found)


def _hidden_package() -> str:
    for name, (called, attribute) in _PACKAGES.items():
        module = sys.modules.get(name)
        if module is None or hasattr(module, attribute) or _is_being_imported(module):
            continue
        if place := _place(module):
            return _told(name, place, called)
    return ""


def _hidden_library() -> str:
    """The same for Python's own modules; those that were imported in their place."""
    for name in sys.stdlib_module_names:
        place = _place(sys.modules.get(name))
        if place and not place.startswith(_STANDARD_LIBRARY) and not _is_installed(place):
            return _told(name, place, "Python's own module of this name")
    return ""


def _told(name: str, place: str, called: str) -> str:
    return (
        f"{name} is {place}, which hides {called}: rename that file, and restart the kernel. "
        "Python imports what it finds first in sys.path, and this comes before installed packages."
    )


def _is_being_imported(module: ModuleType) -> bool:
    return bool(getattr(module.__spec__, "_initializing", False))


def _is_installed(place: str) -> bool:
    """Whether a package's installer put it there: setuptools brings its own `distutils`."""
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(place).parts)


def _place(module: ModuleType | None) -> str:
    """The file of a module, or the folder of a package; empty if there is none."""
    file = getattr(module, "__file__", None)
    if not isinstance(file, str):
        return ""
    path = Path(file)
    return str(path.parent if path.name == "__init__.py" else path)
