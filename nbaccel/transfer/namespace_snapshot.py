"""The notebook's namespace at one moment: fingerprints of values, and what modules consist of.

Small immutable values are their own fingerprint. Everything else is pickled into a hash; parts of
modules are named by key, so that no weights are hashed.

A module keeps its key as long as it is the same object with the same structure. All else that can
change in it is compared piece by piece (`ModuleState`), so that only the pieces travel and the
worker's object stays the one that its optimizer steps.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import xxhash
from torch import nn

from nbaccel.base import torch_private
from nbaccel.transfer import arena, pickling
from nbaccel.transfer.pickling import ModulePlace, travels_by_value

PartPlace = tuple[str, str] | type  # path of a part and name of its attribute; or a cell's class


class ModuleSurvey:
    """What a module consists of at one moment, each object under all of its names."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.modules = tuple(root.named_modules(remove_duplicate=False))
        self.tensors = tuple(arena.named_tensors(root))

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


@dataclass(frozen=True, slots=True, eq=False)
class ModuleState:
    """What may change in a module while its structure stays."""

    tokens: Mapping[PartPlace, Hashable]  # of all that :meth:`ModuleSurvey.changeable` gives
    versions: int
    names: frozenset[str]  # names of the namespace that its methods and attributes read
    modules: frozenset[str]  # keys of modules that its attributes refer to, but for itself


class OpaqueToken(NamedTuple):
    """The token of a value that does not pickle: such an attribute stays where it is."""

    id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleChange:
    """What the notebook changed in a module that a worker has: only the differences."""

    key: str
    values: Mapping[PartPlace, Any]  # of a class nothing is set: unpickling it is enough
    removed: frozenset[PartPlace]
    adopt: bool  # the notebook wrote to the weights: drop what this worker has written to them


_MODULE_NUMBERS = itertools.count()


class ModuleRecord:
    """One module under one key. It does not keep the module alive."""

    def __init__(self, path: str, survey: ModuleSurvey, records: ModuleRecords) -> None:
        number = next(_MODULE_NUMBERS)
        key = f"module{number}"
        self.key = key
        # A report names modules by path, and must not confuse two of them.
        is_taken = any(record.path == path for record in tuple(records.values()))
        self.path: str = f"{path} ({number})" if is_taken else path  # as the user would write it
        self.structure = survey.structure()
        self.slots: tuple[arena.Slot, ...] | None = None  # where its tensors lie, once shared
        self.arenas: dict[str, arena.Arena] = {}
        self.stand_ins: dict[int, tuple[arena.Arena, int]] = {}  # see :class:`arena.Sharing`
        self.module = weakref.ref(survey.root, lambda _: records.pop(key, None))

    @property
    def sharing(self) -> arena.Sharing:
        """Where its tensors lie, as long as it lives."""
        module = self.module()
        if module is None or self.slots is None:
            return arena.Sharing()
        shared = arena.SharedModule(self.path, self.slots, module)
        return arena.Sharing(modules=(shared,), arenas=self.arenas, stand_ins=self.stand_ins)

    def share(self) -> None:
        """Move it to an arena unless that is done."""
        module = self.module()
        if self.slots is not None or module is None:
            return
        sharing = arena.share_modules([(self.path, module)])
        self.slots = sharing.modules[0].slots
        self.arenas = sharing.arenas
        self.stand_ins = sharing.stand_ins
        # Again, because moving the tensors has changed their addresses, which are part of it.
        self.structure = ModuleSurvey(module).structure()


ModuleRecords = dict[str, ModuleRecord]
"""By key, modules that a pool's workers may know; each goes with its module, or its structure."""


