"""Python objects sent to another process, with their big blocks beside the pickle.

What cannot be pickled is named as the user would write it.
"""

from __future__ import annotations

import contextlib
import contextvars
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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import torch

from nbaccel.base import torch_private
from nbaccel.transfer import arena, main_names, memfd

_BLOCK_ALIGNMENT = 64  # bytes: tensors view the blocks in place, so they need torch's alignment

WEAK_TYPES = (weakref.ProxyType, weakref.CallableProxyType, weakref.ReferenceType)
"""Types of weak references, to be asked for by ``type``: ``isinstance`` may raise."""

ArenaTable = Mapping[str, memfd.Mapping]
"""The receiver's mappings of the arenas, by the key under which the sender names them."""


class TooCostly(Exception):
    """Packing was given up: more than the allowed number of bytes went through the pickle."""


@dataclass
class Sender:
    """What a pickling process knows about shared memory, and what it found while pickling."""

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
        return cls(stand_ins=stand_ins or {}, sources={}, arenas={})

    def key(self, tensor_arena: arena.Arena) -> str:
        """Name an arena for the receiver."""
        self.arenas[tensor_arena.key] = tensor_arena
        return tensor_arena.key


def pack(
    pickled_object: Any, pickle_sender: Sender, *, limit_bytes: int | None = None
) -> tuple[memfd.PackedObject, int]:
    """Put an object into a memory file."""
    return prepare(pickled_object, pickle_sender, limit_bytes=limit_bytes).write()


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
        memory_blocks = [block.raw() for block in self.blocks]
        pickle_bytes = self.stream.getbuffer()
        block_spans = []
        next_byte = 0
        for memory_block in memory_blocks:
            block_spans.append((next_byte, next_byte + memory_block.nbytes))
            next_byte += -(-memory_block.nbytes // _BLOCK_ALIGNMENT) * _BLOCK_ALIGNMENT
        packed_object = memfd.PackedObject(
            nbytes=next_byte + pickle_bytes.nbytes,
            blocks=tuple(block_spans),
            pickle=(next_byte, next_byte + pickle_bytes.nbytes),
        )
        file_descriptor = memfd.create_file("payload", packed_object.nbytes)
        try:
            for byte_span, memory_block in zip(block_spans, memory_blocks, strict=True):
                memfd.write_at(file_descriptor, memory_block, byte_span[0])
            memfd.write_at(file_descriptor, pickle_bytes, next_byte)
        except BaseException:  # an interrupt must not leak the descriptor either
            os.close(file_descriptor)
            raise
        return packed_object, file_descriptor


def prepare(
    pickled_object: Any, pickle_sender: Sender, *, limit_bytes: int | None = None
) -> PreparedObject:
    """Do what `pack` does, except for copying the big blocks."""
    blocks: list[pickle.PickleBuffer] = []
    pickle_stream = _MeteredStream(limit_bytes)
    dump(pickled_object, pickle_sender, pickle_stream, blocks.append)
    return PreparedObject(pickle_stream, blocks)


def dump(
    pickled_object: Any,
    pickle_sender: Sender,
    pickle_stream: Any,
    on_block: Callable[[pickle.PickleBuffer], Any],
) -> None:
    """Pickle as `pack` does, but into anything that has a `write`; big blocks go to `on_block`."""
    _ValuePickler(pickle_stream, pickle_sender, on_block).dump(pickled_object)


def pack_plain(pickled_object: Any, pickle_sender: Sender) -> tuple[memfd.PackedObject, int]:
    """Like `pack`, but classes and functions travel by name.

    For a forked child's answer: its parent has the very same classes, and must get them back, not
    copies of them, or the notebook's `except MyError` would not match.
    """
    blocks: list[pickle.PickleBuffer] = []
    pickle_stream = io.BytesIO()
    _PlainPickler(pickle_stream, pickle_sender, blocks.append).dump(pickled_object)
    return PreparedObject(pickle_stream, blocks).write()


def unpack(
    packed_object: memfd.PackedObject,
    file_descriptor: int,
    arena_table: ArenaTable,
    *,
    target_device: str = "cpu",
    namespace: dict[str, Any] | None = None,
    find_module: Callable[[str], torch.nn.Module] | None = None,
) -> Any:
    """Open a payload. Arrays and tensors in it view a private mapping of the file.

    Functions of a cell read what they read from the namespace; modules that the pickle names by a
    key are looked up.
    """
    # Private: a payload goes to several ranks, and one rank's writes must not show in another.
    file_mapping = memfd.Mapping(file_descriptor, packed_object.nbytes, is_private=True)
    # A context variable, because functions that a pickle calls can be given nothing but its data.
    context_token = _CURRENT_RECEIVER.set(
        Receiver(arena_table, target_device, {} if namespace is None else namespace, find_module)
    )
    try:
        return pickle.loads(
            file_mapping.view(*packed_object.pickle),
            buffers=[file_mapping.view(*byte_span) for byte_span in packed_object.blocks],
        )
    finally:
        _CURRENT_RECEIVER.reset(context_token)


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

    def write(self, pickle_bytes: Any) -> int:
        written_bytes = super().write(pickle_bytes)
        # Checked while pickling: a data set of gigabytes must not be pickled before it is given up.
        if self._limit_bytes is not None and self.tell() > self._limit_bytes:
            raise TooCostly(self.tell())
        return written_bytes


class _StorageReducer:
    """What both picklers do with tensor storages."""

    def __init__(self, pickle_sender: Sender) -> None:
        self._sender = pickle_sender
        self._find = arena.Finder()

    def reduce(self, pickled_object: Any) -> Any:
        object_type = type(pickled_object)
        if object_type is torch.storage.TypedStorage:
            return _typed_storage, (
                torch_private.untyped_storage(pickled_object),
                pickled_object.dtype,
            )
        if object_type is torch.UntypedStorage and pickled_object.device.type != "meta":
            return self._untyped(pickled_object)
        if (
            object_type in _PLAIN_TENSOR_TYPES
            and pickled_object.device.type == "cpu"
            and _is_bare(pickled_object)
        ):
            return self._tensor(pickled_object, object_type)
        return NotImplemented

    def _tensor(self, bare_tensor: torch.Tensor, object_type: type) -> Any:
        """In one step what torch takes four for: a model has hundreds of them."""
        tensor_storage = bare_tensor.untyped_storage()
        num_bytes = tensor_storage.nbytes()
        first_address = tensor_storage.data_ptr()
        tensor_arena = self._find(first_address, num_bytes) if num_bytes else None
        # Left to torch's own pickling, which calls back for the storage.
        if tensor_arena is None:
            return NotImplemented
        arena_place = (
            self._sender.key(tensor_arena),
            first_address - tensor_arena.address,
            num_bytes,
        )
        tensor_geometry = (
            bare_tensor.storage_offset(),
            tuple(bare_tensor.shape),
            bare_tensor.stride(),
        )
        return _arena_tensor, (
            object_type,
            *arena_place,
            bare_tensor.dtype,
            *tensor_geometry,
            bare_tensor.requires_grad,
        )

    def _untyped(self, tensor_storage: torch.UntypedStorage) -> Any:
        num_bytes = tensor_storage.nbytes()
        first_address = tensor_storage.data_ptr()
        on_host = tensor_storage.device.type == "cpu"
        tensor_arena = self._find(first_address, num_bytes) if on_host and num_bytes else None
        if tensor_arena is not None:
            return _arena_storage, (
                self._sender.key(tensor_arena),
                first_address - tensor_arena.address,
                num_bytes,
                False,
            )
        if first_address in self._sender.stand_ins and not on_host:
            tensor_arena, first_byte = self._sender.stand_ins[first_address]
            return _arena_storage, (self._sender.key(tensor_arena), first_byte, num_bytes, True)
        # An empty storage has no buffer to view.
        if num_bytes == 0:
            return torch.UntypedStorage, (0,)
        raw_bytes = torch.empty(0, dtype=torch.uint8, device=tensor_storage.device).set_(
            tensor_storage
        )
        return _own_storage, (pickle.PickleBuffer(raw_bytes.cpu().numpy().data), not on_host)


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


def _is_ordinary(object_type: type[torch.nn.Module]) -> bool:
    """Whether such modules are pickled as most are: their attributes and nothing else."""
    return (
        object_type.__setstate__ is torch.nn.Module.__setstate__
        and object_type.__reduce_ex__ is object.__reduce_ex__
        and object_type.__reduce__ is object.__reduce__
        and getattr(object_type, "__getstate__", None) is _MODULE_GETSTATE
        and not hasattr(object_type, "__getnewargs_ex__")
        and not hasattr(object_type, "__getnewargs__")
        and object_type.__new__ is object.__new__
    )


class _ValuePickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(
        self,
        pickle_file: Any,
        pickle_sender: Sender,
        on_block: Callable[[pickle.PickleBuffer], Any],
    ) -> None:
        # cloudpickle's table is a ChainMap: a look-up in Python for every object of the model.
        self.dispatch_table = dict(cloudpickle.Pickler.dispatch_table)
        self.dispatch_table[types.CodeType] = _reduce_code
        # Earlier protocols have no blocks beside the pickle.
        super().__init__(pickle_file, protocol=5, buffer_callback=on_block)
        self._storages = _StorageReducer(pickle_sender)
        self._sender = pickle_sender
        self._first = pickle_sender.reduce
        # One tuple object per content: pickle writes the second occurrence as a reference.
        self._shapes: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._ordinary: dict[type, bool] = {}

    def reducer_override(self, pickled_object: Any) -> Any:
        if type(pickled_object) in WEAK_TYPES:
            return _reduce_weak(pickled_object)
        if _is_bar(type(pickled_object)):
            return _reduce_bar(pickled_object)
        if self._first is not None:
            reduced_form = self._first(pickled_object)
            if reduced_form is not NotImplemented:
                return reduced_form
        reduced_form = self._storages.reduce(pickled_object)
        if reduced_form is not NotImplemented:
            return reduced_form
        if isinstance(pickled_object, types.FunctionType):
            note_source(pickled_object, self._sender.sources)
        elif isinstance(pickled_object, torch.nn.Module):
            self._sender.modules.append(pickled_object)
            object_type = type(pickled_object)
            if object_type not in self._ordinary:
                self._ordinary[object_type] = _is_ordinary(object_type)
            return self._module(pickled_object) if self._ordinary[object_type] else NotImplemented
        elif isinstance(pickled_object, types.ModuleType):
            return _reduce_module(pickled_object)
        elif not isinstance(pickled_object, type):
            # cloudpickle has its own way with functions and classes only; asking it costs time.
            return NotImplemented
        return main_names.with_name(pickled_object, super().reducer_override(pickled_object))

    def _module(self, whole_module: torch.nn.Module) -> Any:
        """Leave out the empty tables of hooks: pickling those takes longer than all the rest."""
        state = dict(
            vars(whole_module) if _MODULE_GETSTATE is None else _MODULE_GETSTATE(whole_module)
        )
        empty_hooks = tuple(
            attribute_name
            for attribute_name in _HOOK_TABLES
            if attribute_name in state and not state[attribute_name]
        )
        for attribute_name in empty_hooks:
            del state[attribute_name]
        return (
            _make_module,
            (type(whole_module), self._shapes.setdefault(empty_hooks, empty_hooks)),
            state,
        )


class _PlainPickler(pickle.Pickler):
    def __init__(
        self,
        pickle_file: Any,
        pickle_sender: Sender,
        on_block: Callable[[pickle.PickleBuffer], Any],
    ) -> None:
        super().__init__(pickle_file, protocol=5, buffer_callback=on_block)
        self._storages = _StorageReducer(pickle_sender)

    def reducer_override(self, pickled_object: Any) -> Any:
        if isinstance(pickled_object, type) and "<locals>" in pickled_object.__qualname__:
            # No name leads to it; but a fork has it where its parent has it.
            return _local_class, (
                id(pickled_object),
                pickled_object.__qualname__,
                dumps_with_lines(pickled_object),
            )
        return self._storages.reduce(pickled_object)


def dumps_with_lines(pickled_object: Any) -> bytes:
    """What cloudpickle writes of an object, with the files that its code comes from."""
    written = io.BytesIO()
    _PicklerWithLines(written).dump(pickled_object)
    return written.getvalue()


def _reduce_code(code_object: types.CodeType) -> tuple[Any, ...]:
    # From 3.1.3 on cloudpickle replaces the file's name, by which errors show the line of a cell.
    # Both sides are one Python, as marshal demands; its format 2 gives equal bytes for equal code.
    return marshal.loads, (marshal.dumps(code_object, 2),)


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


def note_source(cell_function: types.FunctionType, cell_sources: dict[str, list[str]]) -> None:
    """Keep the lines of the cell a function came from: the worker's tracebacks need them."""
    file_name = cell_function.__code__.co_filename
    if (
        file_name not in cell_sources
        and file_name in linecache.cache
        and len(linecache.cache[file_name]) == 4
    ):
        modification_time = linecache.cache[file_name][1]  # type: ignore[misc]
        # None: there is no file that a worker could read; it is a cell, an exec or a doctest.
        if modification_time is None:
            cell_sources[file_name] = linecache.getlines(file_name)


# What the pickle calls on the receiving side. The pickle contains their names, so both sides must
# have the same ones.


def _typed_storage(
    untyped_storage: torch.UntypedStorage, element_type: torch.dtype
) -> torch.storage.TypedStorage:
    return torch.storage.TypedStorage(  # type: ignore[no-untyped-call]
        wrap_storage=untyped_storage, dtype=element_type, _internal=True
    )


def _arena_storage(
    key: str, first_byte: int, num_bytes: int, to_device: bool
) -> torch.UntypedStorage:
    receiver = _CURRENT_RECEIVER.get()
    tensor_storage = arena.storage_at(receiver.arenas[key], first_byte, num_bytes)
    return _storage_on_device(tensor_storage, receiver.device) if to_device else tensor_storage


def _arena_tensor(
    object_type: type[torch.Tensor],
    key: str,
    first_byte: int,
    num_bytes: int,
    element_type: torch.dtype,
    element_offset: int,
    shape: tuple[int, ...],
    tensor_strides: tuple[int, ...],
    requires_grad: bool,
) -> torch.Tensor:
    tensor_storage = arena.storage_at(_CURRENT_RECEIVER.get().arenas[key], first_byte, num_bytes)
    bare_tensor = torch.empty(0, dtype=element_type).set_(
        tensor_storage, element_offset, shape, tensor_strides
    )
    if object_type is torch.nn.Parameter:
        return torch.nn.Parameter(bare_tensor, requires_grad)
    return bare_tensor.requires_grad_(requires_grad)


def _make_module(
    object_type: type[torch.nn.Module], empty_hooks: tuple[str, ...]
) -> torch.nn.Module:
    whole_module = object_type.__new__(object_type)
    vars(whole_module).update((attribute_name, OrderedDict()) for attribute_name in empty_hooks)
    return whole_module


def _local_class(first_address: int, qualified_name: str, pickled_class: bytes) -> type:
    """The class of that name at that address; a copy, if it was made after the fork."""
    # A forked child has its parent's addresses, so the id finds the class. The name is compared
    # too, because the address may have been given to another object since.
    for known_object in gc.get_objects():
        if (
            id(known_object) == first_address
            and isinstance(known_object, type)
            and known_object.__qualname__ == qualified_name
        ):
            return known_object
    unpickled_class: type = pickle.loads(pickled_class)
    return unpickled_class


def _own_storage(block: Any, to_device: bool) -> torch.UntypedStorage:
    tensor_storage = torch.frombuffer(block, dtype=torch.uint8).untyped_storage()
    return (
        _storage_on_device(tensor_storage, _CURRENT_RECEIVER.get().device)
        if to_device
        else tensor_storage
    )


def _storage_on_device(
    tensor_storage: torch.UntypedStorage, target_device: str
) -> torch.UntypedStorage:
    if torch.device(target_device).type == "cpu":
        return tensor_storage
    raw_bytes = torch.empty(0, dtype=torch.uint8).set_(tensor_storage)
    return raw_bytes.to(target_device).untyped_storage()


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


def _is_bar(object_type: type) -> bool:
    """Whether objects of a type are bars of tqdm."""
    module = sys.modules.get("tqdm.std")
    return module is not None and issubclass(object_type, module.tqdm)


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


_MAX_SEARCH_DEPTH = 6  # each level pickles all parts again

Test = Callable[[Any], bool]


def find_culprit(cell_function: Callable[..., Any], call_arguments: tuple[Any, ...]) -> str:
    """The innermost object that does not pickle, as `args[1]['lock'] (a _thread.lock)`."""
    function_name = getattr(cell_function, "__name__", "the function")
    for source_path, held_value in [
        *_of_function(cell_function, function_name),
        *_items_of(call_arguments, "args"),
    ]:
        if not _can_pickle(held_value):
            return find_in(held_value, source_path)
    return _with_type(function_name, cell_function)


def find_in(held_value: Any, source_path: str, *, can_pickle: Test | None = None) -> str:
    """The innermost part of a value that does not pickle, as `path['lock'] (a _thread.lock)`."""
    return _innermost_culprit(held_value, source_path, _MAX_SEARCH_DEPTH, can_pickle or _can_pickle)


def _innermost_culprit(held_value: Any, source_path: str, depth_left: int, can_pickle: Test) -> str:
    for inner_path, inner in _parts_of(held_value, source_path) if depth_left else ():
        if not can_pickle(inner):
            return _innermost_culprit(inner, inner_path, depth_left - 1, can_pickle)
    return _with_type(source_path, held_value)


def _with_type(source_path: str, held_value: Any) -> str:
    object_type = type(held_value)
    plain_type = object_type.__module__ in ("builtins", "__main__")
    type_name = object_type.__qualname__
    return (
        f"{source_path} (a {type_name if plain_type else f'{object_type.__module__}.{type_name}'})"
    )


def _parts_of(held_value: Any, source_path: str) -> Iterator[tuple[str, Any]]:
    if type(held_value) in WEAK_TYPES:
        return
    if isinstance(held_value, dict):
        yield from (
            (f"{source_path}[{key!r}]", held_value) for key, held_value in held_value.items()
        )
    elif isinstance(held_value, (list, tuple)):
        yield from _items_of(held_value, source_path)
    elif callable(held_value) and hasattr(held_value, "__code__"):
        yield from _of_function(held_value, source_path)
    elif hasattr(held_value, "__dict__"):
        yield from (
            (f"{source_path}.{key}", held_value) for key, held_value in vars(held_value).items()
        )


def _items_of(values: Any, source_path: str) -> Iterator[tuple[str, Any]]:
    yield from (
        (f"{source_path}[{position}]", held_value) for position, held_value in enumerate(values)
    )


def _of_function(cell_function: Any, source_path: str) -> Iterator[tuple[str, Any]]:
    code_object = getattr(cell_function, "__code__", None)
    for variable_name, cell in zip(
        getattr(code_object, "co_freevars", ()),
        getattr(cell_function, "__closure__", None) or (),
        strict=False,
    ):
        # An empty closure cell raises ValueError: the variable has no value yet.
        with contextlib.suppress(ValueError):
            yield f"{variable_name} (which {source_path} closes over)", cell.cell_contents
    outer_variables = getattr(cell_function, "__globals__", {})
    for variable_name in getattr(code_object, "co_names", ()):
        if variable_name in outer_variables:
            yield (
                f"{variable_name} (a global that {source_path} uses)",
                outer_variables[variable_name],
            )


def _can_pickle(held_value: Any) -> bool:
    try:
        cloudpickle.Pickler(io.BytesIO(), protocol=5, buffer_callback=_drop_output).dump(held_value)
    except Exception:  # whatever is raised, it does not pickle
        return False
    return True


def _drop_output(block: pickle.PickleBuffer) -> None:
    block.release()
