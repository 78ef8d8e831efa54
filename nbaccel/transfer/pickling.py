"""Python objects sent to another process, with their big blocks beside the pickle.

A function whose globals are the notebook's namespace gets the *receiver's* namespace as its
globals: what it reads is looked up there, when it runs. So does one that a worker's cell
defined, on its way to the notebook.

Functions that share a variable (`nonlocal`) share it on the other side: a closure's cell is made
empty first and filled when the function that holds it exists, which is also what ends the recursion
for a function that calls itself.
"""

from __future__ import annotations

import contextlib
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
from torch.nn.parallel import DistributedDataParallel

from nbaccel.base import torch_private
from nbaccel.transfer import arena, memfd
from nbaccel.transfer.free_names import globals_read

_READ_BYTES = 1 << 16  # up to here reading costs less than a mapping

ArenaTable = Mapping[str, memfd.Mapping]
"""The receiver's mappings of the arenas, by the key under which the sender names them."""


_NO_MODULES: Mapping[str, torch.nn.Module] = {}


class TooCostly(Exception):
    """Packing was given up: more than the allowed number of bytes went through the pickle."""


ModulePlace = tuple[str, str]  # key of a module, and the name of a part (`""`: itself)


@dataclass
class Sender:
    """What a pickling process knows about shared memory, and what it found while pickling."""

    stand_ins: Mapping[int, tuple[arena.Arena, int]] = field(default_factory=dict)
    """Device address of a storage → where its host copy lies."""
    namespace: Mapping[str, Any] | None = None  # functions with these globals get the receiver's
    find_place: Callable[[Any], ModulePlace | None] = lambda _: None
    """Finds tensors and modules that the receiver has, in a module with a key."""
    sources: dict[str, list[str]] = field(default_factory=dict)  # lines of cells that travel
    arenas: dict[str, arena.Arena] = field(default_factory=dict)
    modules: list[torch.nn.Module] = field(default_factory=list)  # each before its parts
    module_keys: set[str] = field(default_factory=set)  # keys of modules that the pickle refers to
    names: set[str] = field(default_factory=set)  # of the namespace, read by its functions
    shares: bool = False  # whether tensors in torch's shared memory stay shared with the receiver
    by_name: bool = False
    """Whether the receiver has the very same classes and functions in its `__main__`, and must get
    them and no copies: a forked worker's answer, or the notebook's `except MyError` would fail."""
    _cells: dict[int, tuple[types.CellType, _CellStandIn]] = field(default_factory=dict)
    """Each closure's cell with its stand-in; the cell is kept, so that its id stays its own."""

    def key(self, owner: arena.Arena) -> str:
        """Name an arena for the receiver."""
        self.arenas[owner.key] = owner
        return owner.key

    def reduce(self, value: Any) -> Any:
        """How to pickle an object between namespaces, or `NotImplemented`."""
        kind = type(value)
        if kind is types.FunctionType:
            return self._function(value) if value.__globals__ is self.namespace else NotImplemented
        if kind is _CellStandIn:
            return _empty_cell, ()
        if isinstance(value, (torch.Tensor, torch.nn.Module)):
            place = self.find_place(value)
            if place is not None:
                self.module_keys.add(place[0])
                return _known, place
        return NotImplemented

    def _function(self, function: types.FunctionType) -> Any:
        self.names |= globals_read(function.__code__) & function.__globals__.keys()
        cells = []
        contents = []
        for cell in function.__closure__ or ():
            _, stand_in = self._cells.setdefault(id(cell), (cell, _CellStandIn()))
            cells.append(stand_in)
            # An empty closure cell raises ValueError: the variable has no value yet.
            with contextlib.suppress(ValueError):
                contents.append((stand_in, cell.cell_contents))
        special_attributes = {name: getattr(function, name, None) for name in _SPECIAL_ATTRIBUTES}
        state = (contents, special_attributes, dict(function.__dict__))
        made_of = (function.__code__, function.__name__, tuple(cells))
        # The state has its own setter, because functions have no __setstate__.
        return _make_function, made_of, state, None, None, _finish_function


def pack(value: Any, sender: Sender) -> tuple[memfd.PackedObject, int]:
    """Put an object into a memory file."""
    return prepare(value, sender).write()


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
        with memfd.closed_on_error(fd):
            for span, block in zip(spans, blocks, strict=True):
                memfd.write_at(fd, block, span[0])
            memfd.write_at(fd, content, end)
        return packed, fd


