"""What this process imports from, and what it has imported of installed packages.

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
_IMPORTED_BY_THE_TEMPLATE = ("nbaccel", "torch", "numpy", "IPython")


def installed_modules() -> Mapping[str, str]:
    """Modules of installed packages, and of nbaccel, in the order of their imports → files."""
    return _sorted_out(len(sys.modules), next(reversed(sys.modules)))[0]


def local_modules() -> frozenset[str]:
    """Names of the modules from files that belong to no installed package: the user's own."""
    return _sorted_out(len(sys.modules), next(reversed(sys.modules)))[1]


def by_package(module_names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The same by top-level package, the last one first: it depends on none of the others."""
    packages: dict[str, list[str]] = {}
    for name in module_names:
        packages.setdefault(name.partition(".")[0], []).append(name)
    return {package: tuple(packages[package]) for package in reversed(packages)}


@functools.lru_cache(maxsize=1)
def _sorted_out(_num_names: int, _last_name: str) -> tuple[Mapping[str, str], frozenset[str]]:
    """Installed modules and local ones. Kept, as each cell would wait a millisecond for them."""
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
    package_folders = tuple(map(sysconfig.get_path, ("purelib", "platlib")))
    if "-packages" in folder or folder.startswith(package_folders):
        return True
    if folder.startswith(_standard_folders()):
        return False
    # pip install --target: the folder of packages has their metadata beside them.
    entries = {os.path.normpath(entry) for entry in sys.path if entry}
    return any(
        folder.startswith(entry) and any(Path(entry).glob("*.dist-info")) for entry in entries
    )


@functools.lru_cache(maxsize=1)
def _standard_folders() -> tuple[str, ...]:
    return tuple(map(sysconfig.get_path, ("stdlib", "platstdlib")))


# ------------------------------------------------------------------------- where from


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
    """The same with the user's own folders last, where a `random.py` would hide the real one."""
    imported_from = _folders_of_packages()

    def is_users(entry: str) -> bool:
        is_pythons = entry.startswith(_standard_folders()) or entry.endswith(".zip")
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
