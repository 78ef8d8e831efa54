"""What the notebook has changed of what it has imported: installed packages, edited source files.

    module ──► its attributes ─┬─► classes ───► their attributes ──► tables
                               ├─► tables, lists
                               └─► objects ───► their tables         (CONFIG_MAPPING of AutoConfig)

Looked for are functions and classes of the notebook, or of the user's own modules; plain values
(`package.FLAG = True`) cannot be told from a package's own doing. Before a later launch only
modules that have changed are looked into: there are hundreds of thousands of attributes.

Workers import a local module from its file, so that they get the edited version, while the notebook
goes on with the one that it imported (jupyter/notebook#2395, joblib/joblib#1085).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import os
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.machinery import ModuleSpec
from typing import Any, NamedTuple

import torch

from nbaccel.base import frames
from nbaccel.base.log import write_notice
from nbaccel.transfer import pickling
from nbaccel.transfer.package_changes import ChangeKind, LateChange, PackageChange
from nbaccel.workers.template import installed_modules, local_modules

# They hold the notebook's functions as they run or pickle them. Symbols of sympy and mpmath are
# slow to compare, and the last two are thousands of constants.
_NOT_LOOKED_AT = frozenset(
    {"IPython", "ipywidgets", "traitlets", "jedi", "parso", "prompt_toolkit", "pygments", "comm"}
    | {"debugpy", "nbaccel", "cloudpickle", "dill", "pytest", "pluggy", "hypothesis", "coverage"}
    | {"_pytest", "sympy", "mpmath", "pynvml", "torchgen"}
)
# Half of all attributes of a notebook, and nobody's to change.
_INNER_MODULES = (
    *("torch._", "numpy._"),
    *("torch.ao.", "torch.fx.", "torch.package.", "torch.return_types"),
)
_TENSOR_TYPE = type(torch.FloatTensor)  # of 50 classes with the same hundreds of methods
_LONGEST_TABLE = 4096


_Identity = tuple[object, ...]  # what tells a change from others in this process


class _ScannedPlace(NamedTuple):
    """A module, class, object, table or list of an installed package."""

    path: str
    kind: ChangeKind
    owner: Any  # the thing itself
    has_tables: bool = False  # are its tables looked into? not in private modules with caches

    def values(self) -> Iterable[Any]:
        """A view of all that it holds, which follows changes and runs no Python code."""
        if self.kind == "attribute":
            return _attributes_of(self.owner).values()
        return dict.values(self.owner) if self.kind == "entry" else self.owner

    def items(self) -> list[tuple[Any, Any]]:
        """The same, each with its name or key."""
        if self.kind == "attribute":
            return list(_attributes_of(self.owner).items())
        if self.kind == "entry":
            return list(dict.items(self.owner))
        return [(None, element) for element in self.owner]


class _ScannedModule(NamedTuple):
    """A module of a package, and what all places in it held."""

    module: types.ModuleType
    views: list[Iterable[Any]]
    held: list[Any]
    changes: dict[_Identity, PackageChange]

    def has_changed(self) -> bool:
        """Whether any place holds something else now."""
        values = list(itertools.chain.from_iterable(self.views))
        try:
            return values != self.held
        except Exception:  # values of packages compare as they like
            return True


class _PackageScan:
    """Modules of installed packages, and what was found in them."""

    def __init__(self) -> None:
        self._users: frozenset[str] = frozenset()  # names of the user's own modules
        self._packages: Mapping[str, str] = {}
        self._modules: dict[str, _ScannedModule] = {}

    def changes(self) -> dict[_Identity, PackageChange]:
        """All changes that there are now."""
        if self.is_behind():
            users = local_modules() | {"__main__"}
            # A module of the user's that was not imported yet may have been what was found.
            known = self._modules if users == self._users else {}
            self._users = users
            self._packages = installed_modules()
            # Thousands of new places would set the collector off again and again.
            was_on = gc.isenabled()
            gc.disable()
            try:
                self._modules = dict(self._look_at_modules(known))
            finally:
                (gc.enable if was_on else gc.disable)()
        changes: dict[_Identity, PackageChange] = {}
        for name, scanned in self._modules.items():
            if scanned.has_changed():
                self._modules[name] = self._scan(name, scanned.module)
            # The same table may have a name in many modules.
            for identity, change in self._modules[name].changes.items():
                changes.setdefault(identity, change)
        return changes

    def is_behind(self) -> bool:
        """Whether modules have been imported since."""
        return installed_modules() is not self._packages

    def _look_at_modules(
        self, known: Mapping[str, _ScannedModule]
    ) -> Iterator[tuple[str, _ScannedModule]]:
        for name in self._packages:
            module = sys.modules.get(name)
            is_left_out = name.partition(".")[0] in _NOT_LOOKED_AT
            if module is None or is_left_out or name.startswith(_INNER_MODULES):
                continue
            scanned = known.get(name)
            if scanned is None or scanned.module is not module:
                scanned = self._scan(name, module)
            yield name, scanned

    def _scan(self, name: str, module: types.ModuleType) -> _ScannedModule:
        is_public = not any(part.startswith("_") for part in name.split("."))
        place = _ScannedPlace("", "attribute", module, is_public)
        places = [place, *self._places_within(name, place)]
        views = [place.values() for place in places]
        return _ScannedModule(
            module=module,
            views=views,
            held=list(itertools.chain.from_iterable(views)),
            changes=dict(found for place in places for found in self._changes_in(name, place)),
        )

    def _changes_in(
        self, module: str, place: _ScannedPlace
    ) -> Iterator[tuple[_Identity, PackageChange]]:
        for key, value in place.items():
            kind = type(value)
            # First what most values are told by.
            is_code = kind in _WRAPPERS or issubclass(kind, type)
            if (is_code and self._is_users(value)) or (
                place.kind == "entry" and self._is_users(key)
            ):
                key_identity = key if isinstance(key, str) else id(key)
                identity = (id(place.owner), place.kind, key_identity, id(value))
                yield (
                    identity,
                    PackageChange(
                        module=module, holder=place.path, kind=place.kind, key=key, value=value
                    ),
                )

    def _is_users(self, value: Any, depth_left: int = 3) -> bool:
        """Whether it is a function or class of the notebook, or wraps one."""
        kind = type(value)
        if issubclass(kind, type):
            return _module_of(value) in self._users
        if kind is types.FunctionType and value.__globals__.get("__name__") in self._users:
            return True
        wrapped_by = _WRAPPERS.get(kind)
        return (
            wrapped_by is not None
            and depth_left > 0
            and any(self._is_users(inner, depth_left - 1) for inner in wrapped_by(value))
        )

    def _places_within(self, module: str, place: _ScannedPlace) -> Iterator[_ScannedPlace]:
        """Classes and objects of a module, and the tables and lists of each."""
        for name, value in place.items():
            path = f"{place.path}.{name}" if place.path else name
            kind = type(value)
            if issubclass(kind, type):
                # Elsewhere than in its own module it is another name of it.
                if kind is not _TENSOR_TYPE and not place.path and _module_of(value) == module:
                    found_class = _ScannedPlace(path, "attribute", value, place.has_tables)
                    yield from (found_class, *self._places_within(module, found_class))
                continue
            if not place.has_tables or name.startswith("__") or "cache" in name.lower():
                continue
            if issubclass(kind, dict) and _may_hold_code(value):
                yield _ScannedPlace(path, "entry", value)
            elif kind is list and len(value) <= _LONGEST_TABLE:
                yield _ScannedPlace(path, "element", value)
            # An object of a package: it may have tables.
            if (
                not place.path
                and _module_of(kind) in self._packages
                and type(_attributes_of(value)) is dict
                and not issubclass(kind, types.ModuleType)
            ):
                found = _ScannedPlace(path, "attribute", value, has_tables=True)
                yield from (found, *self._places_within(module, found))


def _attributes_of(owner: Any) -> Mapping[str, Any]:
    # Not as a user would: objects of torch warn of being asked for anything.
    try:
        return object.__getattribute__(owner, "__dict__")  # type: ignore[no-any-return]
    except AttributeError:
        return types.MappingProxyType({})


def _may_hold_code(table: dict[Any, Any]) -> bool:
    # Not as a user would ask: tables of transformers import models then. Long ones are data.
    num_entries = dict.__len__(table)
    return num_entries == 0 or (
        num_entries <= _LONGEST_TABLE
        and any(type(value) is not str for value in dict.values(table))
    )


def _module_of(found_class: type) -> Any:
    # As above: a metaclass may have its own ideas.
    return type.__getattribute__(found_class, "__module__")


def _closed_over(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        # An empty cell raises ValueError: the variable has no value yet.
        with contextlib.suppress(ValueError):
            yield cell.cell_contents


_WRAPPERS: Mapping[type, Callable[[Any], Iterable[Any]]] = {
    types.FunctionType: _closed_over,
    types.MethodType: lambda method: (method.__func__,),
    staticmethod: lambda method: (method.__func__,),
    classmethod: lambda method: (method.__func__,),
    property: lambda found: (found.fget, found.fset, found.fdel),
    functools.partial: lambda found: (found.func,),
}
"""What a function can be wrapped in, and what is in that."""


_scan = _PackageScan()
_CHECKED: dict[_Identity, str] = {}  # change that is there → why it cannot be sent; empty if it can
_of_this_cell: tuple[PackageChange | LateChange, ...] | None = None  # None: not looked for yet


def sendable_changes(*, looks_anew: bool = True) -> tuple[PackageChange | LateChange, ...]:
    """The changes that workers can be given, found now or at the cell's first call of live ones."""
    global _of_this_cell  # noqa: PLW0603 - a fact of the process, like the modules themselves
    if not (looks_anew or _of_this_cell is None or _scan.is_behind()):
        return _of_this_cell
    changes = _scan.changes()
    for identity in _CHECKED.keys() - changes.keys():
        del _CHECKED[identity]
    for identity, change in changes.items():
        if identity not in _CHECKED:
            _CHECKED[identity] = _why_not(change)
            if _CHECKED[identity]:
                write_notice(
                    f"nbaccel: workers do not have what the notebook has put at {change.place}: "
                    f'{_CHECKED[identity]}. Do it in the function, or use start_method="fork".\n'
                )
    _of_this_cell = tuple(
        _when_needed(change) for identity, change in changes.items() if not _CHECKED[identity]
    )
    return _of_this_cell