def prepare(value: Any, sender: Sender, *, limit_bytes: int | None = None) -> PreparedObject:
    """Do what `pack` does, except for copying the big blocks."""
    blocks: list[pickle.PickleBuffer] = []
    stream = _MeteredStream(limit_bytes)
    _ValuePickler(stream, sender, blocks.append).dump(value)
    return PreparedObject(stream, blocks)


def unpack(
    packed: memfd.PackedObject,
    fd: int,
    arenas: ArenaTable,
    *,
    device: str = "cpu",
    namespace: dict[str, Any] | None = None,
    find_module: Callable[[str], torch.nn.Module] = _NO_MODULES.__getitem__,
) -> Any:
    """Open a payload, for a namespace that its functions read. Arrays view the file's mapping."""
    blocks: list[memoryview] = []
    if packed.nbytes <= _READ_BYTES and not packed.blocks:
        pickled: Any = os.pread(fd, packed.nbytes, 0)
    else:
        # Private: a payload goes to several ranks, and one's writes must not show in another.
        mapping = memfd.Mapping(fd, packed.nbytes, is_private=True)
        pickled = mapping.view(*packed.pickle)
        blocks = [mapping.view(*span) for span in packed.blocks]
    # A context variable, because functions that a pickle calls can be given nothing but its data.
    names = {} if namespace is None else namespace
    token = _CURRENT_RECEIVER.set(Receiver(arenas, device, names, find_module))
    try:
        return pickle.loads(pickled, buffers=blocks)
    finally:
        _CURRENT_RECEIVER.reset(token)


@dataclass(frozen=True)
class Receiver:
    """What a pickle refers to in the process that opens it; see `unpack`."""

    arenas: ArenaTable
    device: str
    namespace: dict[str, Any]
    find_module: Callable[[str], torch.nn.Module]


_CURRENT_RECEIVER: contextvars.ContextVar[Receiver] = contextvars.ContextVar("nbaccel-receiver")


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


class _ValuePickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(
        self, pickle_file: Any, sender: Sender, on_block: Callable[[pickle.PickleBuffer], Any]
    ) -> None:
        # cloudpickle's table is a ChainMap: a look-up in Python for every object of the model.
        self.dispatch_table = dict(cloudpickle.Pickler.dispatch_table)
        self.dispatch_table[types.CodeType] = _reduce_code
        # Earlier protocols have no blocks beside the pickle.
        super().__init__(pickle_file, protocol=5, buffer_callback=on_block)
        self._sender = sender
        # One tuple object per content: pickle writes the second occurrence as a reference.
        self._empty_tables: dict[tuple[str, ...], tuple[str, ...]] = {}

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind is weakref.ReferenceType:
            return _weak_reference, (value(),)
        if kind is types.FunctionType:
            _note_source(value, self._sender.sources)
        if self._sender.namespace is not None:
            reduced = self._sender.reduce(value)
            if reduced is not NotImplemented:
                return reduced
        reduced = self._memory(value, kind)
        if reduced is not NotImplemented:
            return reduced
        if isinstance(value, DistributedDataParallel):
            # It belongs to a process group, which only its own process has.
            return _wrapped_module, (value.module,)
        if isinstance(value, torch.nn.Module):
            self._sender.modules.append(value)
            return self._module(value)
        if isinstance(value, types.ModuleType):
            return _reduce_module(value)
        # cloudpickle has its own way with functions and classes only; asking it costs time.
        if not isinstance(value, (type, types.FunctionType)):
            return NotImplemented
        if self._sender.by_name:
            if _look_up(value.__qualname__) is value:
                return NotImplemented
            if isinstance(value, type) and "<locals>" in value.__qualname__:
                return _local_class, (id(value), value.__qualname__, dumps_with_lines(value))
        return _with_name(value, super().reducer_override(value))

    def _module(self, module: torch.nn.Module) -> Any:
        """Leave out the empty tables of hooks: pickling those takes longer than all the rest."""
        reduced: Any = module.__reduce_ex__(5)
        if len(reduced) < 3 or not isinstance(reduced[2], dict):
            return reduced
        make, args, state, *_ = reduced
        empty = tuple(name for name in _HOOK_TABLES if name in state and not state[name])
        empty = self._empty_tables.setdefault(empty, empty)
        filled = {name: value for name, value in state.items() if name not in empty}
        return make, args, (filled, empty), None, None, _finish_module

    def _memory(self, value: Any, kind: type) -> Any:
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
        self._sender.key(owner)
        slot = arena.Slot.of("", tensor, owner, address - owner.address)
        return _arena_tensor, (kind, tensor.requires_grad, *slot)

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
        block = pickle.PickleBuffer(raw.cpu().numpy().data)
        may_share = on_host and self._sender.shares
        if may_share and (file := torch_private.shared_file(storage)) is not None:
            # Workers are no children of this process, which could inherit it.
            status, path = os.fstat(file), f"/proc/{os.getpid()}/fd/{file}"
            return _shared_storage, (path, (status.st_dev, status.st_ino), nbytes, block)
        return _own_storage, (block, not on_host)


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


