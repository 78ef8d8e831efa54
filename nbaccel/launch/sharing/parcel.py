"""Parcels: Python objects on their way to another process, with their big blocks beside the pickle.

One memory file carries a whole parcel:

    [ numpy array | tensor storage | … | pickle ]        + storages that live in an arena:
                                                             by address only, never copied

The pickle is made by cloudpickle (functions, lambdas and classes of cells travel by value) with
two additions: storages of tensors leave the pickle stream (PEP 574, out-of-band buffers), and those
that lie in an arena become a reference. The receiver maps the file privately, so arrays and tensors
are writable there and are paged in only when touched.
"""

from __future__ import annotations

import contextlib
import contextvars
import gc
import io
import linecache
import os
import pickle
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import torch

from nbaccel.launch.sharing import arena, memory

_ALIGN = 64

ArenaTable = Mapping[str, memory.Mapping]
"""The receiver's mappings of the arenas, by the key under which the sender names them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parcel:
    """What the receiver must know to open the memory file that travels with this record."""

    nbytes: int
    """Size of the file."""
    blocks: tuple[memory.Range, ...]
    """Where each out-of-band block lies, in the order the pickle asks for them."""
    pickle: memory.Range


class TooCostly(Exception):
    """Packing was given up: more than the allowed number of bytes went through the pickle."""


@dataclass
class Sender:
    """What a pickling process knows about shared memory, and what it found while pickling."""

    keys: dict[int, str]
    """id of an arena → its key in the receiver's table."""
    stand_ins: dict[int, tuple[arena.Arena, int]]
    """Device address of a storage → where its host copy lies."""
    sources: dict[str, list[str]]
    """Source lines of every cell whose functions or classes travel by value."""
    arenas: dict[str, arena.Arena]
    """Arenas that the pickle refers to, by key."""
    modules: list[torch.nn.Module] = field(default_factory=list)
    """Every module that the pickle holds, each before its parts."""
    reduce: Callable[[Any], Any] | None = None
    """Asked first how to pickle an object; `NotImplemented` leaves it to what follows."""

    @classmethod
    def create(cls, stand_ins: dict[int, tuple[arena.Arena, int]] | None = None) -> Sender:
        """A sender that has found nothing yet."""
        return cls(keys={}, stand_ins=stand_ins or {}, sources={}, arenas={})

    def key(self, home: arena.Arena) -> str:
        """Name an arena for the receiver."""
        key = self.keys.setdefault(id(home), home.key)
        self.arenas[key] = home
        return key


def pack(obj: Any, sender: Sender, *, limit_bytes: int | None = None) -> tuple[Parcel, int]:
    """Put an object into a memory file.

    Args:
        obj: Anything cloudpickle can take.
        sender: Where tensors may live; its `sources` and `arenas` are filled.
        limit_bytes: Give up when the pickle itself, without out-of-band blocks, grows beyond this.

    Returns:
        The parcel and the file's descriptor, which the caller closes.

    Raises:
        TooCostly: If `limit_bytes` was reached.
    """
    return prepare(obj, sender, limit_bytes=limit_bytes).write()


@dataclass(frozen=True)
class Prepared:
    """A pickled object, before its big blocks have been copied."""

    stream: io.BytesIO
    blocks: list[pickle.PickleBuffer]

    def drop(self) -> None:
        """Give up what it holds of the objects' memory."""
        while self.blocks:
            self.blocks.pop().release()

    def write(self) -> tuple[Parcel, int]:
        """Copy all of it into a memory file; see `pack`."""
        return _write(self.stream.getbuffer(), [block.raw() for block in self.blocks])


def prepare(obj: Any, sender: Sender, *, limit_bytes: int | None = None) -> Prepared:
    """Do what `pack` does, but for copying what is big."""
    blocks: list[pickle.PickleBuffer] = []
    stream = _Metered(limit_bytes)
    dump(obj, sender, stream, blocks.append)
    return Prepared(stream, blocks)


def dump(
    obj: Any, sender: Sender, stream: Any, on_block: Callable[[pickle.PickleBuffer], Any]
) -> None:
    """Pickle as `pack` does, but into anything that has a `write`; big blocks go to `on_block`."""
    _Pickler(stream, sender, on_block).dump(obj)


def pack_plain(obj: Any, sender: Sender) -> tuple[Parcel, int]:
    """Like `pack`, but classes and functions travel by name.

    For a forked child's answer: its parent has the very same classes, and must get them back, not
    copies of them, or the notebook's `except MyError` would not match.
    """
    blocks: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _PlainPickler(stream, sender, blocks.append).dump(obj)
    return _write(stream.getbuffer(), [block.raw() for block in blocks])


