"""The arena: one memory file that holds the tensors of all modules a launch shares.

    notebook process                 memory file                  worker (one of N)
    module.weight ──► shared map ──► [ weight | bias | … ] ◄── private map ◄── module.weight
                                                                └► pages it writes are its own

[Note: storages, not tensors] The unit that moves is the storage, because that is what tied weights,
views, transposed and expanded parameters have in common: move the storage once, then point every
tensor at it with the geometry it had. `Parameter` objects stay the same objects (only their `.data`
changes), so an optimizer built in the notebook still steps the right ones. What does not survive
the first move is a view taken earlier (`w = model.weight.data[0]`): it keeps the old memory.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from nbaccel.errors import ModelNotShareable
from nbaccel.launch.sharing import memory
from nbaccel.units import first_few

PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)
"""Types with memory of their own: a DTensor, for one, has no address to ask for."""

_ALIGN = 64  # bytes: a cache line, and enough for every vector instruction torch uses


class Arena(memory.Mapping):
    """A memory file mapped shared into this process, with the tensors that live in it.

    It stays as long as one of its tensors does. Its `key` names no other arena of this process.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = fd
        self.key = f"arena{next(_COUNT)}"
        super().__init__(fd, nbytes, private=False)
        _LIVING.add(self)

    def __del__(self) -> None:
        super().__del__()
        os.close(self.fd)


# The number of an address would name two arenas in the life of a process; a count does not.
_COUNT = itertools.count()

# Which mapping owns an address is a fact of this process's memory, like a heap's own table: it
# outlives a launch because the notebook's model does. Weak, so that it keeps nothing alive.
_LIVING: weakref.WeakSet[Arena] = weakref.WeakSet()
_LOCK = threading.Lock()


def find(address: int, nbytes: int) -> Arena | None:
    """The arena of this process that holds these bytes, if any."""
    for arena in tuple(_LIVING):
        if arena.contains(address, nbytes):
            return arena
    return None


class Finder:
    """`find` for many addresses in a row, which mostly lie in the same arena."""

    def __init__(self) -> None:
        self._last: Arena | None = None

    def __call__(self, address: int, nbytes: int) -> Arena | None:
        """The arena of this process that holds these bytes, if any."""
        if self._last is None or not self._last.contains(address, nbytes):
            self._last = find(address, nbytes)
        return self._last

    def home_of(self, storage: torch.UntypedStorage) -> Arena | None:
        """The arena that a storage lies in, if any."""
        on_host = storage.device.type == "cpu"
        return self(storage.data_ptr(), storage.nbytes()) if on_host else None


def living() -> list[Arena]:
    """Every arena of this process."""
    return list(_LIVING)


def forget() -> None:
    """Treat no memory as shared any more: for a forked child, whose arenas have become private."""
    _LIVING.clear()


def storage_at(mapping: memory.Mapping, start: int, nbytes: int) -> torch.UntypedStorage:
    """Bytes `[start, start + nbytes)` of a mapping as a storage that keeps the mapping alive."""
    if nbytes == 0:
        return torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
    raw = torch.frombuffer(mapping.bytes(), dtype=torch.uint8, count=nbytes, offset=start)
    return raw.untyped_storage()


class Slot(NamedTuple):
    """Where one parameter or buffer of a module lives: enough to rebuild a view of it.

    A tuple, because hundreds of them travel with a model: a dataclass takes four times as long.
    """

    name: str
    """Dotted name in the module, as `named_parameters` gives it."""
    start: int
    """First byte of its storage in the arena."""
    nbytes: int
    """Size of that storage in bytes."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """Elements from the start of the storage to the tensor's first one."""

    def view(self, mapping: memory.Mapping) -> torch.Tensor:
        """This tensor's bytes in a mapping of the arena, as a tensor of `shape`."""
        storage = storage_at(mapping, self.start, self.nbytes)
        empty = torch.empty(0, dtype=self.dtype)
        return empty.set_(storage, self.offset, self.shape, self.stride)


def version(module: nn.Module) -> int:
    """Grows whenever one of its tensors is written to, by what torch counts as writing."""
    return sum(t._version for _, t in named_tensors(module) if not t.is_inference())


def stayed(tensor: torch.Tensor, slot: Slot, mapping: memory.Mapping) -> bool:
    """Whether the tensor still is the very view of the arena that the slot describes."""
    return (
        tensor.device.type == "cpu"
        and type(tensor) in PLAIN
        and tensor.dtype == slot.dtype
        and tensor.stride() == slot.stride
        and tensor.data_ptr() == mapping.address + slot.start + slot.offset * tensor.element_size()
    )