# What the pickle calls on the receiving side, by names that both sides must have.


def _typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.storage.TypedStorage:
    return torch.storage.TypedStorage(  # type: ignore[no-untyped-call]
        wrap_storage=storage, dtype=dtype, _internal=True
    )


def _arena_storage(key: str, start: int, nbytes: int, to_device: bool) -> torch.UntypedStorage:
    mapping = _CURRENT_RECEIVER.get().arenas[key]
    return _placed(arena.storage_at(mapping, start, nbytes), to_device)


def _arena_tensor(kind: type[torch.Tensor], requires_grad: bool, *slot: Any) -> torch.Tensor:
    place = arena.Slot(*slot)
    tensor = place.view(_CURRENT_RECEIVER.get().arenas[place.arena])
    if kind is torch.nn.Parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)


def _finish_module(module: torch.nn.Module, state: tuple[dict[str, Any], tuple[str, ...]]) -> None:
    filled, empty = state
    restore: Any = module.__setstate__
    restore({**filled, **{name: OrderedDict() for name in empty}})


def _wrapped_module(module: torch.nn.Module) -> torch.nn.Module:
    return module


def _weak_reference(target: Any) -> Any:
    """A weak reference; to something that is gone at once, where there is nothing to name."""
    # torch's schedulers hold one to their optimizer.
    return weakref.ref(set() if target is None else target)


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
    return _placed(torch.frombuffer(block, dtype=torch.uint8).untyped_storage(), to_device)


def _shared_storage(
    path: str, identity: tuple[int, int], nbytes: int, block: Any
) -> torch.UntypedStorage:
    """The sender's own memory, as a fork would inherit it; on another host a copy of it."""
    with contextlib.suppress(OSError), open(path, "r+b", buffering=0) as file:
        status = os.fstat(file.fileno())
        if (status.st_dev, status.st_ino) == identity:
            return torch_private.map_shared_file(file.fileno(), nbytes)
    return _own_storage(block, False)


def _placed(storage: torch.UntypedStorage, to_device: bool) -> torch.UntypedStorage:
    device = _CURRENT_RECEIVER.get().device
    if not to_device or torch.device(device).type == "cpu":
        return storage
    return torch.empty(0, dtype=torch.uint8).set_(storage).to(device).untyped_storage()


_SPECIAL_ATTRIBUTES = (
    "__defaults__",
    "__kwdefaults__",
    "__module__",
    "__qualname__",
    "__doc__",
    "__annotations__",
    "__type_params__",
)


class _CellStandIn:
    """Stands for a closure's cell while pickling, so that it can be made before it is filled."""


def travels_by_value(definition: type | types.FunctionType) -> bool:
    """Whether it is pickled with its code, because no import leads to it: one of a cell."""
    module = getattr(definition, "__module__", None)
    name = definition.__qualname__
    is_inner = "<locals>" in name or name == "<lambda>"
    return module == "__main__" or module not in sys.modules or is_inner


def _empty_cell() -> types.CellType:
    return types.CellType()


def _make_function(
    code: types.CodeType, name: str, cells: tuple[types.CellType, ...]
) -> types.FunctionType:
    return types.FunctionType(code, _CURRENT_RECEIVER.get().namespace, name, None, cells or None)


def _finish_function(
    function: types.FunctionType,
    state: tuple[list[tuple[types.CellType, Any]], dict[str, Any], dict[str, Any]],
) -> None:
    contents, special_attributes, attributes = state
    for cell, value in contents:
        cell.cell_contents = value
    for name, value in special_attributes.items():
        # __type_params__ exists from Python 3.12 on.
        if hasattr(function, name):
            setattr(function, name, value)
    function.__dict__.update(attributes)


def _known(key: str, path: str) -> Any:
    module = _CURRENT_RECEIVER.get().find_module(key)
    return functools.reduce(getattr, path.split(".") if path else (), module)


# ------------------------------------------------------------------------- names in `__main__`

# Every pickler but cloudpickle writes a class as a module and a name: `torch.save`, the collectives
# of objects, the checkpoints of libraries. So classes and functions that arrive by their code are
# bound in a worker's `__main__` under their names, as a fork would have them.

_CODE_PARTS = 6  # of cloudpickle's instructions for code; the last is a setter

_IN_WORKER: set[bool] = set()
_RECEIVED: dict[str, Any] = {}


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
