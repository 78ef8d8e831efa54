"""The arena: one memory file that holds the tensors of all modules a launch shares.

    notebook process                 memory file                  worker (one of N)
    module.weight ──► shared map ──► [ weight | bias | … ] ◄── private map ◄── module.weight
                                                                └► pages it writes are its own

[Note: storages, not tensors] The unit that moves is the storage, which tied weights, views and
transposed or expanded parameters have in common: then every tensor is pointed at it with its old
geometry. `Parameter` objects stay the same (only their `.data` changes), so an optimizer still
steps the right ones. A view taken earlier (`w = model.weight.data[0]`) keeps the old memory.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from nbaccel.base import torch_private
from nbaccel.base.errors import ModelNotShareable
from nbaccel.base.processes import uninterrupted
from nbaccel.transfer import memfd

PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)  # a DTensor, for one, has no memory of its own


class Arena(memfd.Mapping):
    """A memory file mapped shared into this process, which stays as long as tensors in it do.

    Or a file of a checkpoint (`of_file`), which all processes map. What one writes there is its
    own: before weights come home, or if the notebook has changed some, it becomes a memory file.
    """

    def __init__(self, fd: int, num_bytes: int, *, is_checkpoint: bool = False) -> None:
        self.key = f"arena{next(_ARENA_NUMBERS)}"  # names no other arena of this process
        self.is_checkpoint = is_checkpoint
        # The descriptor stays open, because workers are sent copies of it.
        super().__init__(fd, num_bytes, is_private=is_checkpoint, owns_fd=True)
        _LIVING_ARENAS.append(weakref.ref(self, _LIVING_ARENAS.remove))

    @classmethod
    def of_file(cls, path: Path) -> Arena:
        """Tensors in a file of a checkpoint."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return cls(fd, os.fstat(fd).st_size, is_checkpoint=True)

    def sync(self) -> None:
        """Make the file show what this process sees; called before it is sent to workers."""
        if self.is_checkpoint and self.written():
            self.leave_file()

    def leave_file(self) -> None:
        """Move from a checkpoint's file to a memory file; called before that is written to."""
        if not self.is_checkpoint:
            return
        new_fd = memfd.create_file("arena", self.nbytes)
        # An interrupt, or memory that is short: nothing has changed.
        with memfd.closed_on_error(new_fd):
            memfd.write_at(new_fd, self.view(0, self.nbytes), 0)
        with uninterrupted():
            self.replace(new_fd, is_private=False)
            old_fd = self.fd
            self.fd = new_fd
            self.is_checkpoint = False
            os.close(old_fd)


# The number of an address would name two arenas in the life of a process; a count does not.
_ARENA_NUMBERS = itertools.count()

# It outlives a launch because the notebook's model does. Weak, so that it keeps nothing alive.
_LIVING_ARENAS: list[weakref.ref[Arena]] = []
_MOVE_LOCK = threading.Lock()


def find_arena(address: int, num_bytes: int) -> Arena | None:
    """The arena of this process that holds these bytes, if any."""
    # A copy, because another thread may add an arena while the loop runs.
    for reference in tuple(_LIVING_ARENAS):
        arena = reference()
        if arena is not None and arena.contains(address, num_bytes):
            return arena
    return None


def arena_of(storage: torch.UntypedStorage) -> Arena | None:
    """The arena of this process that a storage lies in, if any."""
    if storage.device.type != "cpu":
        return None
    return find_arena(storage.data_ptr(), storage.nbytes())


def make_arenas_private() -> None:
    """Cut a forked child off from the notebook's arenas, for what it writes and what it sends."""
    for reference in tuple(_LIVING_ARENAS):
        arena = reference()
        # What lies in a checkpoint's file is private already.
        if arena is not None and not arena.is_checkpoint:
            arena.replace(arena.fd, is_private=True)
    _LIVING_ARENAS.clear()


def storage_at(mapping: memfd.Mapping, start: int, num_bytes: int) -> torch.UntypedStorage:
    """Bytes `[start, start + nbytes)` of a mapping as a storage that keeps the mapping alive."""
    # torch.frombuffer refuses an empty buffer.
    if num_bytes == 0:
        return torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
    raw_bytes = torch.frombuffer(mapping.bytes(), dtype=torch.uint8, count=num_bytes, offset=start)
    return raw_bytes.untyped_storage()


def empty_tensors(layouts: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> list[torch.Tensor]:
    """Tensors with memory of their own that workers can be handed without a copy."""
    if not hasattr(os, "memfd_create"):
        return [torch.zeros(shape, dtype=dtype) for shape, dtype in layouts]
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in layouts]
    starts = [0, *itertools.accumulate(map(memfd.aligned, sizes))]
    if not starts[-1]:
        return [torch.empty(shape, dtype=dtype) for shape, dtype in layouts]
    arena = Arena(memfd.create_file("arena", starts[-1]), starts[-1])
    # `starts` has the end of all as its last entry.
    return [
        torch.empty(0, dtype=dtype).set_(storage_at(arena, start, size)).view(shape)
        for (shape, dtype), size, start in zip(layouts, sizes, starts, strict=False)
    ]