class NamespaceSnapshot:
    """Fingerprints of one moment. Not to be kept: it keeps alive what it has seen."""

    def __init__(self, namespace: Mapping[str, Any], records: ModuleRecords) -> None:
        self._namespace = namespace
        self._records = records
        self.surveys: dict[str, ModuleSurvey] = {}  # of each module that has been met, by key
        self._states: dict[str, ModuleState] = {}
        self._places: dict[int, ModulePlace] | None = None
        self._has_added_all = False
        self._path = ""

    def fingerprint(self, name: str, value: Any) -> Fingerprint:
        """What identifies the value that has this name."""
        self._path = name
        if isinstance(value, nn.Module) and (place := self._place(value)) is not None:
            return Fingerprint(("module", *place), modules=frozenset((place[0],)))
        if (token := _plain_token(value)) is not None:
            return Fingerprint(token)
        sender = self.sender(self._place)
        prepared = pickling.prepare(value, sender)
        digest = xxhash.xxh3_128(prepared.stream.getbuffer())
        for block in prepared.blocks:
            with block.raw() as raw_bytes:
                # The length first, or two blocks could hash like two that are cut elsewhere.
                digest.update(raw_bytes.nbytes.to_bytes(8, "little"))
                digest.update(raw_bytes)
        prepared.drop()
        return Fingerprint(digest.digest(), frozenset(sender.names), frozenset(sender.module_keys))

    def fingerprint_or_id(self, name: str, value: Any) -> Fingerprint:
        """The same; of a value that does not pickle, what shows whether another took its place."""
        try:
            return self.fingerprint(name, value)
        except Exception:  # pickling runs user code: it may raise anything
            return Fingerprint(OpaqueToken(id(value)))

    def sender(self, find_place: Callable[[Any], ModulePlace | None]) -> pickling.Sender:
        """What pickles a value of the namespace."""
        stand_ins = {
            address: host_place
            for record in tuple(self._records.values())
            for address, host_place in record.stand_ins.items()
        }
        return pickling.Sender(stand_ins, self._namespace, find_place, shares=True)

    def _place(self, module_part: Any) -> ModulePlace | None:
        """Where in a module with a key this is. Modules get one when they are first met."""
        is_module = isinstance(module_part, nn.Module)
        # Looked for first: the table of places visits all parts of all modules.
        if is_module and (record := self._record(module_part)) is not None:
            return self._current(record).key, ""
        if self._places is None:
            self._places = self.places(self._records)
        place = self._places.get(id(module_part))
        if place is None and is_module:
            return self._add(self._path, ModuleSurvey(module_part)).key, ""
        if place is None and isinstance(module_part, nn.Parameter) and not self._has_added_all:
            self._add_all()
            return self._place(module_part)
        return place

    def _record(self, module: nn.Module) -> ModuleRecord | None:
        """The record of this very object, if it has one of its own."""
        records = tuple(self._records.values())
        return next((record for record in records if record.module() is module), None)

    def places(self, keys: Collection[str]) -> dict[int, ModulePlace]:
        """By id, the places of all parts of these modules."""
        for record in tuple(self._records.values()):
            self._current(record)
        known = [key for key in tuple(self._records) if key in keys and key in self.surveys]
        surveys = [(key, self.surveys[key]) for key in known]
        places: dict[int, ModulePlace] = {}
        # In reverse, because later entries replace earlier ones: of several the first counts.
        for key, survey in reversed(surveys):
            for path, part in reversed(survey.modules + survey.tensors):
                places[id(part)] = (key, path)
        for key, survey in surveys:
            places[id(survey.root)] = (key, "")
        return places

    def state(self, key: str) -> ModuleState:
        """What may change in a module that has been met, as it is."""
        if key not in self._states:
            survey = self.surveys[key]
            path = self._records[key].path
            tokens: dict[PartPlace, Hashable] = {}
            names: set[str] = set()
            modules: set[str] = set()
            for place, value in survey.changeable():
                tokens[place] = _plain_token(value)
                if tokens[place] is None:
                    found = self.fingerprint_or_id(path, value)
                    tokens[place] = found.token
                    names |= found.names
                    modules |= found.modules
            versions = sum(torch_private.tensor_version(tensor) for _, tensor in survey.tensors)
            self._states[key] = ModuleState(
                tokens, versions, frozenset(names), frozenset(modules - {key})
            )
        return self._states[key]

    def _current(self, record: ModuleRecord) -> ModuleRecord:
        """This record, or that of the structure which its module has now."""
        module = record.module()
        if record.key in self.surveys or module is None:
            return record
        survey = ModuleSurvey(module)
        if survey.structure() != record.structure:
            return self._add(record.path, survey)
        self.surveys[record.key] = survey
        return record

    def _add(self, path: str, survey: ModuleSurvey) -> ModuleRecord:
        """Give a module a key; the one it had is given up."""
        former = self._record(survey.root)
        if former is not None:
            self._records.pop(former.key, None)
        record = ModuleRecord(path, survey, self._records)
        self._records[record.key] = record
        self.surveys[record.key] = survey
        # Made anew when it is next needed, with this one in it.
        self._places = None
        return record

    def _add_all(self) -> None:
        """Give all modules of the user's a key, so that an optimizer steps the one that he has."""
        self._has_added_all = True
        # A copy, because a thread of the user's may bind names meanwhile.
        for name, value in list(self._namespace.items()):
            if isinstance(value, nn.Module):
                self._path = name
                self._place(value)


_LONG_BYTES = 1 << 16  # longer text is hashed rather than kept alive for the next comparison
_MAX_TUPLE_ELEMENTS = 16  # longer tuples are pickled into a hash

_IMMUTABLE_TYPES = frozenset(
    (bool, int, str, bytes, complex, type(None), type(Ellipsis), torch.dtype, torch.device)
)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What identifies a value, and what it depends on."""

    token: Hashable  # equal for equal content
    names: frozenset[str] = frozenset()  # names of the namespace that its functions read
    modules: frozenset[str] = frozenset()  # keys of the modules that are part of it


def _plain_token(value: Any) -> Hashable | None:
    """The token of a value that can be compared directly."""
    kind = type(value)
    if kind in _IMMUTABLE_TYPES:
        is_long = kind in (str, bytes) and len(value) > _LONG_BYTES
        return None if is_long else (kind, value)
    if kind is float:
        # As text, so that nan equals nan, and 0.0 differs from -0.0.
        return (kind, value.hex())
    if kind is tuple and len(value) <= _MAX_TUPLE_ELEMENTS:
        tokens = tuple(map(_plain_token, value))
        return None if None in tokens else (kind, tokens)
    return None