def unpack(parcel: Parcel, fd: int, arenas: ArenaTable, *, device: str = "cpu") -> Any:
    """Open a parcel. Arrays and tensors in it view a private mapping of the file.

    Args:
        parcel: The record that came with the descriptor.
        fd: The memory file; the caller closes it.
        arenas: This process's mappings of the arenas that the sender referred to.
        device: Where tensors go that lived on an accelerator at the sender's.
    """
    mapping = memory.Mapping(fd, parcel.nbytes, private=True)
    token = _RECEIVER.set(_Receiver(arenas, device))
    try:
        return pickle.loads(
            mapping.view(*parcel.pickle), buffers=[mapping.view(*span) for span in parcel.blocks]
        )
    finally:
        _RECEIVER.reset(token)


@dataclass(frozen=True)
class _Receiver:
    arenas: ArenaTable
    device: str


_RECEIVER: contextvars.ContextVar[_Receiver] = contextvars.ContextVar("nbaccel-receiver")


class _Metered(io.BytesIO):
    def __init__(self, limit_bytes: int | None) -> None:
        super().__init__()
        self._limit_bytes = limit_bytes

    def write(self, data: Any) -> int:
        written = super().write(data)
        if self._limit_bytes is not None and self.tell() > self._limit_bytes:
            raise TooCostly(self.tell())
        return written


class _StorageReducer:
    """What both picklers do with tensor storages."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._find = arena.Finder()

    def reduce(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is torch.storage.TypedStorage:
            return _typed_storage, (obj._untyped_storage, obj.dtype)
        if kind is torch.UntypedStorage and obj.device.type != "meta":
            return self._untyped(obj)
        if kind in _PLAIN and obj.device.type == "cpu" and _is_bare(obj):
            return self._tensor(obj, kind)
        return NotImplemented

    def _tensor(self, tensor: torch.Tensor, kind: type) -> Any:
        """In one step what torch takes four for: a model has hundreds of them."""
        storage = tensor.untyped_storage()
        nbytes, address = storage.nbytes(), storage.data_ptr()
        home = self._find(address, nbytes) if nbytes else None
        if home is None:
            return NotImplemented
        place = (self._sender.key(home), address - home.address, nbytes)
        shape = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        return _arena_tensor, (kind, *place, tensor.dtype, *shape, tensor.requires_grad)

    def _untyped(self, storage: torch.UntypedStorage) -> Any:
        nbytes, address = storage.nbytes(), storage.data_ptr()
        on_host = storage.device.type == "cpu"
        home = self._find(address, nbytes) if on_host and nbytes else None
        if home is not None:
            return _arena_storage, (self._sender.key(home), address - home.address, nbytes, False)
        if address in self._sender.stand_ins and not on_host:
            home, start = self._sender.stand_ins[address]
            return _arena_storage, (self._sender.key(home), start, nbytes, True)
        if nbytes == 0:
            return torch.UntypedStorage, (0,)
        raw = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return _own_storage, (pickle.PickleBuffer(raw.cpu().numpy().data), not on_host)


_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


def _is_bare(tensor: torch.Tensor) -> bool:
    """Whether geometry, values and `requires_grad` are all there is to the tensor."""
    return (
        tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and tensor.is_leaf
        and not tensor.__dict__
        and not tensor._backward_hooks
    )


_HOOKS = tuple(
    name for name, value in vars(torch.nn.Module()).items() if type(value) is OrderedDict
)
"""The tables of hooks that every module has, nearly always empty."""


_MODULE_GETSTATE = getattr(torch.nn.Module, "__getstate__", None)  # Python 3.10's object has none


def _is_ordinary(kind: type[torch.nn.Module]) -> bool:
    """Whether such modules are pickled as most are: their attributes and nothing else."""
    return (
        kind.__setstate__ is torch.nn.Module.__setstate__
        and kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__reduce__ is object.__reduce__
        and getattr(kind, "__getstate__", None) is _MODULE_GETSTATE
        and not hasattr(kind, "__getnewargs_ex__")
        and not hasattr(kind, "__getnewargs__")
        and kind.__new__ is object.__new__
    )


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(
        self, file: Any, sender: Sender, on_block: Callable[[pickle.PickleBuffer], Any]
    ) -> None:
        # cloudpickle's table is a ChainMap: a look-up in Python for every object of the model.
        self.dispatch_table = dict(cloudpickle.Pickler.dispatch_table)
        super().__init__(file, protocol=5, buffer_callback=on_block)
        self._storages = _StorageReducer(sender)
        self._sender = sender
        self._first = sender.reduce
        self._shapes: dict[tuple[str, ...], tuple[str, ...]] = {}  # one object for pickle's memo
        self._ordinary: dict[type, bool] = {}

    def reducer_override(self, obj: Any) -> Any:
        if self._first is not None:
            reduced = self._first(obj)
            if reduced is not NotImplemented:
                return reduced
        reduced = self._storages.reduce(obj)
        if reduced is not NotImplemented:
            return reduced
        if isinstance(obj, types.FunctionType):
            note_source(obj, self._sender.sources)
        elif isinstance(obj, torch.nn.Module):
            self._sender.modules.append(obj)
            kind = type(obj)
            if kind not in self._ordinary:
                self._ordinary[kind] = _is_ordinary(kind)
            return self._module(obj) if self._ordinary[kind] else NotImplemented
        elif not isinstance(obj, type):
            return NotImplemented  # cloudpickle has its own way with functions and classes only
        return super().reducer_override(obj)

    def _module(self, module: torch.nn.Module) -> Any:
        """Leave out the empty tables of hooks: pickling those takes longer than all the rest."""
        state = dict(vars(module) if _MODULE_GETSTATE is None else _MODULE_GETSTATE(module))
        empty = tuple(name for name in _HOOKS if name in state and not state[name])
        for name in empty:
            del state[name]
        return _module, (type(module), self._shapes.setdefault(empty, empty)), state


class _PlainPickler(pickle.Pickler):
    def __init__(
        self, file: Any, sender: Sender, on_block: Callable[[pickle.PickleBuffer], Any]
    ) -> None:
        super().__init__(file, protocol=5, buffer_callback=on_block)
        self._storages = _StorageReducer(sender)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type) and "<locals>" in obj.__qualname__:
            # No name leads to it; but a fork has it where its parent has it.
            return _local_class, (id(obj), obj.__qualname__, cloudpickle.dumps(obj))
        return self._storages.reduce(obj)


def note_source(function: types.FunctionType, sources: dict[str, list[str]]) -> None:
    """Keep the lines of the cell a function came from: the worker's tracebacks need them."""
    name = function.__code__.co_filename
    if name not in sources and name in linecache.cache and len(linecache.cache[name]) == 4:
        mtime = linecache.cache[name][1]  # type: ignore[misc]
        if mtime is None:  # no file behind it: a cell, an exec, a doctest
            sources[name] = linecache.getlines(name)


