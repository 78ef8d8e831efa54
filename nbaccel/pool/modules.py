"""The notebook's modules that workers have or may get, each under a key that never names another.

A module keeps its key as long as it is the same object with the same structure: the same kinds of
submodules, and tensors of the same shapes in the same memory. With another structure it is another
module to the workers, and gets another key. All else that can change in it is compared piece by
piece (`State`), so that only the pieces travel and the worker's object stays the one that its
optimizer steps.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from nbaccel.launch.sharing import arena, home
from nbaccel.pool.cargo import Update

__all__ = ["Modules", "Record", "State", "Survey", "attributes_of", "difference"]

_INTERNAL = frozenset(vars(nn.Module())) | {"_compiled_call_impl"}
"""What every module has: tensors, submodules, hooks and flags, which travel in other ways."""


@dataclass(frozen=True, slots=True)
class Survey:
    """What a module consists of at one moment, each object under its first name."""

    modules: tuple[tuple[str, nn.Module], ...]
    tensors: tuple[tuple[str, torch.Tensor], ...]
    aliases: tuple[tuple[str, str], ...] = ()
    """Further paths of submodules, each with the first."""

    @classmethod
    def of(cls, module: nn.Module) -> Survey:
        """Look through a module."""
        modules: dict[int, tuple[str, nn.Module]] = {}
        tensors: list[tuple[str, torch.Tensor]] = []
        aliases: list[tuple[str, str]] = []
        _visit(module, "", modules, tensors, aliases)
        return cls(tuple(modules.values()), tuple(tensors), tuple(aliases))

    def structure(self) -> tuple[Hashable, ...]:
        """Equal as long as a worker's copy can be kept."""
        return (
            tuple((path, type(module)) for path, module in self.modules),
            self.aliases,
            tuple((path, *_geometry(tensor)) for path, tensor in self.tensors),
        )

    def places(self, key: str) -> Iterator[tuple[int, tuple[str, str]]]:
        """By the id of each object: where it is in the module that has this key."""
        for path, tensor in reversed(self.tensors):  # of tied names the first one counts
            yield id(tensor), (key, path)
        for path, module in reversed(self.modules):
            yield id(module), (key, path)

    def versions(self) -> int:
        """Grows whenever a tensor is written to (by what torch counts as writing)."""
        return sum(tensor._version for _, tensor in self.tensors if not tensor.is_inference())


def _visit(
    module: nn.Module,
    path: str,
    modules: dict[int, tuple[str, nn.Module]],
    tensors: list[tuple[str, torch.Tensor]],
    aliases: list[tuple[str, str]],
) -> None:
    if id(module) in modules:
        aliases.append((path, modules[id(module)][0]))
        return
    modules[id(module)] = (path, module)
    prefix = path + "." if path else ""
    for table in (module._parameters, module._buffers):
        for name, tensor in table.items():
            if tensor is not None:
                tensors.append((prefix + name, tensor))
    for name, child in module._modules.items():
        if child is not None:
            _visit(child, prefix + name, modules, tensors, aliases)


