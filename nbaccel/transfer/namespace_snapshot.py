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

__all__ = ["Fingerprint", "NamespaceSnapshot", "fingerprint_of_pickle", "plain_token"]


class NamespaceSnapshot:
    """Fingerprints of one moment. What was looked at once is not looked at again.

    The snapshot keeps alive what it has seen, so it must not be kept itself.
    """

    def __init__(self, namespace: Mapping[str, Any], module_keys: ModuleRegistry) -> None:
        self._namespace = namespace
        self._modules = module_keys
        self._surveys: dict[str, ModuleSurvey] = {}
        self._states: dict[str, ModuleState] = {}
        self._table: dict[int, ModulePlace] | None = None
        self._owners: dict[int, tuple[str, nn.Module]] | None = None
        self._path = ""
        self.news = 0
        """How many modules got a key since this moment began."""

    # ------------------------------------------------------------------- values

    def fingerprint(self, value_name: str, named_value: Any) -> Fingerprint:
        """What identifies the value that has this name."""
        self._path = value_name
        if isinstance(named_value, nn.Module):
            module_place = self.place(named_value)
            if module_place is not None:
                return Fingerprint(("module", *module_place), modules=frozenset((module_place[0],)))
        value_token = plain_token(named_value)
        return Fingerprint(value_token) if value_token is not None else self._of_pickle(named_value)

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
        found_place = self._table.get(id(module_part))
        if found_place is None and is_module:
            return self._add(module_part, self._path).key, ""
        if found_place is None and isinstance(module_part, nn.Parameter):
            return self._of_owner(module_part)
        return found_place

    def table(self, module_records: Iterable[ModuleRecord]) -> dict[int, ModulePlace]:
        """The places of all parts of these modules; of several, the one that was there first."""
        place_table: dict[int, ModulePlace] = {}
        module_records = list(module_records)
        # In reverse, because later entries replace earlier ones: of several the first counts.
        for module_record in reversed(module_records):
            place_table.update(self.survey(module_record.key).places(module_record.key))
        for module_record in module_records:
            place_table[id(module_record.module)] = (module_record.key, "")
        return place_table

    def survey(self, module_key: str) -> ModuleSurvey:
        """What the module consists of."""
        if module_key not in self._surveys:
            record = self._modules.by_key(module_key)
            module = record.module if record is not None else None
            self._surveys[module_key] = (
                ModuleSurvey.of(module) if module is not None else ModuleSurvey((), ())
            )
        return self._surveys[module_key]

    def state(self, module_key: str) -> ModuleState:
        """What may change in the module, as it is."""
        if module_key not in self._states:
            record = self._modules.by_key(module_key)
            self._path = record.path if record is not None else module_key
            self._states[module_key] = self._module_state(module_key, self.survey(module_key))
        return self._states[module_key]

    def _current(self, record: ModuleRecord) -> ModuleRecord:
        """This record, or that of the structure which its module has now."""
        if record.key in self._surveys:
            return record
        module = record.module
        if module is None:
            return record
        module_survey = ModuleSurvey.of(module)
        if module_survey.structure() != record.structure:
            return self._add(module, record.path, module_survey)
        self._surveys[record.key] = module_survey
        return record

    def _add(
        self, module: nn.Module, path: str, module_survey: ModuleSurvey | None = None
    ) -> ModuleRecord:
        module_survey = module_survey or ModuleSurvey.of(module)
        record = self._modules.add(module, path, module_survey)
        self._surveys[record.key] = module_survey
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

    def _module_state(self, module_key: str, module_survey: ModuleSurvey) -> ModuleState:
        read_names: set[str] = set()
        module_keys: set[str] = set()

        def value_token(named_value: Any) -> Hashable:
            found_place = plain_token(named_value)
            if found_place is not None:
                return found_place
            try:
                pickled_fingerprint = self._of_pickle(named_value)
            except Exception:  # pickling runs user code: it may raise anything
                return OpaqueToken(named_value)
            read_names.update(pickled_fingerprint.names)
            module_keys.update(pickled_fingerprint.modules)
            return pickled_fingerprint.token

        attribute_tokens = {
            module_path: {
                value_name: value_token(named_value)
                for value_name, named_value in attributes_of(module)
            }
            for module_path, module in module_survey.modules
        }
        module_types = dict.fromkeys(type(module) for _, module in module_survey.modules)
        return ModuleState(
            requires_grad=tuple(
                module_tensor.requires_grad for _, module_tensor in module_survey.tensors
            ),
            training=tuple(module.training for _, module in module_survey.modules),
            attributes=attribute_tokens,
            classes={
                value_type: value_token(value_type)
                for value_type in module_types
                if travels_by_value(value_type)
            },
            versions=module_survey.versions(),
            names=frozenset(read_names),
            modules=frozenset(module_keys - {module_key}),
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


def plain_token(named_value: Any) -> Hashable | None:
    """The token of a value that can be compared directly, or that an import leads to."""
    value_type = type(named_value)
    if value_type in _IMMUTABLE_TYPES:
        is_long = value_type in (str, bytes) and len(named_value) > _LONG_BYTES
        return None if is_long else (value_type, named_value)
    if value_type is float:
        # As text, so that nan equals nan, and 0.0 differs from -0.0.
        return (value_type, named_value.hex())
    if value_type is tuple and len(named_value) <= _MAX_TUPLE_ELEMENTS:
        element_tokens = tuple(map(plain_token, named_value))
        return None if None in element_tokens else (value_type, element_tokens)
    if value_type is types.ModuleType:
        is_imported = sys.modules.get(named_value.__name__) is named_value
        return ("import", named_value.__name__) if is_imported else None
    if value_type in _IMPORTABLE_TYPES:
        return _token_of_import(named_value)
    return _token_of_block(named_value)


def _token_of_import(value: Any) -> Hashable | None:
    module = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", None)
    if module is None or name is None or module == "__main__":
        return None
    is_importable = getattr(sys.modules.get(module), name, None) is value
    return ("global", module, name) if is_importable else None


def _token_of_block(named_value: Any) -> Hashable | None:
    """The token of an array or tensor that is nothing but its numbers."""
    value_type = type(named_value)
    if value_type is torch.Tensor:
        is_ordinary = (
            named_value.device.type == "cpu"
            and named_value.layout is torch.strided
            and not (named_value.is_quantized or named_value.is_conj() or named_value.is_neg())
            # NumPy has no bfloat16.
            and named_value.dtype is not torch.bfloat16
            and not named_value.requires_grad
            and not named_value.__dict__
            and named_value.is_contiguous()
        )
        if not is_ordinary or arena.Finder().arena_of(named_value.untyped_storage()):
            return None
        return ("tensor", _hash_array(named_value.numpy()))
    if (
        value_type is np.ndarray
        and not named_value.dtype.hasobject
        and named_value.flags.c_contiguous
    ):
        return ("array", _hash_array(named_value))
    return None


def _hash_array(number_array: np.ndarray[Any, Any]) -> Hashable:
    # Through a view of bytes: some types of numbers (dates) have no buffer of their own.
    content_hash = (
        xxhash.xxh3_128_digest(number_array.reshape(-1).view(np.uint8).data)
        if number_array.size
        else b""
    )
    return (
        number_array.dtype.str,
        str(number_array.dtype),
        number_array.shape,
        # Making an array read-only is a change, too.
        number_array.flags.writeable,
        content_hash,
    )


class _HashingStream:
    """A file that keeps nothing but the hash of what is written to it."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()

    def write(self, stream_bytes: Any) -> int:
        self._hash.update(stream_bytes)
        return len(stream_bytes)

    def block(self, block_buffer: pickle.PickleBuffer) -> None:
        with block_buffer.raw() as raw_bytes:
            # The length first, or two blocks could hash like two others that are cut elsewhere.
            self._hash.update(raw_bytes.nbytes.to_bytes(8, "little"))
            self._hash.update(raw_bytes)

    def digest(self) -> bytes:
        return self._hash.digest()


def fingerprint_of_pickle(
    named_value: Any,
    object_reducer: Reducer,
    stand_ins: Mapping[int, tuple[arena.Arena, int]] | None = None,
) -> Fingerprint:
    """The fingerprint of anything that pickles."""
    hashing_stream = _HashingStream()
    pickle_sender = pickling.Sender.create(dict(stand_ins or {}))
    pickle_sender.reduce = object_reducer
    pickling.dump(named_value, pickle_sender, hashing_stream, hashing_stream.block)
    return Fingerprint(
        hashing_stream.digest(), frozenset(object_reducer.names), frozenset(object_reducer.modules)
    )