def _write(stream: memoryview, blocks: list[memoryview]) -> tuple[Parcel, int]:
    spans, at = [], 0
    for block in blocks:
        spans.append((at, at + block.nbytes))
        at += -(-block.nbytes // _ALIGN) * _ALIGN
    parcel = Parcel(nbytes=at + stream.nbytes, blocks=tuple(spans), pickle=(at, at + stream.nbytes))
    fd = memory.create_file("parcel", parcel.nbytes)
    with _closed_on_error(fd):
        for span, block in zip(spans, blocks, strict=True):
            memory.write_at(fd, block, span[0])
        memory.write_at(fd, stream, at)
    return parcel, fd


@contextlib.contextmanager
def _closed_on_error(fd: int) -> Iterator[None]:
    try:
        yield
    except BaseException:  # no descriptor is lost to an interrupt either
        os.close(fd)
        raise


# What the pickle calls on the receiving side. Their names are part of the pickle, so of the wire.


def _typed_storage(untyped: torch.UntypedStorage, dtype: torch.dtype) -> torch.storage.TypedStorage:
    return torch.storage.TypedStorage(  # type: ignore[no-untyped-call]
        wrap_storage=untyped, dtype=dtype, _internal=True
    )


def _arena_storage(key: str, start: int, nbytes: int, to_device: bool) -> torch.UntypedStorage:
    receiver = _RECEIVER.get()
    storage = arena.storage_at(receiver.arenas[key], start, nbytes)
    return _moved(storage, receiver.device) if to_device else storage


def _arena_tensor(
    kind: type[torch.Tensor],
    key: str,
    start: int,
    nbytes: int,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
) -> torch.Tensor:
    storage = arena.storage_at(_RECEIVER.get().arenas[key], start, nbytes)
    tensor = torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)
    if kind is torch.nn.Parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)


def _module(kind: type[torch.nn.Module], empty: tuple[str, ...]) -> torch.nn.Module:
    module = kind.__new__(kind)
    vars(module).update((name, OrderedDict()) for name in empty)
    return module


def _local_class(address: int, qualname: str, copy: bytes) -> type:
    """The class of that name at that address; a copy, if it was made after the fork."""
    for found in gc.get_objects():
        if id(found) == address and isinstance(found, type) and found.__qualname__ == qualname:
            return found
    made: type = pickle.loads(copy)
    return made


def _own_storage(block: Any, to_device: bool) -> torch.UntypedStorage:
    storage = torch.frombuffer(block, dtype=torch.uint8).untyped_storage()
    return _moved(storage, _RECEIVER.get().device) if to_device else storage


def _moved(storage: torch.UntypedStorage, device: str) -> torch.UntypedStorage:
    if device == "cpu":
        return storage
    raw = torch.empty(0, dtype=torch.uint8).set_(storage)
    return raw.to(device).untyped_storage()
