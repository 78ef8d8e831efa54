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
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from nbaccel.base import torch_private
from nbaccel.transfer import arena, weight_sync
from nbaccel.transfer.namespace_update import Update

__all__ = [
    "ModuleRecord",
    "ModuleRegistry",
    "ModuleState",
    "ModuleSurvey",
    "attributes_of",
    "difference",
]


@dataclass(frozen=True, slots=True)
class ModuleSurvey:
    """What a module consists of at one moment, each object under its first name."""

    modules: tuple[tuple[str, nn.Module], ...]
    tensors: tuple[tuple[str, torch.Tensor], ...]
    aliases: tuple[tuple[str, str], ...] = ()
    """Further paths of submodules, each with the first."""

    @classmethod
    def of(cls, whole_module: nn.Module) -> ModuleSurvey:
        """Look through a module."""
        visited_modules: dict[int, tuple[str, nn.Module]] = {}
        tensors: list[tuple[str, torch.Tensor]] = []
        aliases: list[tuple[str, str]] = []

        def visit(module: nn.Module, path: str) -> None:
            if id(module) in visited_modules:
                aliases.append((path, visited_modules[id(module)][0]))
                return
            visited_modules[id(module)] = (path, module)
            prefix = path + "." if path else ""
            parameters, buffers, children = torch_private.module_tables(module)
            for tensor_table in (parameters, buffers):
                for name, tensor in tensor_table.items():
                    if tensor is not None:
                        tensors.append((prefix + name, tensor))
            for name, child in children.items():
                if child is not None:
                    visit(child, prefix + name)

        visit(whole_module, "")
        return cls(tuple(visited_modules.values()), tuple(tensors), tuple(aliases))

    def structure(self) -> tuple[Hashable, ...]:
        """Equal as long as a worker's copy can be kept."""
        return (
            tuple((path, type(module)) for path, module in self.modules),
            self.aliases,
            tuple((path, *_tensor_geometry(tensor)) for path, tensor in self.tensors),
        )

    def places(self, module_key: str) -> Iterator[tuple[int, tuple[str, str]]]:
        """By the id of each object: where it is in the module that has this key."""
        # In reverse, because later pairs replace earlier ones: of tied names the first counts.
        for path, tensor in reversed(self.tensors):
            yield id(tensor), (module_key, path)
        for path, module in reversed(self.modules):
            yield id(module), (module_key, path)

    def versions(self) -> int:
        """Grows whenever a tensor is written to (by what torch counts as writing)."""
        return sum(torch_private.tensor_version(tensor) for _, tensor in self.tensors)