class Slot(NamedTuple):
    """Where one parameter or buffer lives. Hundreds travel: a dataclass would take four times."""

    name: str  # dotted name in the module, as `named_parameters` gives it
    arena: str
    start: int  # first byte of its storage in the arena
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # elements from the start of the storage to the tensor's first one

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor, arena: Arena, start: int) -> Slot:
        """That of a tensor whose storage has a place in this arena."""
        return cls(
            name=name,
            arena=arena.key,
            start=start,
            nbytes=tensor.untyped_storage().nbytes(),
            dtype=tensor.dtype,
            shape=tuple(tensor.shape),
            stride=tensor.stride(),
            offset=int(tensor.storage_offset()),
        )

    @property
    def span(self) -> memfd.ByteRange:
        """The bytes of its storage in the arena."""
        return (self.start, self.start + self.nbytes)

    def view(self, mapping: memfd.Mapping) -> torch.Tensor:
        """This tensor's bytes in a mapping of the arena, as a tensor of `shape`."""
        storage = storage_at(mapping, self.start, self.nbytes)
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.shape, self.stride)


def module_version(module: nn.Module) -> int:
    """Grows whenever one of its tensors is written to, by what torch counts as writing."""
    return sum(torch_private.tensor_version(tensor) for _, tensor in named_tensors(module))


def is_in_arena(tensor: torch.Tensor, slot: Slot, mapping: memfd.Mapping) -> bool:
    """Whether the tensor still is the very view of the arena that the slot describes."""
    return (
        tensor.device.type == "cpu"
        and type(tensor) in PLAIN
        and tensor.dtype == slot.dtype
        and tensor.stride() == slot.stride
        and tensor.data_ptr() == mapping.address + slot.start + slot.offset * tensor.element_size()
    )


class SharedModule(NamedTuple):
    """A module of the notebook that workers get without a copy, and where its weights belong."""

    path: str  # how the user would write it: `args[0]`, `args[1]['teacher']`
    slots: tuple[Slot, ...]
    module: nn.Module


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """All modules of one launch, and where the host copies of device-resident storages lie."""

    modules: tuple[SharedModule, ...] = ()
    arenas: dict[str, Arena] = field(default_factory=dict)  # all that hold a tensor of these
    stand_ins: dict[int, tuple[Arena, int]] = field(default_factory=dict)
    """Device address of a storage → arena and first byte of its host copy."""

    @classmethod
    def joined(cls, parts: Iterable[Sharing]) -> Sharing:
        """The modules of all of these."""
        parts = tuple(parts)
        return cls(
            modules=tuple(module for part in parts for module in part.modules),
            arenas={key: arena for part in parts for key, arena in part.arenas.items()},
            stand_ins={key: place for part in parts for key, place in part.stand_ins.items()},
        )


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

    def raw(self) -> torch.Tensor:
        """The bytes of the span, where they are now, as a uint8 tensor of shape `[nbytes]`."""
        empty = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        return empty.set_(self.storage, self.low, (self.nbytes,), (1,))

    def move_tensors(self, arena: Arena) -> None:
        """Let the tensors lie in an arena, which has their bytes already."""
        storage = storage_at(arena, self.start, self.nbytes)
        for tensor in self.tensors:
            # The span may start after the first byte of the old storage, so offsets shrink.
            offset = tensor.storage_offset() - self.low // tensor.element_size()
            empty = torch.empty(0, dtype=tensor.dtype)
            # Assigning .data keeps the Parameter object, which optimizers hold by identity.
            tensor.data = empty.set_(storage, offset, tensor.shape, tensor.stride())


def share_modules(modules: Sequence[tuple[str, nn.Module]]) -> Sharing:
    """Move the modules' tensors into an arena, unless they live in one; copy those on devices."""
    # All refusals before the first move: half a model in shared memory is of no use.
    refusals = [refusal for path, module in modules for refusal in _refusals_of(path, module)]
    if refusals:
        raise ModelNotShareable("The model cannot be handed to workers:\n" + "\n".join(refusals))
    # Two launches from two threads must not both move the same tensor.
    with _MOVE_LOCK, torch.no_grad():
        stand_ins = _move_storages(modules)
    arenas: dict[str, Arena] = {}
    return Sharing(
        modules=tuple(_record_module(path, module, stand_ins, arenas) for path, module in modules),
        arenas=arenas,
        stand_ins=stand_ins,
    )