@dataclass(frozen=True, kw_only=True)
class Shared:
    """A module of the notebook that workers get without a copy."""

    path: str
    """How the user would write it: `args[0]`, `args[1]['teacher']`."""
    module: nn.Module
    slots: tuple[tuple[Arena, Slot], ...]
    """Every parameter and buffer with its arena."""


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """All modules of one launch, and where the host copies of device-resident storages lie."""

    modules: tuple[Shared, ...] = ()
    stand_ins: dict[int, tuple[Arena, int]] = field(default_factory=dict)
    """Device address of a storage → arena and first byte of its host copy."""

    def joined(self, other: Sharing) -> Sharing:
        """The modules of both."""
        return Sharing(
            modules=(*self.modules, *other.modules), stand_ins=self.stand_ins | other.stand_ins
        )

    def arenas(self) -> list[Arena]:
        """Every arena that holds a tensor of these modules, once."""
        return list({id(arena): arena for m in self.modules for arena, _ in m.slots}.values())


@dataclass
class _Span:
    """The part of one storage that the modules use."""

    storage: torch.UntypedStorage
    low: int
    high: int
    tensors: list[torch.Tensor] = field(default_factory=list)
    start: int = 0

    @property
    def nbytes(self) -> int:
        return self.high - self.low

    def has_other_views(self) -> bool:
        """Whether tensors or arrays beside the modules' own lie in this storage on the host."""
        count = getattr(torch._C, "_storage_Use_Count", None)  # no public way to ask (torch 2.13)
        if count is None or self.storage.device.type != "cpu":
            return False
        own = len({id(tensor) for tensor in self.tensors})
        return bool(count(self.storage._cdata) > own + 1)  # `self.storage` is one itself

    def raw(self) -> torch.Tensor:
        """The bytes of the span, where they are now, as a uint8 tensor of shape `[nbytes]`."""
        empty = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        return empty.set_(self.storage, self.low, (self.nbytes,), (1,))


def share(modules: Sequence[tuple[str, nn.Module]]) -> Sharing:
    """Move the modules' tensors into an arena, unless they live in one already.

    Tensors on an accelerator stay there; workers get a host copy of them.

    Args:
        modules: Each module with the path under which the user passed it.

    Raises:
        ModelNotShareable: If a tensor has no memory that could be shared (meta, not yet
            initialised, sharded away) or a layout without one (sparse, quantized, a subclass).
            Nothing has been moved then.
    """
    refused = [line for path, module in modules for line in _refusals(path, module)]
    if refused:
        raise ModelNotShareable("The model cannot be handed to workers:\n" + "\n".join(refused))
    with _LOCK, torch.no_grad():
        stand_ins, viewed = _move(modules)
    if viewed:
        sys.stderr.write(_stale(modules, viewed))
    return Sharing(
        modules=tuple(_record(path, module, stand_ins) for path, module in modules),
        stand_ins=stand_ins,
    )


def restock(sharing: Sharing) -> None:
    """Bring the host copies of device-resident tensors up to date, for workers to read."""
    with torch.no_grad():
        for tensor, copy in _on_devices(sharing):
            copy.copy_(tensor)


def refresh_devices(sharing: Sharing, paths_left_out: Collection[str] = ()) -> None:
    """Copy what workers put into the host copies to the tensors on this process's devices."""
    for tensor, copy in _on_devices(sharing, paths_left_out):
        tensor.data.copy_(copy)


