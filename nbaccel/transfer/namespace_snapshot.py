"""The notebook's namespace at one moment: fingerprints of values, and what modules consist of.

Small immutable values are their own fingerprint. Everything else is pickled into a hash: the stream
and, in place, the big blocks beside it. Parts of modules are named by key, so that no weights are
hashed.

A module keeps its key as long as it is the same object with the same structure: the same kinds of
submodules, and tensors of the same shapes in the same memory. With another structure it is another
module to the workers, and gets another key. All else that can change in it is compared piece by
piece (`ModuleState`), so that only the pieces travel and the worker's object stays the one that its
optimizer steps.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import xxhash
from torch import nn

from nbaccel.base import torch_private
from nbaccel.transfer import arena, pickling
from nbaccel.transfer.pickling import ModulePlace, Reducer, travels_by_value

PartPlace = tuple[str, str] | type
"""Path of a tensor or submodule, and the name of its attribute; or a class that a cell defined."""


@dataclass(frozen=True, slots=True)
class ModuleSurvey:
    """What a module consists of at one moment, each object under all of its names."""

    modules: tuple[tuple[str, nn.Module], ...]
    tensors: tuple[tuple[str, torch.Tensor], ...]

    @classmethod
    def of(cls, root: nn.Module) -> ModuleSurvey:
        """Look through a module."""
        modules = root.named_modules(remove_duplicate=False)
        return cls(tuple(modules), tuple(arena.named_tensors(root)))

    def structure(self) -> tuple[Hashable, ...]:
        """Equal as long as a worker's copy can be kept."""
        numbers: dict[int, int] = {}
        return (
            tuple(
                (path, type(module), numbers.setdefault(id(module), len(numbers)))
                for path, module in self.modules
            ),
            tuple((path, *_tensor_geometry(tensor)) for path, tensor in self.tensors),
        )

    def places(self, key: str) -> Iterator[tuple[int, tuple[str, str]]]:
        """By the id of each object: where it is in the module that has this key."""
        # In reverse, because later pairs replace earlier ones: of several names the first counts.
        for path, part in reversed(self.modules + self.tensors):
            yield id(part), (key, path)

    def changeable(self) -> Iterator[tuple[PartPlace, Any]]:
        """What may change while the structure stays, but for the tensors' values."""
        for path, tensor in self.tensors:
            yield (path, "requires_grad"), tensor.requires_grad
        for path, module in self.modules:
            yield (path, "training"), module.training
            for name, value in vars(module).items():
                if name not in torch_private.MODULE_ATTRIBUTES:
                    yield (path, name), value
        for kind in dict.fromkeys(type(module) for _, module in self.modules):
            if travels_by_value(kind):
                yield kind, kind


