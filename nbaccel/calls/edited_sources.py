"""Source files that were edited after the notebook imported them.

Workers import a local module from its file, so that they get the edited version, while the notebook
goes on with the one that it imported: two versions of a function under one name.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
import sysconfig
import types
import weakref
from collections.abc import Iterator, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from nbaccel.base.log import write_notice

__all__ = ["tell_of_edits"]


_OWN_PACKAGES = ("nbaccel", "__main__", "__mp_main__")


class _FileStamp(NamedTuple):
    """By what Python tells versions of a source file apart (PEP 552, timestamp-based pycs)."""

    mtime_s: int
    size_bytes: int


class _ImportedSource(NamedTuple):
    spec: ModuleSpec
    """Another one after a reload."""
    stamp: _FileStamp
    warned: _FileStamp | None = None
    """The edit that has been reported to the user."""


# Which version of a file is in this process's memory is a fact of the process, like the modules
# themselves. Weak, so that it keeps no module alive.
_IMPORTED_SOURCES: weakref.WeakKeyDictionary[types.ModuleType, _ImportedSource] = (
    weakref.WeakKeyDictionary()
)


def tell_of_edits() -> None:
    """Write a line for each local module whose file is not what this process has imported.

    Each edit is reported once.
    """
    for module_name, loaded_module, source_path in _local_modules():
        stamp = _stamp_of(source_path)
        source = _IMPORTED_SOURCES.get(loaded_module)
        module_spec = loaded_module.__spec__
        if stamp is None or module_spec is None:
            continue
        if source is None or source.spec is not module_spec:
            source = _ImportedSource(
                module_spec,
                _imported_stamp(module_spec) or _guessed_stamp(loaded_module, source_path, stamp),
            )
        if stamp not in (source.stamp, source.warned):
            write_notice(
                f"nbaccel: {source_path.name} has been edited since the notebook imported "
                f"{module_name}. Workers that import it now run the edited version, and the "
                "notebook runs the old one. To have one version everywhere: import importlib; "
                f"importlib.reload({module_name})\n"
            )
            source = source._replace(warned=stamp)
        _IMPORTED_SOURCES[loaded_module] = source


def _local_modules() -> Iterator[tuple[str, types.ModuleType, Path]]:
    """Modules from source files that are not installed packages."""
    for module_name in _local_names(len(sys.modules), next(reversed(sys.modules))):
        loaded_module = sys.modules.get(module_name)
        file = getattr(loaded_module, "__file__", None)
        if loaded_module is not None and isinstance(file, str):
            yield module_name, loaded_module, Path(file)


@functools.lru_cache(maxsize=1)
def _local_names(name_count: int, last_names: str) -> tuple[str, ...]:
    """Their names, found anew when the number of modules or the last one has changed.

    A thousand modules take milliseconds, which every cell would wait for.
    """
    path_names = ("stdlib", "platstdlib", "purelib", "platlib")
    installed_folders = tuple(sysconfig.get_path(path_name) for path_name in path_names)
    local_names = []
    for module_name in tuple(sys.modules):
        module_file = getattr(sys.modules.get(module_name), "__file__", None)
        if (
            not isinstance(module_file, str)
            or not module_file.endswith(".py")
            or "-packages" in module_file
        ):
            continue
        if (
            not module_file.startswith(installed_folders)
            and module_name.partition(".")[0] not in _OWN_PACKAGES
        ):
            local_names.append(module_name)
    return tuple(sorted(local_names))


def _imported_stamp(module_spec: ModuleSpec) -> _FileStamp | None:
    """The stamp of the source that was imported, from the bytecode file that Python made of it."""
    try:
        with Path(module_spec.cached or "").open("rb") as file:
            header = file.read(16)
    except OSError:
        return None
    is_by_time = header[:4] == importlib.util.MAGIC_NUMBER and header[4:8] == bytes(4)
    if len(header) < 16 or not is_by_time:
        return None
    return _FileStamp(
        int.from_bytes(header[8:12], "little"), int.from_bytes(header[12:16], "little")
    )


def _guessed_stamp(module: types.ModuleType, source_path: Path, stamp: _FileStamp) -> _FileStamp:
    """The same where no bytecode file is written: functions are compared with the source's."""
    if stamp.mtime_s < int(psutil.Process().create_time()):
        # Not edited since this process began.
        return stamp
    try:
        code_object = compile(source_path.read_bytes(), str(source_path), "exec", dont_inherit=True)
    # A file that does not compile has been edited, and the edit is not finished.
    except (OSError, SyntaxError, ValueError):
        return _FileStamp(0, 0)
    return stamp if _is_same(code_object, vars(module)) else _FileStamp(0, 0)


def _is_same(code_object: types.CodeType, namespace: Mapping[str, Any]) -> bool:
    """Whether the functions and classes in a body of code are those that a namespace has."""
    for inner_code in code_object.co_consts:
        current_object = (
            namespace.get(inner_code.co_name) if isinstance(inner_code, types.CodeType) else None
        )
        if (
            isinstance(current_object, types.FunctionType)
            and inspect.unwrap(current_object).__code__ != inner_code
        ):
            return False
        if isinstance(current_object, type) and not _is_same(inner_code, vars(current_object)):
            return False
    return True


def _stamp_of(source_path: Path) -> _FileStamp | None:
    try:
        file_status = source_path.stat()
    except OSError:
        return None
    # Truncated as in the header of a bytecode file.
    return _FileStamp(int(file_status.st_mtime) & 0xFFFFFFFF, file_status.st_size & 0xFFFFFFFF)