def _on_devices(
    sharing: Sharing, paths_left_out: Collection[str] = ()
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for shared in sharing.modules if sharing.stand_ins else ():
        tensors = dict(named_tensors(shared.module)) if shared.path not in paths_left_out else {}
        for home, slot in shared.slots if tensors else ():
            if tensors[slot.name].device.type != "cpu":
                yield tensors[slot.name], slot.view(home)


def named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and buffer under every name it has (tied ones more than once)."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _refusals(path: str, module: nn.Module) -> Iterator[str]:
    for name, tensor in named_tensors(module):
        reason = _why_not(tensor)
        if reason:
            yield f"  {path}.{name} ({type(module).__name__}): {reason}"
    for name, tensor in _emptied(module):
        yield (
            f"  {path}.{name} ({type(module).__name__}): is an empty parameter of shape "
            f"{tuple(tensor.shape)}, like a placeholder whose values are elsewhere (ZeRO-3, FSDP). "
            "Gather it first."
        )


def _why_not(tensor: torch.Tensor) -> str | None:
    if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
        return (
            "a lazy parameter without a shape yet. Run one batch through the model first, "
            "so that it gets one."
        )
    if tensor.device.type == "meta":
        return (
            f"is on the meta device: it has shape {tuple(tensor.shape)} but no values. Fill it "
            "first (model.to_empty(device='cpu'), load weights), or build it inside the function."
        )
    if type(tensor) not in PLAIN:
        return (
            f"is a {type(tensor).__name__}, whose values are spread over other tensors or "
            "processes. Unwrap it to a plain tensor, or build the model inside the function."
        )
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return (
            f"has layout {tensor.layout} and dtype {tensor.dtype}, not one block of memory. "
            "Build the model inside the function and load its state_dict there."
        )
    if tensor.is_conj() or tensor.is_neg():
        return (
            "is a lazily conjugated or negated view, not values of its own. Call .resolve_conj() "
            "or .resolve_neg() on it first."
        )
    return None


def _emptied(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Empty parameters whose values seem to be elsewhere.

    One among others is a known idiom (`self.device_of = nn.Parameter(torch.empty(0))`, a layer of
    no outputs). A library that partitions a model leaves most of its parameters empty, and
    DeepSpeed gives each of them a `ds_id`.
    """
    named = module.named_parameters()
    parameters = [(n, p) for n, p in named if not isinstance(p, UninitializedParameter)]
    empty = [(name, p) for name, p in parameters if p.numel() == 0]
    if any(hasattr(p, "ds_id") for _, p in empty) or len(empty) > max(1, len(parameters) // 2):
        yield from empty


def _move(
    modules: Sequence[tuple[str, nn.Module]],
) -> tuple[dict[int, tuple[Arena, int]], set[int]]:
    """Move every storage that is not in an arena yet.

    Returns:
        The stand-ins of device storages, and the ids of tensors whose old memory others view, too.
    """
    unique = {id(t): t for _, module in modules for _, t in named_tensors(module)}
    spans = _spans(unique.values())
    size = 0
    for span in spans:
        span.start = size
        size += -(-span.nbytes // _ALIGN) * _ALIGN
    if not spans:
        return {}, set()
    viewed = {id(tensor) for span in spans if span.has_other_views() for tensor in span.tensors}
    arena = Arena(memory.create_file("arena", size), size)
    stand_ins: dict[int, tuple[Arena, int]] = {}
    for span in spans:
        # pwrite, not copy_: no page fault per page, and no OpenMP pool started in the notebook.
        memory.write_at(arena.fd, memoryview(span.raw().cpu().numpy().data), span.start)
        if span.storage.device.type == "cpu":
            _point(arena, span)
        else:
            stand_ins[span.storage.data_ptr()] = (arena, span.start)
    return stand_ins, viewed


def _stale(modules: Sequence[tuple[str, nn.Module]], viewed: Collection[int]) -> str:
    """The line about tensors and arrays that were taken from a model before it was moved."""
    names = [
        f"{path}.{name}"
        for path, module in modules
        for name, tensor in named_tensors(module)
        if id(tensor) in viewed
    ]
    return (
        f"nbaccel: {first_few(names, 2)} moved to shared memory, and something else has a "
        "view of the old memory: a state_dict(), a slice or a NumPy array taken earlier. It keeps "
        "the values of now and does not follow the model. Take it again, or .clone() what is to "
        "stay.\n"
    )


def _spans(tensors: Iterable[torch.Tensor]) -> list[_Span]:
    spans: dict[int, _Span] = {}
    finder = Finder()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if tensor.numel() == 0 or finder.home_of(storage):
            continue
        low, high = _extent(tensor)
        if storage.device.type != "cpu":
            low, high = 0, storage.nbytes()
        span = spans.setdefault(storage.data_ptr(), _Span(storage, low, high))
        span.low, span.high = min(span.low, low), max(span.high, high)
        span.tensors.append(tensor)
    return list(spans.values())


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First and one-past-last byte of the storage that the tensor reaches."""
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    item = tensor.element_size()
    low = int(tensor.storage_offset()) * item
    # Rounded down so that tensors of another dtype in the same storage keep whole offsets.
    return low // _ALIGN * _ALIGN, low + (reach + 1) * item


def _point(arena: Arena, span: _Span) -> None:
    storage = storage_at(arena, span.start, span.nbytes)
    for tensor in span.tensors:
        offset = tensor.storage_offset() - span.low // tensor.element_size()
        empty = torch.empty(0, dtype=tensor.dtype)
        tensor.data = empty.set_(storage, offset, tensor.shape, tensor.stride())


def _record(path: str, module: nn.Module, stand_ins: dict[int, tuple[Arena, int]]) -> Shared:
    slots = []
    finder = Finder()
    for name, tensor in named_tensors(module):
        if tensor.numel() == 0:
            continue
        storage = tensor.untyped_storage()
        address, nbytes = storage.data_ptr(), storage.nbytes()
        arena = finder.home_of(storage)
        if arena is not None:
            start = address - arena.address
        else:
            arena, start = stand_ins[address]
        slots.append((arena, _slot(name, tensor, start, nbytes)))
    return Shared(path=path, module=module, slots=tuple(slots))


def _slot(name: str, tensor: torch.Tensor, start: int, nbytes: int) -> Slot:
    return Slot(
        name=name,
        start=start,
        nbytes=nbytes,
        dtype=tensor.dtype,
        shape=tuple(tensor.shape),
        stride=tensor.stride(),
        offset=int(tensor.storage_offset()),
    )
