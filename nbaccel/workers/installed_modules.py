"""Modules of installed packages that this process has imported, and whether their files changed.

Standard library only, because `template` imports it at load time.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

__all__ = [
    "FileStamp",
    "by_package",
    "installed_modules",
    "local_modules",
    "stamps_of",
]


# A kernel's own: its threads, sockets and tracing are the notebook's, and no worker uses them.
_OF_THE_KERNEL = frozenset(
    {"ipykernel", "ipykernel_launcher", "zmq", "tornado", "jupyter_client", "jupyter_core"}
    # The latter sets itself up for the shell that is there when it is imported.
    | {"nest_asyncio", "matplotlib_inline"}
)
# What of nbaccel works in the notebook's process only; of the rest workers have what they need.
_OF_LAUNCHES = tuple(
    f"nbaccel.{name}"
    for name in ("launchers", "output", "hosts", "notebook", "cli", "calls", "plan")
)
_OF_THE_DEBUGGER = f"{os.sep}debugpy{os.sep}"
"""It puts its own folder on the path, so that its modules have names of their own."""
_PURE = ".py"
_COMPILED = (".so", ".pyd")


FileStamp = tuple[int, int]
"""What tells versions of a file apart: when it was changed (ns), and its size in bytes."""


def installed_modules() -> Mapping[str, str]:
    """Modules of installed packages in this process, and nbaccel's own."""
    return _sorted_out(len(sys.modules), next(reversed(sys.modules)))[0]


def local_modules() -> frozenset[str]:
    """Names of the modules from files that belong to no installed package: the user's own."""
    return _sorted_out(len(sys.modules), next(reversed(sys.modules)))[1]


def by_package(module_names: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """The same by top-level package, that of the last one first.

    A package is imported after those that it imports have begun, so that the last ones depend on no
    others: what is at fault is found by itself, before those that import it.
    """
    names_by_package: dict[str, list[str]] = {}
    for module_name in module_names:
        names_by_package.setdefault(module_name.partition(".")[0], []).append(module_name)
    return {
        package_name: tuple(names_by_package[package_name])
        for package_name in reversed(names_by_package)
    }


def stamps_of(files: Mapping[str, str]) -> dict[str, FileStamp | None]:
    """The present version of each file; None for one that is gone."""
    return {module_name: _version_of(path) for module_name, path in files.items()}


@functools.lru_cache(maxsize=1)
def _sorted_out(name_count: int, last_name: str) -> tuple[Mapping[str, str], frozenset[str]]:
    """Installed modules and local ones; found anew when modules were imported or removed.

    A thousand modules take a millisecond, which every cell would wait for.
    """
    installed_files: dict[str, str] = {}
    local_names = set()
    for module_name in tuple(sys.modules):
        # Not by getattr: a module may import another one when it is asked for what it lacks.
        attributes = getattr(sys.modules.get(module_name), "__dict__", {})
        file_path = attributes.get("__file__")
        package_name = module_name.partition(".")[0]
        if (
            not isinstance(file_path, str)
            or not file_path.endswith((_PURE, *_COMPILED))
            or package_name in _OF_THE_KERNEL
            or _OF_THE_DEBUGGER in file_path
            or module_name.startswith(_OF_LAUNCHES)
            or package_name in {"__main__", "__mp_main__"}
        ):
            continue
        if package_name == "nbaccel" or _is_installed(os.path.dirname(file_path)):
            if getattr(attributes.get("__spec__"), "name", None) == module_name:
                installed_files[module_name] = file_path
        elif not file_path.startswith(_standard_folders()):
            local_names.add(module_name)
    return installed_files, frozenset(local_names)


@functools.lru_cache(maxsize=4096)
def _is_installed(folder: str) -> bool:
    if "-packages" in folder or folder.startswith(_package_folders()):
        return True
    if folder.startswith(_standard_folders()):
        return False
    # pip install --target: the folder of packages has their metadata beside them.
    import_folders = {os.path.normpath(entry) for entry in sys.path if entry}
    return any(
        folder.startswith(import_folder) and any(Path(import_folder).glob("*.dist-info"))
        for import_folder in import_folders
    )


@functools.lru_cache(maxsize=1)
def _package_folders() -> tuple[str, ...]:
    return tuple(sysconfig.get_path(path_name) for path_name in ("purelib", "platlib"))


@functools.lru_cache(maxsize=1)
def _standard_folders() -> tuple[str, ...]:
    return tuple(sysconfig.get_path(path_name) for path_name in ("stdlib", "platstdlib"))


def _version_of(path: str) -> FileStamp | None:
    try:
        file_status = os.stat(path)
    except OSError:
        return None
    return file_status.st_mtime_ns, file_status.st_size
