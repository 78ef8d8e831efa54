"""The notebook's modules that workers have or may get, each under a key that never names another.

A module keeps its key as long as it is the same object with the same structure: the same kinds of
submodules, and tensors of the same shapes in the same memory. With another structure it is another
module to the workers, and gets another key. All else that can change in it is compared piece by
piece (`ModuleState`), so that only the pieces travel and the worker's object stays the one that its
optimizer steps.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from nbaccel.base import torch_private
from nbaccel.transfer import arena


@dataclass(frozen=True, slots=True)
class ModuleSurvey:
    """What a module consists of at one moment, each object under its first name."""

    modules: tuple[tuple[str, nn.Module], ...]
    tensors: tuple[tuple[str, torch.Tensor], ...]
    aliases: tuple[tuple[str, str], ...] = ()
    """Further paths of submodules, each with the first."""

    @classmethod
    def of(cls, root: nn.Module) -> ModuleSurvey:
        """Look through a module."""
        visited: dict[int, tuple[str, nn.Module]] = {}
        tensors: list[tuple[str, torch.Tensor]] = []
        aliases: list[tuple[str, str]] = []

        def visit(module: nn.Module, path: str) -> None:
            if id(module) in visited:
                aliases.append((path, visited[id(module)][0]))
                return
            visited[id(module)] = (path, module)
            prefix = path + "." if path else ""
            parameters, buffers, children = torch_private.module_tables(module)
            for table in (parameters, buffers):
                for name, tensor in table.items():
                    if tensor is not None:
                        tensors.append((prefix + name, tensor))
            for name, child in children.items():
                if child is not None:
                    visit(child, prefix + name)

        visit(root, "")
        return cls(tuple(visited.values()), tuple(tensors), tuple(aliases))

    def structure(self) -> tuple[Hashable, ...]:
        """Equal as long as a worker's copy can be kept."""
        return (
            tuple((path, type(module)) for path, module in self.modules),
            self.aliases,
            tuple((path, *_tensor_geometry(tensor)) for path, tensor in self.tensors),
        )

    def places(self, key: str) -> Iterator[tuple[int, tuple[str, str]]]:
        """By the id of each object: where it is in the module that has this key."""
        # In reverse, because later pairs replace earlier ones: of tied names the first counts.
        for path, tensor in reversed(self.tensors):
            yield id(tensor), (key, path)
        for path, module in reversed(self.modules):
            yield id(module), (key, path)

    def versions(self) -> int:
        """Grows whenever a tensor is written to (by what torch counts as writing)."""
        return sum(torch_private.tensor_version(tensor) for _, tensor in self.tensors)


