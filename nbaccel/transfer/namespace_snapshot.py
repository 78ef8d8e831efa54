"""The notebook's namespace at one moment: the fingerprints of what is in it.

Small immutable values are their own fingerprint. Everything else is pickled into a hash: the stream
and, in place, the big blocks beside it. Parts of modules are named by key, so that no weights are
hashed: what changed in a module is compared separately (`module_registry.py`).
"""

from __future__ import annotations

import pickle
import sys
import types
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn

from nbaccel.transfer import arena, pickling
from nbaccel.transfer.function_pickling import ModulePlace, Reducer, travels_by_value
from nbaccel.transfer.module_registry import (
    ModuleRecord,
    ModuleRegistry,
    ModuleState,
    ModuleSurvey,
    OpaqueToken,
    attributes_of,
)


class NamespaceSnapshot:
    """Fingerprints of one moment. What was looked at once is not looked at again.

    The snapshot keeps alive what it has seen, so it must not be kept itself.
    """

    def __init__(self, namespace: Mapping[str, Any], modules: ModuleRegistry) -> None:
        self._namespace = namespace
        self._modules = modules
        self._surveys: dict[str, ModuleSurvey] = {}
        self._states: dict[str, ModuleState] = {}
        self._table: dict[int, ModulePlace] | None = None
        self._owners: dict[int, tuple[str, nn.Module]] | None = None
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
            for record in self._modules.all()
            for address, host_place in record.stand_ins.items()
        }

    # ------------------------------------------------------------------- modules

    def place(self, module_part: Any) -> ModulePlace | None:
        """Where in a module with a key this is. Modules get one when they are first met."""
        is_module = isinstance(module_part, nn.Module)
        record = self._modules.record_of(module_part) if is_module else None
        if record is not None:
            return self._current(record).key, ""
        if self._table is None:
            self._table = self.table([self._current(record) for record in self._modules.all()])
        place = self._table.get(id(module_part))
        if place is None and is_module:
            return self._add(module_part, self._path).key, ""
        if place is None and isinstance(module_part, nn.Parameter):
            return self._of_owner(module_part)
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
            record = self._modules.by_key(key)
            module = record.module if record is not None else None
            self._surveys[key] = (
                ModuleSurvey.of(module) if module is not None else ModuleSurvey((), ())
            )
        return self._surveys[key]

    def state(self, key: str) -> ModuleState:
        """What may change in the module, as it is."""
        if key not in self._states:
            record = self._modules.by_key(key)
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

    def _of_owner(self, parameter: nn.Parameter) -> ModulePlace | None:
        """Its place in a module that the user has, so that an optimizer steps that module."""
        if self._owners is None:
            self._owners = {
                id(tensor): (name, value)
                # A copy, because a thread of the user's may bind names meanwhile.
                for name, value in list(self._namespace.items())
                if isinstance(value, nn.Module)
                for tensor in value.parameters()
            }
        name, module = self._owners.get(id(parameter), ("", None))
        if module is None:
            return None
        self._add(module, name)
        self._table = self.table(self._modules.all())
        return self._table.get(id(parameter))

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

        attributes = {
            path: {name: token(value) for name, value in attributes_of(module)}
            for path, module in survey.modules
        }
        kinds = dict.fromkeys(type(module) for _, module in survey.modules)
        return ModuleState(
            requires_grad=tuple(tensor.requires_grad for _, tensor in survey.tensors),
            training=tuple(module.training for _, module in survey.modules),
            attributes=attributes,
            classes={kind: token(kind) for kind in kinds if travels_by_value(kind)},
            versions=survey.versions(),
            names=frozenset(names),
            modules=frozenset(modules - {key}),
        )


_NO_REFERENCES: frozenset[str] = frozenset()
_LONG_BYTES = 1 << 16  # longer text is hashed rather than kept alive for the next comparison
_MAX_TUPLE_ELEMENTS = 16  # longer tuples are pickled into a hash

_IMMUTABLE_TYPES = frozenset(
    (bool, int, str, bytes, complex, type(None), type(Ellipsis), torch.dtype, torch.device)
)
_IMPORTABLE_TYPES = frozenset((type, types.FunctionType, types.BuiltinFunctionType, np.ufunc))


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
    """The token of a value that can be compared directly, or that an import leads to."""
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
    if kind is types.ModuleType:
        is_imported = sys.modules.get(value.__name__) is value
        return ("import", value.__name__) if is_imported else None
    if kind in _IMPORTABLE_TYPES:
        return _token_of_import(value)
    return _token_of_block(value)


def _token_of_import(value: Any) -> Hashable | None:
    module = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", None)
    if module is None or name is None or module == "__main__":
        return None
    is_importable = getattr(sys.modules.get(module), name, None) is value
    return ("global", module, name) if is_importable else None


def _token_of_block(value: Any) -> Hashable | None:
    """The token of an array or tensor that is nothing but its numbers."""
    kind = type(value)
    if kind is torch.Tensor:
        is_ordinary = (
            value.device.type == "cpu"
            and value.layout is torch.strided
            and not (value.is_quantized or value.is_conj() or value.is_neg())
            # NumPy has no bfloat16.
            and value.dtype is not torch.bfloat16
            and not value.requires_grad
            and not value.__dict__
            and value.is_contiguous()
        )
        if not is_ordinary or arena.arena_of(value.untyped_storage()):
            return None
        return ("tensor", _hash_array(value.numpy()))
    if kind is np.ndarray and not value.dtype.hasobject and value.flags.c_contiguous:
        return ("array", _hash_array(value))
    return None


def _hash_array(array: np.ndarray[Any, Any]) -> Hashable:
    # Through a view of bytes: some types of numbers (dates) have no buffer of their own.
    digest = xxhash.xxh3_128_digest(array.reshape(-1).view(np.uint8).data) if array.size else b""
    return (
        array.dtype.str,
        str(array.dtype),
        array.shape,
        # Making an array read-only is a change, too.
        array.flags.writeable,
        digest,
    )


class _HashingStream:
    """A file that keeps nothing but the hash of what is written to it."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()

    def write(self, content: Any) -> int:
        self._hash.update(content)
        return len(content)

    def block(self, buffer: pickle.PickleBuffer) -> None:
        with buffer.raw() as raw_bytes:
            # The length first, or two blocks could hash like two others that are cut elsewhere.
            self._hash.update(raw_bytes.nbytes.to_bytes(8, "little"))
            self._hash.update(raw_bytes)

    def digest(self) -> bytes:
        return self._hash.digest()


def fingerprint_of_pickle(
    value: Any, reducer: Reducer, stand_ins: Mapping[int, tuple[arena.Arena, int]] | None = None
) -> Fingerprint:
    """The fingerprint of anything that pickles."""
    stream = _HashingStream()
    pickling.dump(value, pickling.Sender(stand_ins or {}, reducer), stream, stream.block)
    return Fingerprint(stream.digest(), frozenset(reducer.names), frozenset(reducer.modules))
