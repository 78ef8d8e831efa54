"""Python objects sent to another process, with their big blocks beside the pickle.

What cannot be pickled is found by `object_walk`.
"""

from __future__ import annotations

import contextvars
import functools
import gc
import importlib
import io
import linecache
import marshal
import os
import pickle
import sys
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import torch

from nbaccel.base import torch_private
from nbaccel.transfer import arena, memfd

WEAK_TYPES = (weakref.ProxyType, weakref.CallableProxyType, weakref.ReferenceType)
"""Types of weak references, to be asked for by ``type``: ``isinstance`` may raise."""

ArenaTable = Mapping[str, memfd.Mapping]
"""The receiver's mappings of the arenas, by the key under which the sender names them."""


class TooCostly(Exception):
    """Packing was given up: more than the allowed number of bytes went through the pickle."""


@dataclass
class Sender:
    """What a pickling process knows about shared memory, and what it found while pickling."""

    stand_ins: Mapping[int, tuple[arena.Arena, int]] = field(default_factory=dict)
    """Device address of a storage → where its host copy lies."""
    reduce: Callable[[Any], Any] | None = None
    """Asked first how to pickle an object; `NotImplemented` leaves it to what follows."""
    sources: dict[str, list[str]] = field(default_factory=dict)
    """Source lines of every cell whose functions or classes travel by value."""
    arenas: dict[str, arena.Arena] = field(default_factory=dict)
    """Arenas that the pickle refers to, by key."""
    modules: list[torch.nn.Module] = field(default_factory=list)
    """Every module that the pickle holds, each before its parts."""

    def key(self, owner: arena.Arena) -> str:
        """Name an arena for the receiver."""
        self.arenas[owner.key] = owner
        return owner.key


def pack(
    value: Any, sender: Sender, *, limit_bytes: int | None = None
) -> tuple[memfd.PackedObject, int]:
    """Put an object into a memory file."""
    return prepare(value, sender, limit_bytes=limit_bytes).write()


@dataclass(frozen=True)
class PreparedObject:
    """A pickled object, before its big blocks have been copied."""

    stream: io.BytesIO
    blocks: list[pickle.PickleBuffer]

    def drop(self) -> None:
        """Give up what it holds of the objects' memory."""
        while self.blocks:
            # A PickleBuffer locks its exporter: a bytearray, for one, could not be resized.
            self.blocks.pop().release()

    def write(self) -> tuple[memfd.PackedObject, int]:
        """Copy all of it into a memory file; see `pack`."""
        blocks = [block.raw() for block in self.blocks]
        content = self.stream.getbuffer()
        spans = []
        end = 0
        for block in blocks:
            spans.append((end, end + block.nbytes))
            # Tensors view the blocks in place, so they need torch's alignment.
            end += memfd.aligned(block.nbytes)
        packed = memfd.PackedObject(
            nbytes=end + content.nbytes, blocks=tuple(spans), pickle=(end, end + content.nbytes)
        )
        fd = memfd.create_file("payload", packed.nbytes)
        try:
            for span, block in zip(spans, blocks, strict=True):
                memfd.write_at(fd, block, span[0])
            memfd.write_at(fd, content, end)
        except BaseException:  # an interrupt must not leak the descriptor either
            os.close(fd)
            raise
        return packed, fd


def prepare(value: Any, sender: Sender, *, limit_bytes: int | None = None) -> PreparedObject:
    """Do what `pack` does, except for copying the big blocks."""
    blocks: list[pickle.PickleBuffer] = []
    stream = _MeteredStream(limit_bytes)
    dump(value, sender, stream, blocks.append)
    return PreparedObject(stream, blocks)


def dump(
    value: Any, sender: Sender, stream: Any, on_block: Callable[[pickle.PickleBuffer], Any]
) -> None:
    """Pickle as `pack` does, but into anything that has a `write`; big blocks go to `on_block`."""
    _ValuePickler(stream, sender, on_block).dump(value)