def _when_needed(change: PackageChange) -> PackageChange | LateChange:
    """The change, put off where it is an entry for a class of a module of the user's."""
    users_module = ""
    if change.kind == "entry" and isinstance(change.key, type):
        users_module = change.key.__module__
    elif change.kind == "entry" and isinstance(change.key, str) and isinstance(change.value, type):
        # torch's names of classes, by which it saves and loads them.
        is_its_name = change.key.startswith(f"{change.value.__module__}.")
        users_module = change.value.__module__ if is_its_name else ""
    if users_module not in local_modules():
        return change
    return LateChange(users_module=users_module, pickled=pickling.dumps_with_lines(change))


def _after_cell(_result: object = None) -> None:
    global _of_this_cell  # noqa: PLW0603 - as in `sendable_changes`
    _of_this_cell = None
    # Modules that were imported are looked at now: a launch would wait for it.
    if _scan.is_behind():
        _scan.changes()


_shell = frames.running_shell()
FOLLOWS_CELLS = _shell is not None  # elsewhere than in cells nothing says where one ends
if _shell is not None:
    _shell.events.register("post_run_cell", _after_cell)


def _why_not(change: PackageChange) -> str:
    if change.kind == "entry" and isinstance(change.key, int):
        # A counter of the package's gives them out: that of a worker would give out the same ones.
        return "its number may be another one there"
    try:
        pickling.dumps_with_lines(change)
    except Exception as error:  # pickling runs user code: it may raise anything
        return f"it cannot be pickled ({error})"
    return ""


