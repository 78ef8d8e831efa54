"""Fingerprints of values: whether what the notebook has now is what a worker was sent.

Small immutable values are their own fingerprint. Everything else is pickled into a hash: the stream
and, in place, the big blocks beside it. Parts of modules are named by key, so that no weights are
hashed: what changed in a module is looked at separately (`modules.py`).
"""

from __future__ import annotations

import pickle
import sys
import types
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash

from nbaccel.launch.sharing import arena, parcel
from nbaccel.pool.travel import Reducer

__all__ = ["Fingerprint", "of_pickle", "plain"]

_NOTHING: frozenset[str] = frozenset()
_LONG_BYTES = 1 << 16  # longer text is hashed rather than kept alive for the next comparison
_MANY = 16  # elements of a tuple

_IMMUTABLE = frozenset(
    (bool, int, str, bytes, complex, type(None), type(Ellipsis), torch.dtype, torch.device)
)
_IMPORTABLE = frozenset((type, types.FunctionType, types.BuiltinFunctionType, np.ufunc))


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What identifies a value, and what it depends on."""

    token: Hashable
    """Equal for equal content."""
    names: frozenset[str] = _NOTHING
    """Names of the namespace that functions in the value read."""
    modules: frozenset[str] = _NOTHING
    """Keys of the modules that are part of it."""


def plain(value: Any) -> Hashable | None:
    """The token of a value that can be compared directly, or that an import leads to."""
    kind = type(value)
    if kind in _IMMUTABLE:
        long = kind in (str, bytes) and len(value) > _LONG_BYTES
        return None if long else (kind, value)
    if kind is float:
        return (kind, value.hex())  # so that nan is nan, and 0.0 is not -0.0
    if kind is tuple and len(value) <= _MANY:
        parts = tuple(map(plain, value))
        return None if None in parts else (kind, parts)
    if kind is types.ModuleType:
        imported = sys.modules.get(value.__name__) is value
        return ("import", value.__name__) if imported else None
    if kind in _IMPORTABLE:
        return _importable(value)
    return _block(value)


def _importable(value: Any) -> Hashable | None:
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module is None or name is None or module == "__main__":
        return None
    found = getattr(sys.modules.get(module), name, None) is value
    return ("global", module, name) if found else None


def _block(value: Any) -> Hashable | None:
    """The token of an array or tensor that is nothing but its numbers."""
    kind = type(value)
    if kind is torch.Tensor:
        ordinary = (
            value.device.type == "cpu"
            and value.layout is torch.strided
            and not (value.is_quantized or value.is_conj() or value.is_neg())
            and value.dtype is not torch.bfloat16
            and not value.requires_grad
            and not value.__dict__
            and value.is_contiguous()
        )
        if not ordinary or arena.Finder().home_of(value.untyped_storage()):
            return None
        return ("tensor", _hash(value.numpy()))
    if kind is np.ndarray and not value.dtype.hasobject and value.flags.c_contiguous:
        return ("array", _hash(value))
    return None


def _hash(array: np.ndarray[Any, Any]) -> Hashable:
    # Through a view of bytes: some types of numbers (dates) have no buffer of their own.
    content = xxhash.xxh3_128_digest(array.reshape(-1).view(np.uint8).data) if array.size else b""
    return (array.dtype.str, str(array.dtype), array.shape, array.flags.writeable, content)


class _Hashing:
    """A file that keeps nothing but the hash of what is written to it."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()

    def write(self, data: Any) -> int:
        self._hash.update(data)
        return len(data)

    def block(self, buffer: pickle.PickleBuffer) -> None:
        with buffer.raw() as raw:
            self._hash.update(raw.nbytes.to_bytes(8, "little"))
            self._hash.update(raw)

    def digest(self) -> bytes:
        return self._hash.digest()


def of_pickle(
    value: Any, reducer: Reducer, stand_ins: Mapping[int, tuple[arena.Arena, int]] | None = None
) -> Fingerprint:
    """The fingerprint of anything that pickles.

    Args:
        value: The value.
        reducer: A fresh one.
        stand_ins: Host copies of storages on devices.

    Raises:
        Exception: Whatever pickling raised.
    """
    hashing = _Hashing()
    sender = parcel.Sender.create(dict(stand_ins or {}))
    sender.reduce = reducer
    parcel.dump(value, sender, hashing, hashing.block)
    return Fingerprint(hashing.digest(), frozenset(reducer.names), frozenset(reducer.modules))