def pack_plain(value: Any, sender: Sender) -> tuple[memfd.PackedObject, int]:
    """Like `pack`, but classes and functions travel by name.

    For a forked child's answer: its parent has the very same classes, and must get them back, not
    copies of them, or the notebook's `except MyError` would not match.
    """
    blocks: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _PlainPickler(stream, sender, blocks.append).dump(value)
    return PreparedObject(stream, blocks).write()


def unpack(
    packed: memfd.PackedObject,
    fd: int,
    arenas: ArenaTable,
    *,
    device: str = "cpu",
    namespace: dict[str, Any] | None = None,
    find_module: Callable[[str], torch.nn.Module] | None = None,
) -> Any:
    """Open a payload. Arrays and tensors in it view a private mapping of the file.

    Functions of a cell read what they read from the namespace; modules that the pickle names by a
    key are looked up.
    """
    # Private: a payload goes to several ranks, and one rank's writes must not show in another.
    mapping = memfd.Mapping(fd, packed.nbytes, is_private=True)
    # A context variable, because functions that a pickle calls can be given nothing but its data.
    token = _CURRENT_RECEIVER.set(
        Receiver(arenas, device, {} if namespace is None else namespace, find_module)
    )
    try:
        return pickle.loads(
            mapping.view(*packed.pickle), buffers=[mapping.view(*span) for span in packed.blocks]
        )
    finally:
        _CURRENT_RECEIVER.reset(token)


@dataclass(frozen=True)
class Receiver:
    """What a pickle refers to in the process that opens it; see `unpack`."""

    arenas: ArenaTable
    device: str
    namespace: dict[str, Any]
    find_module: Callable[[str], torch.nn.Module] | None


_CURRENT_RECEIVER: contextvars.ContextVar[Receiver] = contextvars.ContextVar("nbaccel-receiver")


def current_receiver() -> Receiver:
    """That of the pickle which is being opened."""
    return _CURRENT_RECEIVER.get()


class _MeteredStream(io.BytesIO):
    def __init__(self, limit_bytes: int | None) -> None:
        super().__init__()
        self._limit_bytes = limit_bytes

    def write(self, content: Any) -> int:
        count = super().write(content)
        # Checked while pickling: a data set of gigabytes must not be pickled before it is given up.
        if self._limit_bytes is not None and self.tell() > self._limit_bytes:
            raise TooCostly(self.tell())
        return count