def host_copies(
    sharing: Sharing, left_out: Collection[str] = ()
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Tensors on this process's devices, each with its copy in host memory, which workers have."""
    for path, slots, module in sharing.modules if sharing.stand_ins else ():
        if path not in left_out:
            tensors = dict(named_tensors(module))
            for slot in slots:
                # Through .data: a copy into a leaf that requires grad is an error in torch.
                tensor = tensors[slot.name].data
                if tensor.device.type != "cpu":
                    yield tensor, slot.view(sharing.arenas[slot.arena])


def named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and buffer under every name it has (tied ones more than once)."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _refusals_of(path: str, module: nn.Module) -> Iterator[str]:
    emptied = _emptied_parameters(module)
    for name, tensor in named_tensors(module):
        reason = _why_not(tensor)
        if name in emptied:
            reason = (
                f"is an empty parameter of shape {tuple(tensor.shape)}, like a placeholder "
                "(ZeRO-3, FSDP). Gather it first."
            )
        if reason:
            yield f"  {path}.{name} ({type(module).__name__}): {reason}"


def _why_not(tensor: torch.Tensor) -> str | None:
    if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
        return "a lazy parameter without a shape yet. Run one batch through the model first."
    inside = "build the model inside the function"
    if tensor.device.type == "meta":
        return (
            f"is on the meta device: it has shape {tuple(tensor.shape)} but no values. Fill it "
            f"first (model.to_empty(device='cpu'), load weights), or {inside}."
        )
    if type(tensor) not in PLAIN:
        kind = type(tensor).__name__
        return f"is a {kind}, not one block of memory. Unwrap it to a plain tensor, or {inside}."
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


def _emptied_parameters(module: nn.Module) -> Collection[str]:
    """Empty ones whose values seem to be elsewhere: most, or DeepSpeed's; one alone is an idiom."""
    parameters = {
        name: parameter
        for name, parameter in module.named_parameters()
        if not isinstance(parameter, UninitializedParameter)
    }
    empty = {name for name, parameter in parameters.items() if parameter.numel() == 0}
    is_partitioned = any(hasattr(parameters[name], "ds_id") for name in empty)
    return empty if is_partitioned or len(empty) > max(1, len(parameters) // 2) else ()


def _move_storages(modules: Sequence[tuple[str, nn.Module]]) -> dict[int, tuple[Arena, int]]:
    """Move what is in no arena yet; returns the host copies of what is on devices."""
    # By id, because tied parameters are listed once per name and must be moved once.
    tensors = {id(t): t for _, module in modules for _, t in named_tensors(module)}
    spans = _storage_spans(tensors.values())
    arena_bytes = 0
    for span in spans:
        span.start = arena_bytes
        arena_bytes += memfd.aligned(span.nbytes)
    if not spans:
        return {}
    arena = Arena(memfd.create_file("arena", arena_bytes), arena_bytes)
    stand_ins: dict[int, tuple[Arena, int]] = {}
    for span in spans:
        # pwrite, not copy_: no page fault per page, and no OpenMP pool started in the notebook.
        memfd.write_at(arena.fd, memoryview(span.raw().cpu().numpy().data), span.start)
        if span.storage.device.type == "cpu":
            span.move_tensors(arena)
        else:
            # A tensor on an accelerator is not moved: workers get a copy in host memory.
            stand_ins[span.storage.data_ptr()] = (arena, span.start)
    return stand_ins


def _storage_spans(tensors: Iterable[torch.Tensor]) -> list[_Span]:
    spans: dict[int, _Span] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if tensor.numel() == 0 or arena_of(storage):
            continue
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        elements = 1 + sum((size - 1) * step for size, step in steps)
        low = int(tensor.storage_offset()) * tensor.element_size()
        high = low + elements * tensor.element_size()
        # So that tensors of another dtype in the same storage keep whole offsets.
        low = low // memfd.ALIGNMENT * memfd.ALIGNMENT
        if storage.device.type != "cpu":
            # Its host copy is found by the address of the whole storage.
            low = 0
            high = storage.nbytes()
        span = spans.setdefault(storage.data_ptr(), _Span(storage, low, high))
        span.low = min(span.low, low)
        span.high = max(span.high, high)
        span.tensors.append(tensor)
    return list(spans.values())


def _record_module(
    path: str, module: nn.Module, stand_ins: dict[int, tuple[Arena, int]], arenas: dict[str, Arena]
) -> SharedModule:
    """Note where a module's tensors lie, and add the arenas to those of the others."""
    slots = []
    for name, tensor in named_tensors(module):
        # An empty tensor has no address, so no slot; both sides pass over it.
        if tensor.numel() == 0:
            continue
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        # A module of an earlier launch lies in an arena already: its slots point there.
        arena = arena_of(storage)
        arena, start = (arena, address - arena.address) if arena else stand_ins[address]
        arenas[arena.key] = arena
        slots.append(Slot.of(name, tensor, arena, start))
    return SharedModule(path, tuple(slots), module)