def _geometry(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    if type(tensor) not in arena.PLAIN or tensor.layout is not torch.strided:
        return (id(tensor),)
    return (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)


# ------------------------------------------------------------------------- what can change


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """What may change in a module while its structure stays."""

    requires_grad: tuple[bool, ...]
    training: tuple[bool, ...]
    attributes: Mapping[str, Mapping[str, Hashable]]
    """Tokens of the plain attributes, by path of the submodule."""
    classes: Mapping[type, Hashable]
    """Tokens of the classes among its submodules that cells defined."""
    versions: int
    names: frozenset[str] = field(default_factory=frozenset)
    """Names of the namespace that its methods and attributes read."""
    modules: frozenset[str] = field(default_factory=frozenset)
    """Keys of modules that its attributes refer to, but for itself."""


class Opaque:
    """The token of a value that does not pickle: such an attribute stays where it is."""

    def __init__(self, value: object) -> None:
        self._id = id(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and other._id == self._id

    def __hash__(self) -> int:
        return self._id


def attributes_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The attributes that a class gives its instances, beside tensors and submodules."""
    return ((name, value) for name, value in vars(module).items() if name not in _INTERNAL)


def difference(
    key: str, old: State, new: State, survey: Survey, *, adopt: bool = False
) -> tuple[Update, tuple[type, ...]] | None:
    """What a worker that knows the old state must be told; None if nothing.

    Args:
        key: The module's.
        old: What the worker was told last.
        new: What is.
        survey: The module as it is.
        adopt: Whether the worker is to take the notebook's weights even if they did not change.
    """
    attributes: dict[str, dict[str, Any]] = {}
    removed: dict[str, tuple[str, ...]] = {}
    for path, module in survey.modules:
        was, now = old.attributes[path], new.attributes[path]
        if was == now:
            continue
        changed = {name for name, token in now.items() if was.get(name) != token}
        sent = {n: v for n, v in attributes_of(module) if n in changed}
        attributes[path] = {n: v for n, v in sent.items() if not isinstance(now[n], Opaque)}
        removed[path] = tuple(was.keys() - now.keys())
    update = Update(
        key=key,
        requires_grad=_changed(survey.tensors, old.requires_grad, new.requires_grad),
        training=_changed(survey.modules, old.training, new.training),
        attributes={path: values for path, values in attributes.items() if values},
        removed={path: names for path, names in removed.items() if names},
        adopt=adopt or old.versions != new.versions,
    )
    classes = tuple(c for c, token in new.classes.items() if old.classes.get(c) != token)
    return None if update == Update(key=key) and not classes else (update, classes)


def _changed(
    names: Iterable[tuple[str, Any]], old: Iterable[bool], new: Iterable[bool]
) -> dict[str, bool]:
    return {name: now for (name, _), was, now in zip(names, old, new, strict=True) if was != now}


# ------------------------------------------------------------------------- the table


class Record:
    """One module under one key. It does not keep the module alive."""

    def __init__(
        self, key: str, path: str, module: nn.Module, survey: Survey, gone: Callable[[], None]
    ) -> None:
        self.key = key
        self.path = path
        """How the user would write it; what a report names it by."""
        self.structure = survey.structure()
        self.is_shared = False
        self._module = weakref.ref(module, lambda _: gone())
        self._slots: tuple[tuple[arena.Arena, arena.Slot], ...] = ()
        self.stand_ins: dict[int, tuple[arena.Arena, int]] = {}

    @property
    def module(self) -> nn.Module | None:
        """The module, if it lives."""
        return self._module()

    @property
    def sharing(self) -> arena.Sharing:
        """Where its tensors lie."""
        module = self.module
        if module is None:
            return arena.Sharing()
        shared = arena.Shared(path=self.path, module=module, slots=self._slots)
        return arena.Sharing(modules=(shared,), stand_ins=self.stand_ins)

    def manifest(self) -> home.Manifest:
        """What a worker must know to bring it home."""
        return home.Manifest(
            path=self.path, slots=tuple((owner.key, slot) for owner, slot in self._slots)
        )

    def arenas(self) -> dict[str, arena.Arena]:
        """The arenas that it lies in, by key."""
        return {owner.key: owner for owner, _ in self._slots}

    def versions(self) -> int:
        """Grows whenever one of its tensors is written to; see `Survey.versions`."""
        module = self.module
        return Survey.of(module).versions() if module is not None else 0

    def share(self) -> int:
        """Move it to an arena unless that is done; returns the bytes of arenas made for it.

        Raises:
            ModelNotShareable: If it has tensors without memory of their own.
        """
        module = self.module
        if self.is_shared or module is None:
            return 0
        before = {id(a) for a in arena.living()}
        sharing = arena.share([(self.path, module)])
        self.is_shared = True
        self._slots = sharing.modules[0].slots
        self.stand_ins = sharing.stand_ins
        self.structure = Survey.of(module).structure()
        return sum(a.nbytes for a in sharing.arenas() if id(a) not in before)


class Modules:
    """All modules of the notebook that the workers of one pool know or may get to know."""

    def __init__(self) -> None:
        self._records: dict[str, Record] = {}
        self._by_id: dict[int, Record] = {}
        self._count = itertools.count()

    def record_of(self, module: nn.Module) -> Record | None:
        """The record of this very object, if it has one of its own."""
        record = self._by_id.get(id(module))
        return record if record is not None and record.module is module else None

    def by_key(self, key: str) -> Record | None:
        """The record with that key, as long as its module lives and has its structure."""
        return self._records.get(key)

    def all(self) -> list[Record]:
        """Every record, in the order in which they were made."""
        return list(self._records.values())

    def add(self, module: nn.Module, path: str, survey: Survey) -> Record:
        """Give a module a key; the one it had is given up."""
        old = self.record_of(module)
        if old is not None:
            self._drop(old.key, id(module))
        number = next(self._count)
        key = f"module{number}"
        if any(record.path == path for record in self._records.values()):
            path = f"{path} ({number})"  # a report must not mix two up
        address = id(module)
        record = Record(key, path, module, survey, lambda: self._drop(key, address))
        self._records[key] = self._by_id[address] = record
        return record

    def _drop(self, key: str, address: int) -> None:
        record = self._records.pop(key, None)
        if record is not None and self._by_id.get(address) is record:
            del self._by_id[address]