class _StorageReducer:
    """What both picklers do with tensor storages."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender

    def reduce(self, value: Any) -> Any:
        kind = type(value)
        if kind is torch.storage.TypedStorage:
            return _typed_storage, (torch_private.untyped_storage(value), value.dtype)
        if kind is torch.UntypedStorage and value.device.type != "meta":
            return self._untyped(value)
        if kind in _PLAIN_TENSOR_TYPES and value.device.type == "cpu" and _is_bare(value):
            return self._tensor(value, kind)
        return NotImplemented

    def _tensor(self, tensor: torch.Tensor, kind: type) -> Any:
        """In one step what torch takes four for: a model has hundreds of them."""
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        address = storage.data_ptr()
        owner = arena.find_arena(address, nbytes) if nbytes else None
        # Left to torch's own pickling, which calls back for the storage.
        if owner is None:
            return NotImplemented
        place = (self._sender.key(owner), address - owner.address, nbytes)
        geometry = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        return _arena_tensor, (kind, *place, tensor.dtype, *geometry, tensor.requires_grad)

    def _untyped(self, storage: torch.UntypedStorage) -> Any:
        nbytes = storage.nbytes()
        address = storage.data_ptr()
        on_host = storage.device.type == "cpu"
        owner = arena.find_arena(address, nbytes) if on_host and nbytes else None
        if owner is not None:
            return _arena_storage, (self._sender.key(owner), address - owner.address, nbytes, False)
        if address in self._sender.stand_ins and not on_host:
            owner, start = self._sender.stand_ins[address]
            return _arena_storage, (self._sender.key(owner), start, nbytes, True)
        # An empty storage has no buffer to view.
        if nbytes == 0:
            return torch.UntypedStorage, (0,)
        raw = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return _own_storage, (pickle.PickleBuffer(raw.cpu().numpy().data), not on_host)


_PLAIN_TENSOR_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))


def _is_bare(tensor: torch.Tensor) -> bool:
    """Whether geometry, values and `requires_grad` are all there is to the tensor."""
    return (
        tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and tensor.is_leaf
        and not tensor.__dict__
        and not torch_private.has_gradient_hooks(tensor)
    )


_HOOK_TABLES = tuple(
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


class _ValuePickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(
        self, pickle_file: Any, sender: Sender, on_block: Callable[[pickle.PickleBuffer], Any]
    ) -> None:
        # cloudpickle's table is a ChainMap: a look-up in Python for every object of the model.
        self.dispatch_table = dict(cloudpickle.Pickler.dispatch_table)
        self.dispatch_table[types.CodeType] = _reduce_code
        # Earlier protocols have no blocks beside the pickle.
        super().__init__(pickle_file, protocol=5, buffer_callback=on_block)
        self._storages = _StorageReducer(sender)
        self._sender = sender
        # One tuple object per content: pickle writes the second occurrence as a reference.
        self._shapes: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._ordinary: dict[type, bool] = {}

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind in WEAK_TYPES:
            return _reduce_weak(value)
        if _is_bar(kind):
            return _reduce_bar(value)
        if kind is types.FunctionType:
            _note_source(value, self._sender.sources)
        if self._sender.reduce is not None:
            reduced = self._sender.reduce(value)
            if reduced is not NotImplemented:
                return reduced
        reduced = self._storages.reduce(value)
        if reduced is not NotImplemented:
            return reduced
        if isinstance(value, torch.nn.Module):
            self._sender.modules.append(value)
            if kind not in self._ordinary:
                self._ordinary[kind] = _is_ordinary(kind)
            return self._module(value) if self._ordinary[kind] else NotImplemented
        if isinstance(value, types.ModuleType):
            return _reduce_module(value)
        # cloudpickle has its own way with functions and classes only; asking it costs time.
        if not isinstance(value, (type, types.FunctionType)):
            return NotImplemented
        return _with_name(value, super().reducer_override(value))

    def _module(self, module: torch.nn.Module) -> Any:
        """Leave out the empty tables of hooks: pickling those takes longer than all the rest."""
        state = dict(vars(module) if _MODULE_GETSTATE is None else _MODULE_GETSTATE(module))
        empty = tuple(name for name in _HOOK_TABLES if name in state and not state[name])
        for name in empty:
            del state[name]
        return (_make_module, (type(module), self._shapes.setdefault(empty, empty)), state)


class _PlainPickler(pickle.Pickler):
    def __init__(
        self, pickle_file: Any, sender: Sender, on_block: Callable[[pickle.PickleBuffer], Any]
    ) -> None:
        super().__init__(pickle_file, protocol=5, buffer_callback=on_block)
        self._storages = _StorageReducer(sender)

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type) and "<locals>" in value.__qualname__:
            # No name leads to it; but a fork has it where its parent has it.
            return _local_class, (id(value), value.__qualname__, dumps_with_lines(value))
        return self._storages.reduce(value)


def dumps_with_lines(value: Any) -> bytes:
    """What cloudpickle writes of an object, with the files that its code comes from."""
    written = io.BytesIO()
    _PicklerWithLines(written).dump(value)
    return written.getvalue()


def _reduce_code(code: types.CodeType) -> tuple[Any, ...]:
    # From 3.1.3 on cloudpickle replaces the file's name, by which errors show the line of a cell.
    # Both sides are one Python, as marshal demands; its format 2 gives equal bytes for equal code.
    return marshal.loads, (marshal.dumps(code, 2),)


def _reduce_module(module: types.ModuleType) -> Any:
    # cloudpickle knows plain modules only, and torch.backends.cudnn is of a class of its own. It
    # puts that into every function that reads `torch.backends.cudnn`.
    has_own_class = type(module) is not types.ModuleType
    is_imported = sys.modules.get(module.__name__) is module
    if has_own_class and is_imported and type(module).__reduce__ is object.__reduce__:
        return importlib.import_module, (module.__name__,)
    return NotImplemented


class _PicklerWithLines(cloudpickle.Pickler):  # type: ignore[misc]
    # Of the class: a pickler asks for it when it is made.
    dispatch_table = {**cloudpickle.Pickler.dispatch_table, types.CodeType: _reduce_code}  # noqa: RUF012


def _note_source(function: types.FunctionType, sources: dict[str, list[str]]) -> None:
    """Keep the lines of the cell a function came from: the worker's tracebacks need them."""
    name = function.__code__.co_filename
    if name not in sources and len(linecache.cache.get(name, ())) == 4:
        mtime = linecache.cache[name][1]  # type: ignore[misc]
        # None: there is no file that a worker could read; it is a cell, an exec or a doctest.
        if mtime is None:
            sources[name] = linecache.getlines(name)