def _tensor_geometry(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    if type(tensor) not in arena.PLAIN or tensor.layout is not torch.strided:
        # Such a tensor has no address; another object counts as another structure.
        return (id(tensor),)
    return (
        tensor.data_ptr(),
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.device,
    )


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


class OpaqueToken:
    """The token of a value that does not pickle: such an attribute stays where it is."""

    def __init__(self, attribute_value: object) -> None:
        self._id = id(attribute_value)

    def __eq__(self, other_token: object) -> bool:
        return isinstance(other_token, OpaqueToken) and other_token._id == self._id

    def __hash__(self) -> int:
        return self._id


def attributes_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The attributes that a class gives its instances, beside tensors and submodules."""
    return (
        (name, value)
        for name, value in vars(module).items()
        if name not in torch_private.MODULE_ATTRIBUTES
    )


def difference(
    module_key: str,
    old_state: ModuleState,
    new_state: ModuleState,
    module_survey: ModuleSurvey,
    *,
    adopt_weights: bool = False,
) -> tuple[Update, tuple[type, ...]] | None:
    """What must be sent to a worker that has the old state; None if nothing."""
    changed_attributes: dict[str, dict[str, Any]] = {}
    removed_attributes: dict[str, tuple[str, ...]] = {}
    for path, module in module_survey.modules:
        old_tokens = old_state.attributes[path]
        new_tokens = new_state.attributes[path]
        if old_tokens == new_tokens:
            continue
        changed_values = {
            name: value
            for name, value in attributes_of(module)
            if old_tokens.get(name) != new_tokens.get(name)
            # What does not pickle cannot be sent; the worker keeps its own value.
            and not isinstance(new_tokens.get(name), OpaqueToken)
        }
        if changed_values:
            changed_attributes[path] = changed_values
        if gone_names := tuple(old_tokens.keys() - new_tokens.keys()):
            removed_attributes[path] = gone_names
    module_update = Update(
        key=module_key,
        requires_grad=_changed_flags(
            module_survey.tensors, old_state.requires_grad, new_state.requires_grad
        ),
        training=_changed_flags(module_survey.modules, old_state.training, new_state.training),
        attributes=changed_attributes,
        removed=removed_attributes,
        adopt=adopt_weights or old_state.versions != new_state.versions,
    )
    changed_classes = tuple(
        cell_class
        for cell_class, value_token in new_state.classes.items()
        if old_state.classes.get(cell_class) != value_token
    )
    if module_update == Update(key=module_key) and not changed_classes:
        return None
    return module_update, changed_classes


def _changed_flags(
    named_objects: Iterable[tuple[str, Any]], old_flags: Iterable[bool], new_flags: Iterable[bool]
) -> dict[str, bool]:
    return {
        name: new_flag
        for (name, _), old_flag, new_flag in zip(named_objects, old_flags, new_flags, strict=True)
        if old_flag != new_flag
    }


# ------------------------------------------------------------------------- the table


class ModuleRecord:
    """One module under one key. It does not keep the module alive."""

    def __init__(
        self,
        module_key: str,
        module_path: str,
        module: nn.Module,
        module_survey: ModuleSurvey,
        on_gone: Callable[[], None],
    ) -> None:
        self.key = module_key
        self.path = module_path
        """How the user would write it; reports name it so."""
        self.structure = module_survey.structure()
        self.is_shared = False
        self._module = weakref.ref(module, lambda _: on_gone())
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
        shared_module = arena.SharedModule(path=self.path, module=module, slots=self._slots)
        return arena.Sharing(modules=(shared_module,), stand_ins=self.stand_ins)

    def manifest(self) -> weight_sync.Manifest:
        """What a worker must know to write its weights back."""
        return weight_sync.Manifest.of(self.path, self._slots)

    def arenas(self) -> dict[str, arena.Arena]:
        """The arenas that it lies in, by key."""
        return {owner_arena.key: owner_arena for owner_arena, _ in self._slots}

    def versions(self) -> int:
        """Grows whenever one of its tensors is written to; see `ModuleSurvey.versions`."""
        module = self.module
        return ModuleSurvey.of(module).versions() if module is not None else 0

    def share(self) -> int:
        """Move it to an arena unless that is done; returns the bytes of arenas made for it."""
        module = self.module
        if self.is_shared or module is None:
            return 0
        module_sharing = arena.share_modules([(self.path, module)])
        self.is_shared = True
        self._slots = module_sharing.modules[0].slots
        self.stand_ins = module_sharing.stand_ins
        # Again, because moving the tensors has changed their addresses, which are part of it.
        self.structure = ModuleSurvey.of(module).structure()
        return module_sharing.made_bytes


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

    def by_key(self, module_key: str) -> ModuleRecord | None:
        """The record with that key, as long as its module lives and has its structure."""
        return self._records.get(module_key)

    def with_keys(self, module_keys: Iterable[str]) -> list[ModuleRecord]:
        """The records with these keys, but for those that are gone."""
        records = map(self._records.get, module_keys)
        return [record for record in records if record is not None]

    def all(self) -> list[ModuleRecord]:
        """Every record, in the order in which they were made."""
        return list(self._records.values())

    def add(self, module: nn.Module, module_path: str, module_survey: ModuleSurvey) -> ModuleRecord:
        """Give a module a key; the one it had is given up."""
        old_record = self.record_of(module)
        if old_record is not None:
            self._drop(old_record.key, id(module))
        number = next(self._count)
        key = f"module{number}"
        if any(module_record.path == module_path for module_record in self._records.values()):
            # A report names modules by path, and must not confuse two of them.
            module_path = f"{module_path} ({number})"
        # The callback must not hold the module itself, or it would never be collected.
        module_id = id(module)
        module_record = ModuleRecord(
            key,
            module_path,
            module,
            module_survey,
            lambda: self._drop(key, module_id),
        )
        self._records[key] = self._by_id[module_id] = module_record
        return module_record

    def _drop(self, key: str, module_id: int) -> None:
        record = self._records.pop(key, None)
        # The id may belong to a newer module by the time the old one's callback runs.
        if record is not None and self._by_id.get(module_id) is record:
            del self._by_id[module_id]