def _tensor_geometry(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    if type(tensor) not in arena.PLAIN or tensor.layout is not torch.strided:
        # Such a tensor has no address; another object counts as another structure.
        return (id(tensor),)
    return (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)


# ------------------------------------------------------------------------- what can change


@dataclass(frozen=True, slots=True, eq=False)
class ModuleState:
    """What may change in a module while its structure stays."""

    tokens: Mapping[PartPlace, Hashable]
    """Of all that :meth:`ModuleSurvey.changeable` gives."""
    versions: int
    names: frozenset[str]
    """Names of the namespace that its methods and attributes read."""
    modules: frozenset[str]
    """Keys of modules that its attributes refer to, but for itself."""


class OpaqueToken(NamedTuple):
    """The token of a value that does not pickle: such an attribute stays where it is."""

    id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleChange:
    """What the notebook changed in a module that a worker has: only the differences."""

    key: str
    values: Mapping[PartPlace, Any]
    """Of a class there is nothing to set: unpickling it brings the worker's up to date."""
    removed: frozenset[PartPlace]
    adopt: bool
    """The notebook wrote to the weights: drop what this worker has written to them."""


def difference(
    key: str, old: ModuleState, new: ModuleState, survey: ModuleSurvey, *, adopt: bool = False
) -> ModuleChange | None:
    """What must be sent to a worker that has the old state; None if nothing."""
    changed = {
        place
        for place, token in new.tokens.items()
        # What does not pickle cannot be sent; the worker keeps its own value.
        if old.tokens.get(place) != token and not isinstance(token, OpaqueToken)
    }
    removed = frozenset(old.tokens.keys() - new.tokens.keys())
    adopt = adopt or old.versions != new.versions
    if not (changed or removed or adopt):
        return None
    values = {place: value for place, value in survey.changeable() if place in changed}
    return ModuleChange(key=key, values=values, removed=removed, adopt=adopt)


# ------------------------------------------------------------------------- the table


class ModuleRecord:
    """One module under one key. It does not keep the module alive."""

    def __init__(
        self, key: str, path: str, module: nn.Module, survey: ModuleSurvey, records: ModuleRecords
    ) -> None:
        self.key = key
        self.path = path
        """How the user would write it; reports name it so."""
        self.structure = survey.structure()
        self.slots: tuple[arena.Slot, ...] | None = None
        """Where its tensors lie, once it is in an arena."""
        self._module = weakref.ref(module, lambda _: records.pop(key, None))
        self._sharing = arena.Sharing()
        """Without the module."""

    @property
    def module(self) -> nn.Module | None:
        """The module, if it lives."""
        return self._module()

    @property
    def sharing(self) -> arena.Sharing:
        """Where its tensors lie, as long as it lives."""
        module = self.module
        if module is None or self.slots is None:
            return arena.Sharing()
        shared = arena.SharedModule(self.path, self.slots, module)
        return replace(self._sharing, modules=(shared,))

    def versions(self) -> int:
        """See :func:`arena.module_version`."""
        module = self.module
        return arena.module_version(module) if module is not None else 0

    def share(self) -> None:
        """Move it to an arena unless that is done."""
        module = self.module
        if self.slots is not None or module is None:
            return
        sharing = arena.share_modules([(self.path, module)])
        self.slots = sharing.modules[0].slots
        self._sharing = replace(sharing, modules=())
        # Again, because moving the tensors has changed their addresses, which are part of it.
        self.structure = ModuleSurvey.of(module).structure()


class ModuleRecords(dict[str, ModuleRecord]):
    """By key, in their order, all modules that the workers of one pool know or may get to know.

    Each goes when its module does, or has another structure.
    """

    def __init__(self) -> None:
        super().__init__()
        self._count = itertools.count()

    def of(self, module: nn.Module) -> ModuleRecord | None:
        """The record of this very object, if it has one of its own."""
        return next((record for record in tuple(self.values()) if record.module is module), None)

    def with_keys(self, keys: Iterable[str]) -> list[ModuleRecord]:
        """The records with these keys, but for those that are gone."""
        return [record for key in keys if (record := self.get(key)) is not None]

    def add(self, module: nn.Module, path: str, survey: ModuleSurvey) -> ModuleRecord:
        """Give a module a key; the one it had is given up."""
        former = self.of(module)
        if former is not None:
            self.pop(former.key, None)
        number = next(self._count)
        key = f"module{number}"
        if any(record.path == path for record in tuple(self.values())):
            # A report names modules by path, and must not confuse two of them.
            path = f"{path} ({number})"
        self[key] = ModuleRecord(key, path, module, survey, self)
        return self[key]


# ------------------------------------------------------------------------- a moment


class NamespaceSnapshot:
    """Fingerprints of one moment. Not to be kept: it keeps alive what it has seen."""

    def __init__(self, namespace: Mapping[str, Any], modules: ModuleRecords) -> None:
        self._namespace = namespace
        self._modules = modules
        self._surveys: dict[str, ModuleSurvey] = {}
        self._states: dict[str, ModuleState] = {}
        self._table: dict[int, ModulePlace] | None = None
        self._has_added_all = False
        self._path = ""
        self.news = 0
        """How many modules got a key since this moment began."""

    # ------------------------------------------------------------------- values

    def fingerprint(self, name: str, value: Any) -> Fingerprint:
        """What identifies the value that has this name."""
        self._path = name
        if isinstance(value, nn.Module):
            place = self.place(value)
            if place is not None:
                return Fingerprint(("module", *place), modules=frozenset((place[0],)))
        token = plain_token(value)
        return Fingerprint(token) if token is not None else self._of_pickle(value)

    def _of_pickle(self, value: Any) -> Fingerprint:
        return fingerprint_of_pickle(value, Reducer(self._namespace, self.place), self.stand_ins())

    def stand_ins(self) -> dict[int, Any]:
        """Host copies of the storages that modules have on devices."""
        return {
            address: host_place
            for record in tuple(self._modules.values())
            for address, host_place in record.sharing.stand_ins.items()
        }

    # ------------------------------------------------------------------- modules

    def place(self, module_part: Any) -> ModulePlace | None:
        """Where in a module with a key this is. Modules get one when they are first met."""
        is_module = isinstance(module_part, nn.Module)
        record = self._modules.of(module_part) if is_module else None
        if record is not None:
            return self._current(record).key, ""
        if self._table is None:
            records = tuple(self._modules.values())
            self._table = self.table([self._current(record) for record in records])
        place = self._table.get(id(module_part))
        if place is None and is_module:
            return self._add(module_part, self._path).key, ""
        if place is None and isinstance(module_part, nn.Parameter) and not self._has_added_all:
            self._add_all()
            return self.place(module_part)
        return place

    def table(self, records: Iterable[ModuleRecord]) -> dict[int, ModulePlace]:
        """The places of all parts of these modules; of several, the one that was there first."""
        table: dict[int, ModulePlace] = {}
        records = list(records)
        # In reverse, because later entries replace earlier ones: of several the first counts.
        for record in reversed(records):
            table.update(self.survey(record.key).places(record.key))
        for record in records:
            table[id(record.module)] = (record.key, "")
        return table

    def survey(self, key: str) -> ModuleSurvey:
        """What the module consists of."""
        if key not in self._surveys:
            record = self._modules.get(key)
            module = record.module if record is not None else None
            self._surveys[key] = (
                ModuleSurvey.of(module) if module is not None else ModuleSurvey((), ())
            )
        return self._surveys[key]

    def state(self, key: str) -> ModuleState:
        """What may change in the module, as it is."""
        if key not in self._states:
            record = self._modules.get(key)
            self._path = record.path if record is not None else key
            self._states[key] = self._module_state(key, self.survey(key))
        return self._states[key]

    def _current(self, record: ModuleRecord) -> ModuleRecord:
        """This record, or that of the structure which its module has now."""
        if record.key in self._surveys:
            return record
        module = record.module
        if module is None:
            return record
        survey = ModuleSurvey.of(module)
        if survey.structure() != record.structure:
            return self._add(module, record.path, survey)
        self._surveys[record.key] = survey
        return record

    def _add(
        self, module: nn.Module, path: str, survey: ModuleSurvey | None = None
    ) -> ModuleRecord:
        survey = survey or ModuleSurvey.of(module)
        record = self._modules.add(module, path, survey)
        self._surveys[record.key] = survey
        self.news += 1
        # Made anew when it is next needed, with this one in it.
        self._table = None
        return record

    def _add_all(self) -> None:
        """Give all modules of the user's a key, so that an optimizer steps the one that he has."""
        self._has_added_all = True
        # A copy, because a thread of the user's may bind names meanwhile.
        for name, value in list(self._namespace.items()):
            if isinstance(value, nn.Module):
                self._path = name
                self.place(value)

    def _module_state(self, key: str, survey: ModuleSurvey) -> ModuleState:
        names: set[str] = set()
        modules: set[str] = set()

        def token(value: Any) -> Hashable:
            plain = plain_token(value)
            if plain is not None:
                return plain
            try:
                found = self._of_pickle(value)
            except Exception:  # pickling runs user code: it may raise anything
                return OpaqueToken(id(value))
            names.update(found.names)
            modules.update(found.modules)
            return found.token

        return ModuleState(
            tokens={place: token(value) for place, value in survey.changeable()},
            versions=sum(torch_private.tensor_version(tensor) for _, tensor in survey.tensors),
            names=frozenset(names),
            modules=frozenset(modules - {key}),
        )


_NO_REFERENCES: frozenset[str] = frozenset()
_LONG_BYTES = 1 << 16  # longer text is hashed rather than kept alive for the next comparison
_MAX_TUPLE_ELEMENTS = 16  # longer tuples are pickled into a hash

_IMMUTABLE_TYPES = frozenset(
    (bool, int, str, bytes, complex, type(None), type(Ellipsis), torch.dtype, torch.device)
)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What identifies a value, and what it depends on."""

    token: Hashable
    """Equal for equal content."""
    names: frozenset[str] = _NO_REFERENCES
    """Names of the namespace that functions in the value read."""
    modules: frozenset[str] = _NO_REFERENCES
    """Keys of the modules that are part of it."""


def plain_token(value: Any) -> Hashable | None:
    """The token of a value that can be compared directly."""
    kind = type(value)
    if kind in _IMMUTABLE_TYPES:
        is_long = kind in (str, bytes) and len(value) > _LONG_BYTES
        return None if is_long else (kind, value)
    if kind is float:
        # As text, so that nan equals nan, and 0.0 differs from -0.0.
        return (kind, value.hex())
    if kind is tuple and len(value) <= _MAX_TUPLE_ELEMENTS:
        tokens = tuple(map(plain_token, value))
        return None if None in tokens else (kind, tokens)
    return None


def fingerprint_of_pickle(
    value: Any, reducer: Reducer, stand_ins: Mapping[int, tuple[arena.Arena, int]] | None = None
) -> Fingerprint:
    """The fingerprint of anything that pickles."""
    prepared = pickling.prepare(value, pickling.Sender(stand_ins or {}, reducer))
    digest = xxhash.xxh3_128(prepared.stream.getbuffer())
    for block in prepared.blocks:
        with block.raw() as raw_bytes:
            # The length first, or two blocks could hash like two others that are cut elsewhere.
            digest.update(raw_bytes.nbytes.to_bytes(8, "little"))
            digest.update(raw_bytes)
    prepared.drop()
    return Fingerprint(digest.digest(), frozenset(reducer.names), frozenset(reducer.modules))