def keep_sources(sources: Mapping[str, list[str]]) -> None:
    """Let tracebacks of this process show the lines of the notebook's cells."""
    for name, lines in sources.items():
        # No modification time, or linecache would look for the file and drop the lines.
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)


# What the pickle calls on the receiving side. The pickle contains their names, so both sides must
# have the same ones.


def _typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.storage.TypedStorage:
    return torch.storage.TypedStorage(  # type: ignore[no-untyped-call]
        wrap_storage=storage, dtype=dtype, _internal=True
    )


def _arena_storage(key: str, start: int, nbytes: int, to_device: bool) -> torch.UntypedStorage:
    receiver = _CURRENT_RECEIVER.get()
    storage = arena.storage_at(receiver.arenas[key], start, nbytes)
    return _storage_on_device(storage, receiver.device) if to_device else storage


def _arena_tensor(
    kind: type[torch.Tensor],
    key: str,
    start: int,
    nbytes: int,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    requires_grad: bool,
) -> torch.Tensor:
    storage = arena.storage_at(_CURRENT_RECEIVER.get().arenas[key], start, nbytes)
    tensor = torch.empty(0, dtype=dtype).set_(storage, offset, shape, strides)
    if kind is torch.nn.Parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)


def _make_module(kind: type[torch.nn.Module], empty: tuple[str, ...]) -> torch.nn.Module:
    module = kind.__new__(kind)
    vars(module).update((name, OrderedDict()) for name in empty)
    return module


def _local_class(address: int, name: str, content: bytes) -> type:
    """The class of that name at that address; a copy, if it was made after the fork."""
    # A forked child has its parent's addresses, so the id finds the class. The name is compared
    # too, because the address may have been given to another object since.
    for known in gc.get_objects():
        if id(known) == address and isinstance(known, type) and known.__qualname__ == name:
            return known
    made: type = pickle.loads(content)
    return made


def _own_storage(block: Any, to_device: bool) -> torch.UntypedStorage:
    storage = torch.frombuffer(block, dtype=torch.uint8).untyped_storage()
    return _storage_on_device(storage, _CURRENT_RECEIVER.get().device) if to_device else storage


def _storage_on_device(storage: torch.UntypedStorage, device: str) -> torch.UntypedStorage:
    if torch.device(device).type == "cpu":
        return storage
    raw = torch.empty(0, dtype=torch.uint8).set_(storage)
    return raw.to(device).untyped_storage()


# ------------------------------------------------------------------------- what stays behind

# A weak reference does not keep what it names, and one whose object is gone raises when it is
# merely looked at (`isinstance` asks for its class). Bars of tqdm hold the stream or widget that
# they are drawn in, and a finished one in a notebook holds such a reference.


