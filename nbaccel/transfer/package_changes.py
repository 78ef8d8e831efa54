"""Changes of installed packages: what they are made of, and how a worker makes them.

A change is one attribute of a module or class, one entry of a table, or one element of a list that
holds a function or class of the notebook: a replaced method, a registered model.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

from nbaccel.base.training_libraries import patch_module

PACKAGE_CHANGES = "nbaccel_package_changes"  # the name by which changes travel to live workers
ChangeKind = Literal["attribute", "entry", "element"]


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class PackageChange:
    """One place in an installed package, and what the notebook has put there."""

    module: str
    holder: str
    """Dotted path, within the module, of what has the attribute, entry or element; or empty."""
    kind: ChangeKind
    key: Any
    value: Any

    @property
    def place(self) -> str:
        """How a user would write it."""
        path = f"{self.module}.{self.holder}" if self.holder else self.module
        if self.kind == "attribute":
            return f"{path}.{self.key}"
        key = getattr(self.key, "__name__", None) or repr(self.key)
        return f"{path}[{key}]" if self.kind == "entry" else path


@dataclass(frozen=True, kw_only=True, slots=True)
class LateChange:
    """An entry for a class of the user's module, for when a worker imports that, if it does."""

    users_module: str
    pickled: bytes


class AppliedChanges:
    """The notebook's changes as one worker has them."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []
        self._late: dict[str, list[bytes]] = {}  # user's module → changes at its import
        self._awaited: set[str] = set()

    def follow(self, changes: Sequence[PackageChange | LateChange]) -> None:
        """Make these changes, and take back those that were made before."""
        # In reverse, so that the first value of a place comes last.
        while self._undo:
            with contextlib.suppress(Exception):  # the package's own classes may raise anything
                self._undo.pop()()
        self._late.clear()
        for change in changes:
            if isinstance(change, PackageChange):
                self._make(change)
            elif change.users_module in sys.modules:
                self._make(pickle.loads(change.pickled))
            else:
                self._late.setdefault(change.users_module, []).append(change.pickled)
        for users_module in self._late.keys() - self._awaited:
            self._awaited.add(users_module)
            patch_module(users_module, self._make_late)

    def _make_late(self, module: ModuleType) -> None:
        for pickled in self._late.pop(module.__name__, ()):
            self._make(pickle.loads(pickled))

    def _make(self, change: PackageChange) -> None:
        try:
            self._undo.append(_apply(change))
        except Exception as error:  # imports and descriptors of packages may raise anything
            sys.stderr.write(
                f"nbaccel: {change.place} is not as in the notebook: {type(error).__name__}: "
                f"{error}. Change it in the launched function.\n"
            )


def _apply(change: PackageChange) -> Callable[[], object]:
    """Make a change; returns what takes it back."""
    path = change.holder.split(".") if change.holder else ()
    holder: Any = functools.reduce(getattr, path, importlib.import_module(change.module))
    key = change.key
    value = change.value
    if change.kind == "element":
        holder.append(value)
        return lambda: holder.remove(value)
    if change.kind == "entry":
        had = key in holder
        before = holder.get(key)
        holder[key] = value
        return (lambda: holder.__setitem__(key, before)) if had else lambda: holder.pop(key, None)
    # Not by getattr, which would bind a method, or find that of a base class.
    had = key in vars(holder)
    before = vars(holder).get(key)
    setattr(holder, key, value)
    return (lambda: setattr(holder, key, before)) if had else lambda: delattr(holder, key)