# Weak, so that it keeps no module alive. The spec is another one after a reload.
_KNOWN_VERSIONS: weakref.WeakKeyDictionary[types.ModuleType, tuple[ModuleSpec, int, int]] = (
    weakref.WeakKeyDictionary()
)
"""Module → its spec, when what was imported was written, and the last edit that was told."""


def tell_of_edits() -> bool:
    """Tell, once for each edit, of each local module whose file is newer than its import."""
    has_edits = False
    for name in sorted(local_modules()):
        module = sys.modules.get(name)
        spec: ModuleSpec | None = getattr(module, "__spec__", None)
        if module is None or spec is None:
            continue
        source_time = _time_of(module.__file__)
        known_spec, imported_time, told_time = _KNOWN_VERSIONS.get(module, (None, 0, 0))
        if known_spec is not spec:
            # Python writes the bytecode file when it imports. Where it may not, there may be one of
            # an older version. Without one, edits count from here.
            bytecode = None if sys.dont_write_bytecode else spec.cached
            imported_time = told_time = _time_of(bytecode) or source_time
        has_edits |= source_time > imported_time
        if source_time > told_time:
            write_notice(
                f"nbaccel: {os.path.basename(str(module.__file__))} has been edited since the "
                f"notebook imported {name}. Workers that import it now run the edited "
                "version, and the notebook runs the old one unless %autoreload has replaced it. To "
                f"have one version everywhere: import importlib; importlib.reload({name})\n"
            )
        _KNOWN_VERSIONS[module] = (spec, imported_time, max(source_time, told_time))
    return has_edits


def _time_of(path: str | None) -> int:
    """When a file was written, in nanoseconds; 0 where there is none."""
    try:
        return os.stat(path or "").st_mtime_ns
    except OSError:
        return 0