def _reduce_weak(reference: Any) -> Any:
    """Pickle a weak reference with what it names, if that is there."""
    is_proxy = type(reference) is not weakref.ReferenceType
    return _weak, (is_proxy, _referent(reference))


def _referent(reference: Any) -> Any:
    if type(reference) is weakref.ReferenceType:
        return reference()
    try:
        # What a proxy asks its object for is bound to the object.
        return reference.__repr__.__self__
    except (AttributeError, ReferenceError):
        return None


def _weak(is_proxy: bool, named: Any) -> Any:
    """A weak reference; to something that is gone at once, where there is nothing to name."""
    target = _Gone() if named is None else named
    return weakref.proxy(target) if is_proxy else weakref.ref(target)


class _Gone:
    """Something that is gone."""


def _is_bar(kind: type) -> bool:
    """Whether objects of a type are bars of tqdm."""
    module = sys.modules.get("tqdm.std")
    return module is not None and issubclass(kind, module.tqdm)


def _reduce_bar(bar: Any) -> Any:
    """Pickle a bar as one of the same numbers; one that has ended draws nothing."""
    has_ended = bool(bar.disable)
    settings = {
        "desc": None if has_ended else bar.desc.removesuffix(": "),
        "total": bar.total if not has_ended else None,
        "initial": bar.n,
        "disable": has_ended,
    }
    return _bar, (None if has_ended else bar.iterable, settings)


def _bar(iterable: Any, settings: dict[str, Any]) -> Any:
    from tqdm.auto import tqdm

    return tqdm(iterable, **settings)


# ------------------------------------------------------------------------- names in `__main__`

# Every pickler but cloudpickle writes a class as a module and a name: `torch.save`, the collectives
# of objects, the checkpoints of libraries. A worker's `__main__` is not the notebook's, so classes
# and functions that arrive by their code are bound there under their names, as a fork would have
# them.

_CODE_PARTS = 6
"""Length of cloudpickle's instructions for what travels by its code: the last is a setter."""

_IN_WORKER: set[bool] = set()
_RECEIVED: dict[str, Any] = {}
"""What was bound, by its name."""


def receive_names() -> None:
    """From now on, bind in this process's `__main__` what arrives."""
    _IN_WORKER.add(True)


def has_received(value: Any) -> bool:
    """Whether `__main__` has this class or function because it arrived here."""
    return _RECEIVED.get(value.__qualname__.partition(".")[0]) is value


def _with_name(value: Any, instructions: Any) -> Any:
    """Instructions for pickle that also bind the object in a worker's `__main__`."""
    if (
        getattr(value, "__module__", None) != "__main__"
        or not isinstance(instructions, tuple)
        or len(instructions) != _CODE_PARTS
        or _look_up(value.__qualname__) is not value
    ):
        return instructions
    *making, state, list_items, dict_items, set_state = instructions
    # Bound by the setter of its state: only then is the object complete.
    return *making, (set_state, state), list_items, dict_items, _finish_and_bind


def _look_up(name: str) -> Any:
    try:
        return functools.reduce(getattr, name.split("."), sys.modules["__main__"])
    except AttributeError:
        return None


# Called by the pickle, which contains its name.
def _finish_and_bind(value: Any, setter_and_state: tuple[Callable[[Any, Any], Any], Any]) -> None:
    set_state, state = setter_and_state
    set_state(value, state)
    if _IN_WORKER and _look_up(value.__qualname__) is not value:
        _bind(value)


def _bind(value: Any) -> None:
    names = vars(sys.modules["__main__"])
    outer_name, *inner_names = value.__qualname__.split(".")
    # What a cell of this worker has defined under the name stays: it is the worker's own.
    if outer_name in names and names[outer_name] is not _RECEIVED.get(outer_name):
        return
    # Of a class inside of another one only the path is needed; the outer one replaces it.
    for inner_name in reversed(inner_names):
        value = types.SimpleNamespace(**{inner_name: value})
    names[outer_name] = _RECEIVED[outer_name] = value