def _tensor_geometry(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    if type(tensor) not in arena.PLAIN or tensor.layout is not torch.strided:
        # Such a tensor has no address; another object counts as another structure.
        return (id(tensor),)
    return (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)


# ------------------------------------------------------------------------- what can change


@dataclass(frozen=True, slots=True, eq=False)
class ModuleState:
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


class OpaqueToken(NamedTuple):
    """The token of a value that does not pickle: such an attribute stays where it is."""

    id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleChange:
    """What the notebook changed in a module that a worker has: only the differences."""

    key: str
    requires_grad: Mapping[str, bool] = field(default_factory=dict)
    """By dotted name of the parameter."""
    training: Mapping[str, bool] = field(default_factory=dict)
    """By path of the submodule."""
    attributes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """New values of plain attributes, by path of the submodule."""
    removed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Plain attributes that are gone, by path of the submodule."""
    adopt: bool = False
    """The notebook wrote to the weights: drop what this worker has written to them."""
    classes: tuple[type, ...] = ()
    """Classes of cells that changed: unpickling one brings the worker's up to date."""


def attributes_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The attributes that a class gives its instances, beside tensors and submodules."""
    return (
        (name, value)
        for name, value in vars(module).items()
        if name not in torch_private.MODULE_ATTRIBUTES
    )


def difference(
    key: str, old: ModuleState, new: ModuleState, survey: ModuleSurvey, *, adopt: bool = False
) -> ModuleChange | None:
    """What must be sent to a worker that has the old state; None if nothing."""
    attributes: dict[str, dict[str, Any]] = {}
    removed: dict[str, tuple[str, ...]] = {}
    for path, module in survey.modules:
        old_tokens = old.attributes[path]
        new_tokens = new.attributes[path]
        if old_tokens == new_tokens:
            continue
        values = {
            name: value
            for name, value in attributes_of(module)
            if old_tokens.get(name) != new_tokens.get(name)
            # What does not pickle cannot be sent; the worker keeps its own value.
            and not isinstance(new_tokens.get(name), OpaqueToken)
        }
        if values:
            attributes[path] = values
        if gone := tuple(old_tokens.keys() - new_tokens.keys()):
            removed[path] = gone
    change = ModuleChange(
        key=key,
        requires_grad=_changed_flags(survey.tensors, old.requires_grad, new.requires_grad),
        training=_changed_flags(survey.modules, old.training, new.training),
        attributes=attributes,
        removed=removed,
        adopt=adopt or old.versions != new.versions,
        classes=tuple(cls for cls, token in new.classes.items() if old.classes.get(cls) != token),
    )
    return change if change != ModuleChange(key=key) else None


def _changed_flags(
    named: Iterable[tuple[str, Any]], before: Iterable[bool], after: Iterable[bool]
) -> dict[str, bool]:
    return {
        name: is_now
        for (name, _), was, is_now in zip(named, before, after, strict=True)
        if was != is_now
    }


# ------------------------------------------------------------------------- the table


class ModuleRecord:
    """One module under one key. It does not keep the module alive."""

    def __init__(
        self,
        key: str,
        path: str,
        module: nn.Module,
        survey: ModuleSurvey,
        on_gone: Callable[[], None],
    ) -> None:
        self.key = key
        self.path = path
        """How the user would write it; reports name it so."""
        self.structure = survey.structure()
        self.is_shared = False
        self._module = weakref.ref(module, lambda _: on_gone())
        self._slots: tuple[arena.Slot, ...] = ()
        self._sharing = arena.Sharing()
        """Without the module."""

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
        shared = arena.SharedModule(self.manifest(), module)
        return replace(self._sharing, modules=(shared,))

    def manifest(self) -> arena.Manifest:
        """What a worker must know to write its weights back."""
        return arena.Manifest(self.path, self._slots)

    @property
    def arenas(self) -> dict[str, arena.Arena]:
        """The arenas that it lies in, by key."""
        return self._sharing.arenas

    @property
    def stand_ins(self) -> dict[int, tuple[arena.Arena, int]]:
        """Host copies of the storages that it has on devices."""
        return self._sharing.stand_ins

    def versions(self) -> int:
        """Grows whenever one of its tensors is written to; see `ModuleSurvey.versions`."""
        module = self.module
        return ModuleSurvey.of(module).versions() if module is not None else 0

    def share(self) -> int:
        """Move it to an arena unless that is done; returns the bytes of arenas made for it."""
        module = self.module
        if self.is_shared or module is None:
            return 0
        sharing = arena.share_modules([(self.path, module)])
        self.is_shared = True
        self._slots = sharing.modules[0].manifest.slots
        self._sharing = replace(sharing, modules=())
        # Again, because moving the tensors has changed their addresses, which are part of it.
        self.structure = ModuleSurvey.of(module).structure()
        return sharing.made_bytes


class ModuleRegistry:
    """All modules of the notebook that the workers of one pool know or may get to know."""

    def __init__(self) -> None:
        self._records: dict[str, ModuleRecord] = {}
        # By id, because modules may define ==; the weak reference in the record is compared too.
        self._by_id: dict[int, ModuleRecord] = {}
        self._count = itertools.count()

    def record_of(self, module: nn.Module) -> ModuleRecord | None:
        """The record of this very object, if it has one of its own."""
        record = self._by_id.get(id(module))
        return record if record is not None and record.module is module else None

    def by_key(self, key: str) -> ModuleRecord | None:
        """The record with that key, as long as its module lives and has its structure."""
        return self._records.get(key)

    def with_keys(self, keys: Iterable[str]) -> list[ModuleRecord]:
        """The records with these keys, but for those that are gone."""
        records = map(self._records.get, keys)
        return [record for record in records if record is not None]

    def all(self) -> list[ModuleRecord]:
        """Every record, in the order in which they were made."""
        return list(self._records.values())

    def add(self, module: nn.Module, path: str, survey: ModuleSurvey) -> ModuleRecord:
        """Give a module a key; the one it had is given up."""
        former = self.record_of(module)
        if former is not None:
            self._drop(former.key, id(module))
        number = next(self._count)
        key = f"module{number}"
        if any(record.path == path for record in self._records.values()):
            # A report names modules by path, and must not confuse two of them.
            path = f"{path} ({number})"
        # The callback must not hold the module itself, or it would never be collected.
        module_id = id(module)
        record = ModuleRecord(key, path, module, survey, lambda: self._drop(key, module_id))
        self._records[key] = self._by_id[module_id] = record
        return record

    def _drop(self, key: str, module_id: int) -> None:
        record = self._records.pop(key, None)
        # The id may belong to a newer module by the time the old one's callback runs.
        if record is not None and self._by_id.get(module_id) is record:
            del self._by_id[module_id]
