"""Modules that a file of the user's hides: a `torch.py` beside the notebook, imported as torch.

Standard library only, and nothing is imported: only modules that are loaded already are checked.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from nbaccel.base.errors import MissingBackend

__all__ = ["explain_import_errors", "refuse_hidden_modules"]

_HIDEABLE_PACKAGES = {"torch": ("PyTorch", "Tensor"), "numpy": ("NumPy", "ndarray")}
"""Name → what it is called, and a name that only the real one has."""

_STANDARD_LIBRARY = str(Path(os.__file__).parent)


@contextlib.contextmanager
def explain_import_errors(public_name: str) -> Iterator[None]:
    """Import a part of nbaccel in this block; if that fails, name the cause.

    Args:
        public_name: What of nbaccel was asked for.

    Raises:
        MissingBackend: A file of the user's was imported in place of what nbaccel needs.
        ImportError: The import failed. `from nbaccel import …` keeps no AttributeError.
    """
    refuse_hidden_modules()
    try:
        yield
    except (ImportError, AttributeError) as error:
        # Looked for only now: going through the standard library at every import would cost time.
        message = _hidden_package() or _hidden_library()
        if message:
            raise MissingBackend(message) from error
        if isinstance(error, AttributeError):
            raise ImportError(f"nbaccel.{public_name} cannot be imported: {error}") from error
        raise


def refuse_hidden_modules() -> None:
    """Check that the torch and the NumPy that have been imported are the real ones.

    Raises:
        MissingBackend: One is a file of the user's, which cannot do what is expected of it.
    """
    if message := _hidden_package():
        raise MissingBackend(message)


def _hidden_package() -> str:
    for module_name, (library_name, real_attribute) in _HIDEABLE_PACKAGES.items():
        module = sys.modules.get(module_name)
        if (
            module is None
            or hasattr(module, real_attribute)
            # A module lacks its names while it is being imported.
            or _is_being_imported(module)
        ):
            continue
        if module_place := _module_place(module):
            return _hidden_message(module_name, module_place, library_name)
    return ""


def _hidden_library() -> str:
    """The same for Python's own modules; those that were imported in their place."""
    for name in sys.stdlib_module_names:
        module_place = _module_place(sys.modules.get(name))
        if (
            module_place
            and not module_place.startswith(_STANDARD_LIBRARY)
            and not _is_installed_file(module_place)
        ):
            return _hidden_message(name, module_place, "Python's own module of this name")
    return ""


def _hidden_message(name: str, module_place: str, hidden_library: str) -> str:
    return (
        f"{name} is {module_place}, which hides {hidden_library}: rename that file, and "
        "restart the kernel. Python imports what it finds first in sys.path, and this comes "
        "before installed packages."
    )


def _is_being_imported(module: ModuleType) -> bool:
    return bool(getattr(module.__spec__, "_initializing", False))


def _is_installed_file(module_place: str) -> bool:
    """Whether a package's installer put it there: setuptools brings its own `distutils`."""
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(module_place).parts)


def _module_place(module: ModuleType | None) -> str:
    """The file of a module, or the folder of a package; empty if there is none."""
    file = getattr(module, "__file__", None)
    if not isinstance(file, str):
        return ""
    path = Path(file)
    return str(path.parent if path.name == "__init__.py" else path)
