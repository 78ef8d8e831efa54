"""Modules of installed packages that this process has imported, and whether their files changed.

Standard library only, because `template` imports it at load time.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path

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
_SUFFIXES = (".py", ".so", ".pyd")

FileStamp = tuple[int, int]
"""What tells versions of a file apart: when it was changed (ns), and its size in bytes."""


def installed_modules() -> Mapping[str, str]:
    """Modules of installed packages in this process, and nbaccel's own."""
    return _sorted_out(len(sys.modules), next(reversed(sys.modules)))[0]


def local_modules() -> frozenset[str]:
    """Names of the modules from files that belong to no installed package: the user's own."""
    return _sorted_out(len(sys.modules), next(reversed(sys.modules)))[1]


def by_package(module_names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The same by top-level package, that of the last one first.

    A package is imported after those that it imports have begun, so that the last ones depend on no
    others: what is at fault is found by itself, before those that import it.
    """
    packages: dict[str, list[str]] = {}
    for name in module_names:
        packages.setdefault(name.partition(".")[0], []).append(name)
    return {package: tuple(packages[package]) for package in reversed(packages)}


def stamps_of(files: Mapping[str, str]) -> dict[str, FileStamp | None]:
    """The present version of each file; None for one that is gone."""
    return {name: _version_of(path) for name, path in files.items()}


@functools.lru_cache(maxsize=1)
def _sorted_out(_num_names: int, _last_name: str) -> tuple[Mapping[str, str], frozenset[str]]:
    """Installed modules and local ones; found anew when modules were imported or removed.

    A thousand modules take a millisecond, which every cell would wait for.
    """
    installed: dict[str, str] = {}
    local = set()
    for name in tuple(sys.modules):
        # Not by getattr: a module may import another one when it is asked for what it lacks.
        attributes = getattr(sys.modules.get(name), "__dict__", {})
        file = attributes.get("__file__")
        package = name.partition(".")[0]
        if (
            not isinstance(file, str)
            or not file.endswith(_SUFFIXES)
            or package in _OF_THE_KERNEL
            or _OF_THE_DEBUGGER in file
            or name.startswith(_OF_LAUNCHES)
            or package in {"__main__", "__mp_main__"}
        ):
            continue
        if package == "nbaccel" or _is_installed(os.path.dirname(file)):
            if getattr(attributes.get("__spec__"), "name", None) == name:
                installed[name] = file
        elif not file.startswith(_standard_folders()):
            local.add(name)
    return installed, frozenset(local)


@functools.lru_cache(maxsize=4096)
def _is_installed(folder: str) -> bool:
    if "-packages" in folder or folder.startswith(_package_folders()):
        return True
    if folder.startswith(_standard_folders()):
        return False
    # pip install --target: the folder of packages has their metadata beside them.
    entries = {os.path.normpath(entry) for entry in sys.path if entry}
    return any(
        folder.startswith(entry) and any(Path(entry).glob("*.dist-info")) for entry in entries
    )


@functools.lru_cache(maxsize=1)
def _package_folders() -> tuple[str, ...]:
    return tuple(map(sysconfig.get_path, ("purelib", "platlib")))


@functools.lru_cache(maxsize=1)
def _standard_folders() -> tuple[str, ...]:
    return tuple(map(sysconfig.get_path, ("stdlib", "platstdlib")))


def _version_of(path: str) -> FileStamp | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
