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

__all__ = ["tell_of_edits"]


_OURS = ("nbaccel", "__main__", "__mp_main__")


class _Stamp(NamedTuple):
    """What Python itself tells versions of a source file by (PEP 552, "timestamp-based pycs")."""

    mtime_s: int
    size_bytes: int


class _Imported(NamedTuple):
    spec: ModuleSpec
    """Another one after a reload."""
    stamp: _Stamp
    told: _Stamp | None = None
    """The edit that the user has been told of."""


# Which version of a file is in this process's memory is a fact of the process, like the modules
# themselves. Weak, so that it keeps no module alive.
_IMPORTED: weakref.WeakKeyDictionary[types.ModuleType, _Imported] = weakref.WeakKeyDictionary()


def tell_of_edits() -> None:
    """Write a line for each local module whose file is not what this process has imported.

    Each edit is told once.
    """
    for name, module, path in _local_modules():
        now = _stamp_of(path)
        known = _IMPORTED.get(module)
        spec = module.__spec__
        if now is None or spec is None:
            continue
        if known is None or known.spec is not spec:
            known = _Imported(spec, _imported_stamp(spec) or _guessed_stamp(module, path, now))
        if now not in (known.stamp, known.told):
            sys.stderr.write(
                f"nbaccel: {path.name} has been edited since the notebook imported {name}. Workers "
                "that import it now run the edited version, and the notebook runs the old one. "
                f"To have one version everywhere: import importlib; importlib.reload({name})\n"
            )
            known = known._replace(told=now)
        _IMPORTED[module] = known


def _local_modules() -> Iterator[tuple[str, types.ModuleType, Path]]:
    """Modules from source files that are not installed packages."""
    for name in _local_names(len(sys.modules), next(reversed(sys.modules))):
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if module is not None and isinstance(file, str):
            yield name, module, Path(file)


@functools.lru_cache(maxsize=1)
def _local_names(count: int, last: str) -> tuple[str, ...]:
    """Their names; looked for again when another number of modules is there, or another last one.

    A thousand modules take milliseconds, which every cell would wait for.
    """
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    installed = tuple(sysconfig.get_path(kind) for kind in kinds)
    found = []
    for name in tuple(sys.modules):
        file = getattr(sys.modules.get(name), "__file__", None)
        if not isinstance(file, str) or not file.endswith(".py") or "-packages" in file:
            continue
        if not file.startswith(installed) and name.partition(".")[0] not in _OURS:
            found.append(name)
    return tuple(sorted(found))


def _imported_stamp(spec: ModuleSpec) -> _Stamp | None:
    """The stamp of the source that was imported, from the bytecode file that Python made of it."""
    try:
        with Path(spec.cached or "").open("rb") as file:
            header = file.read(16)
    except OSError:
        return None
    is_by_time = header[:4] == importlib.util.MAGIC_NUMBER and header[4:8] == bytes(4)
    if len(header) < 16 or not is_by_time:
        return None
    return _Stamp(int.from_bytes(header[8:12], "little"), int.from_bytes(header[12:16], "little"))


def _guessed_stamp(module: types.ModuleType, path: Path, now: _Stamp) -> _Stamp:
    """The same where no bytecode file is written: functions are compared with the source's."""
    if now.mtime_s < int(psutil.Process().create_time()):
        return now  # nobody has edited it since this process began
    try:
        code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except (OSError, SyntaxError, ValueError):  # an edit that is not finished is an edit
        return _Stamp(0, 0)
    return now if _is_same(code, vars(module)) else _Stamp(0, 0)


def _is_same(code: types.CodeType, found: Mapping[str, Any]) -> bool:
    """Whether the functions and classes in a body of code are those that a namespace has."""
    for inner in code.co_consts:
        value = found.get(inner.co_name) if isinstance(inner, types.CodeType) else None
        if isinstance(value, types.FunctionType) and inspect.unwrap(value).__code__ != inner:
            return False
        if isinstance(value, type) and not _is_same(inner, vars(value)):
            return False
    return True


def _stamp_of(path: Path) -> _Stamp | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return _Stamp(int(found.st_mtime) & 0xFFFFFFFF, found.st_size & 0xFFFFFFFF)
