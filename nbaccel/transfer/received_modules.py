"""The modules that a worker received through an arena: what happens to their weights there.

staging files ◄───── rank 0's changed pages; of sharded tensors everyone's piece
    │ read by the notebook, once every rank has written all of it
arena file
    │ private map
worker's tensors ──► share_equal_pages: pages equal to the file are given back, shared again
                 ◄── adopt: the notebook wrote to the weights: what was written here goes

[Note: training in place] Rank 0 would pay twice: once for the private page that its first optimizer
step writes, once for copying that page to the staging file at the end. So just before its first
step it copies the arena to a file, maps that file where its model lies, and trains right there.
This is done only where most of the arena is about to be trained; otherwise the kernel's table of
private pages tells what was written. In a launch it is the staging file. A live worker cannot know
when the next cell will train: it makes a file of its own, which travels to the notebook.
"""

from __future__ import annotations

import contextlib
import math
import os
import weakref
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from nbaccel.base import torch_private
from nbaccel.base.processes import uninterrupted
from nbaccel.base.units import first_few
from nbaccel.precision.fp8.scaled_tensor import ScaledTensor
from nbaccel.transfer import memfd, sharded_tensors
from nbaccel.transfer.arena import PLAIN, SharedModule, Slot, is_in_arena, named_tensors
from nbaccel.transfer.namespace_snapshot import ModuleChange
from nbaccel.transfer.weight_sync import WeightReport, digest_of, is_compared

_Written = Mapping[str, list[memfd.ByteRange]]

# Share of an arena's bytes that is about to be trained. Training in place copies the whole arena
# once, otherwise the trained part is copied twice: half is where both cost the same.
_IN_PLACE_SHARE = 0.5
_PART_REMEDY = (
    "rank 0's part of it is here. Gather it on all ranks before the function returns "
    "(tensor.full_tensor(), or torch's get_model_state_dict with full_state_dict=True)"
)


@dataclass(eq=False)
class LocalArena:
    """A worker's own descriptor of an arena, and its mapping."""

    fd: int
    mapping: memfd.Mapping
    training_file: int | None = None  # the file that the mapping shows instead
    is_in_staging: bool = False  # it is the notebook's staging file: nothing is copied there

    @property
    def own_file(self) -> int | None:
        """The file of this rank's own that it trains in."""
        return None if self.is_in_staging else self.training_file

    def written(self) -> list[memfd.ByteRange]:
        """What this rank has written to it."""
        if self.training_file is not None:
            return [(0, self.mapping.nbytes)]
        return self.mapping.written()

    def changed(self, written: list[memfd.ByteRange]) -> list[memfd.ByteRange]:
        """What of the written bytes differs from the notebook's: not each value is another one."""
        if self.training_file is not None:
            return written
        return list(memfd.ranges_without(written, self.equal_runs(written)))

    def equal_runs(self, spans: list[memfd.ByteRange]) -> Iterator[memfd.ByteRange]:
        """What of these bytes is here as it is in the notebook."""
        # This worker's shows its own pages. Private: the file may be open for reading only.
        arena = memfd.Mapping(self.fd, self.mapping.nbytes, is_private=True)
        return memfd.equal_runs(self.mapping.bytes(), arena.bytes(), spans)

    def train_in_file(self, staging_file: int | None, optimizer: torch.optim.Optimizer) -> None:
        """Let the mapping show this file, or one of its own, if most of it is trained."""
        spans = [
            self._span_of(parameter)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        ]
        # Merged first: tied parameters and views of one storage would count twice.
        merged = memfd.merge_ranges(span for span in spans if span)
        if memfd.total_bytes(merged) < _IN_PLACE_SHARE * self.mapping.nbytes:
            return
        with contextlib.ExitStack() as on_error:
            fd = staging_file
            if fd is None:
                fd = memfd.create_file("staging", self.mapping.nbytes)
                on_error.callback(os.close, fd)
            memfd.write_at(fd, self.mapping.view(0, self.mapping.nbytes), 0)
            # After that: the mapping must never show a file that has not been filled.
            with uninterrupted():
                self.mapping.replace(fd, is_private=False)
                on_error.pop_all()
                self.training_file = fd
                self.is_in_staging = staging_file is not None

    def _span_of(self, tensor: torch.Tensor) -> memfd.ByteRange | None:
        if tensor.device.type != "cpu" or type(tensor) not in PLAIN:
            return None
        storage = tensor.untyped_storage()
        if not self.mapping.contains(storage.data_ptr(), storage.nbytes()):
            return None
        start = storage.data_ptr() - self.mapping.address
        return (start, start + storage.nbytes())

    def leave_file(self) -> None:
        """Map the arena again, privately; what it does not say is kept as private pages."""
        if self.own_file is None:
            return
        whole = [(0, self.mapping.nbytes)]
        # The mapping keeps its address when replaced, so these show the arena afterwards.
        own_bytes = self.mapping.bytes()
        # Copied, because replacing the mapping takes these pages away.
        kept = [
            (start, end, own_bytes[start:end].copy())
            for start, end in memfd.ranges_without(whole, self.equal_runs(whole))
        ]
        # Interrupted in between, the notebook would be given a file that is not what is shown here.
        with uninterrupted():
            self.mapping.replace(self.fd, is_private=True)
            for start, end, values in kept:
                own_bytes[start:end] = values
            os.close(self.own_file)
            self.training_file = None

    def show_again(self, start: int, end: int) -> None:
        """Let exactly these bytes show the notebook's values again."""
        page_bytes = memfd.PAGE_BYTES
        pages_start = -(-start // page_bytes) * page_bytes
        pages_end = end if end == self.mapping.nbytes else end // page_bytes * page_bytes
        copied = [(start, end)]
        # A file of this rank's own has no notebook pages beneath: all values are copied in.
        if self.training_file is None and pages_start < pages_end:
            self.mapping.give_back(pages_start, pages_end)
            # The edges hold other modules' tensors, too: giving them back would undo training.
            copied = [(start, pages_start), (pages_end, end)]
        self.mapping.fill(self.fd, copied)


@dataclass(eq=False)
class ReceivedModule:
    """A module of the notebook's, as it is in a worker."""

    path: str
    slots: tuple[Slot, ...]
    module: nn.Module
    origins: Mapping[str, weakref.ref[torch.Tensor]]  # what it consisted of when it came
    notebook_names: tuple[str, ...] = ()  # of its tensors, when last equal to the notebook's
    notebook_state: Hashable = None  # of tensors that left the arena, when last copied back
    reported: str = ""  # digest of what this rank has trained, as it was reported last

    def tensor_names(self) -> tuple[str, ...]:
        """Names of its tensors as they are now."""
        return tuple(name for name, _ in named_tensors(self.module))

    def arena_keys(self) -> set[str]:
        """The arenas that the notebook has it in."""
        return {slot.arena for slot in self.slots}


class ReceivedModules:
    """A worker's table of the notebook's modules, by key."""

    def __init__(
        self,
        *,
        rank: int,
        num_nodes: int = 1,
        share_back: bool = True,
        staging_files: Mapping[str, int] | None = None,
    ) -> None:
        self._rank = rank
        self._num_nodes = num_nodes  # notebooks that launch together; each gets its own workers'
        self._share_back = share_back
        self._staging = staging_files or {}  # of a launch, which has them from its start
        self._arenas: dict[str, LocalArena] = {}
        self._modules: dict[str, ReceivedModule] = {}
        self._has_stepped = False
        # To read sharded tensors without their engine. By identity: == compares elements.
        self._held: MutableMapping[torch.Tensor, object] = WeakIdKeyDictionary()
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Optimizers that have been looked at since weights were last copied back."""
        # Weak: the hook is torch's and global, and must not keep this alive.
        before_step = weakref.WeakMethod(self.before_step)

        def on_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if (living := before_step()) is not None:
                living(optimizer)

        # Without this it would outlive the pool.
        weakref.finalize(self, register_optimizer_step_pre_hook(on_step).remove)

    @property
    def mappings(self) -> dict[str, memfd.Mapping]:
        """This worker's mappings of the arenas, by key."""
        return {key: arena.mapping for key, arena in self._arenas.items()}

    def module(self, key: str) -> nn.Module:
        """The module that the notebook knows under this key."""
        return self._modules[key].module

    def open_arena(
        self, key: str, num_bytes: int, fd: int, mapping: memfd.Mapping | None = None
    ) -> None:
        """Map an arena, unless this worker has it: a fork of the notebook has its mapping."""
        if mapping is None and key not in self._arenas:
            # A copy of the descriptor, which goes with the last tensor that lives in the mapping.
            fd = os.dup(fd)
            mapping = memfd.Mapping(fd, num_bytes, is_private=True, owns_fd=True)
        if mapping is not None:
            self._arenas[key] = LocalArena(fd, mapping)

    def add(self, key: str, shared: SharedModule) -> None:
        """A module arrived whole."""
        origins = {name: weakref.ref(tensor) for name, tensor in named_tensors(shared.module)}
        self._modules[key] = ReceivedModule(*shared, origins)
        self._note_equal(self._modules[key])

    def _note_equal(self, received: ReceivedModule) -> None:
        """The notebook has what there is here."""
        received.notebook_state = self._departed_state(received)
        received.notebook_names = received.tensor_names()

    def forget(self, module_keys: Iterable[str], arena_keys: Iterable[str]) -> None:
        """Drop the entries of what the notebook no longer has. What the worker still uses stays."""
        for key in module_keys:
            self._modules.pop(key, None)
        for key in arena_keys:
            # Tensors that still live in an arena keep its mapping alive without this entry.
            if key in self._arenas:
                self._arenas.pop(key).leave_file()
        self._modules = {
            key: received
            for key, received in self._modules.items()
            if received.arena_keys() <= self._arenas.keys()
        }

    def apply(self, change: ModuleChange) -> None:
        """Apply what the notebook changed. Parts that do not exist here are passed over."""
        module = self.module(change.key)
        parts: dict[str, Any] = dict(named_tensors(module))
        parts |= module.named_modules(remove_duplicate=False)
        for place, value in change.values.items():
            if isinstance(place, type):
                continue
            path, name = place
            part = parts.get(path)
            if isinstance(part, nn.Module):
                vars(part)[name] = value
            # torch refuses to change requires_grad of a tensor that is not a leaf.
            elif part is not None and part.is_leaf:
                part.requires_grad_(value)
        for place in change.removed:
            if not isinstance(place, type) and place[0] in parts:
                vars(parts[place[0]]).pop(place[1], None)
        if change.adopt:
            self._adopt(self._modules[change.key])

    def _adopt(self, received: ReceivedModule) -> None:
        for key, arena in self._arenas.items():
            slots = [slot for slot in received.slots if slot.arena == key]
            # Padding belongs to no tensor, so it may be dropped: whole pages can be given back.
            spans = ((slot.start, memfd.aligned(slot.span[1])) for slot in slots)
            for start, end in memfd.merge_ranges(spans):
                arena.show_again(start, min(end, arena.mapping.nbytes))
        with torch.no_grad():
            for slot, tensor, mapping in self._departed(received):
                if sharded_tensors.full_shape(tensor) == slot.shape:
                    sharded_tensors.fill_local_part(tensor, slot.view(mapping))
        # Adopting raises the version counters; without this it would look like training.
        received.notebook_state = self._departed_state(received)

    def dirty(self) -> tuple[str, ...]:
        """Keys of the modules whose weights the notebook may not have got yet."""
        written = self._written()
        return tuple(key for key, one in self._modules.items() if self._has_news(one, written))

    def _has_news(self, received: ReceivedModule, written: _Written) -> bool:
        """Whether the notebook is to get something of a module from this rank, or to be told."""
        state = self._departed_state(received)
        # Some optimizers write weights without raising torch's counter, hence the step as well.
        if state is not None and (self._has_stepped or state != received.notebook_state):
            return True
        if self._rank != 0:
            # It is told that this rank has trained what the notebook gets of rank 0.
            return self._digest(received, written, own_only=True) not in ("", received.reported)
        is_written = any(memfd.overlap(slot.span, written[slot.arena]) for slot in received.slots)
        # With other names nothing comes home of it, and that is told.
        return is_written or received.notebook_names != received.tensor_names()

    def _digest(self, received: ReceivedModule, written: _Written, own_only: bool = False) -> str:
        """A digest of a module's parameters, or `own_only` of the trained ones; empty if none."""
        tensors = dict(named_tensors(received.module))
        compared = []
        trained = []
        for slot in received.slots:
            tensor = tensors.get(slot.name)
            if tensor is None or not is_compared(tensor):
                continue
            compared.append(tensor)
            in_arena = is_in_arena(tensor, slot, self._arenas[slot.arena].mapping)
            if not in_arena or memfd.overlap(slot.span, written[slot.arena]):
                trained.append(tensor)
        return digest_of(trained if own_only else compared) if trained else ""

    def _written(self) -> dict[str, list[memfd.ByteRange]]:
        return {key: arena.written() for key, arena in self._arenas.items()}

    def _departed_state(self, received: ReceivedModule) -> Hashable:
        """Changes when a tensor outside the arena that this rank copies back changes."""
        states = tuple(
            (slot.name, id(tensor), torch_private.tensor_version(tensor))
            for slot, tensor, _ in self._departed(received)
            if self._rank == 0 or sharded_tensors.is_sharded(tensor)
        )
        return states or None

    def _departed(
        self, received: ReceivedModule
    ) -> Iterator[tuple[Slot, torch.Tensor, memfd.Mapping]]:
        tensors = dict(named_tensors(received.module))
        for slot in received.slots:
            tensor = tensors.get(slot.name)
            mapping = self._arenas[slot.arena].mapping
            if tensor is not None and not is_in_arena(tensor, slot, mapping):
                yield slot, tensor, mapping

    def write_all(self) -> WeightReport:
        """Write what this rank owes of all modules into the staging files of a launch."""
        modules = list(self._modules.values())
        return self._write(modules, self._arenas, self._staging, keeps_states=True)

    def write_changed(self, staging: Mapping[str, int]) -> tuple[WeightReport, dict[str, int]]:
        """Write what has changed; returns files of its own that hold whole arenas, too."""
        changed = [
            received
            for received in map(self._modules.__getitem__, self.dirty())
            if received.arena_keys() <= staging.keys()
        ]
        keys = {key for received in changed for key in received.arena_keys()}
        arenas = {key: self._arenas[key] for key in sorted(keys)}
        report = self._write(changed, arenas, staging, keeps_states=False)
        if self._rank != 0:
            written = self._written()
            for received in changed:
                received.reported = self._digest(received, written, own_only=True)
        own_files = {key: arena.own_file for key, arena in arenas.items()}
        return report, {key: file for key, file in own_files.items() if file is not None}

    def _write(
        self,
        modules: Sequence[ReceivedModule],
        arenas: Mapping[str, LocalArena],
        staging_files: Mapping[str, int],
        *,
        keeps_states: bool,
    ) -> WeightReport:
        """Put what this rank owes of these modules into staging files. No communication."""
        written = {key: arena.written() for key, arena in arenas.items()}
        digests = {received.path: self._digest(received, written) for received in modules}
        report = WeightReport(rank=self._rank, fingerprints=digests)
        # Private pages must not overwrite these, which are written by themselves.
        settled: defaultdict[str, list[memfd.ByteRange]] = defaultdict(list)
        for received in modules:
            tensors = dict(named_tensors(received.module))
            reason = (
                _mismatch_reason(received.slots, tensors)
                or _out_of_reach(tensors, self._num_nodes)
                or _untied_reason(received.slots, tensors)
            )
            if not reason:
                for slot, spans in self._put_departed(received, staging_files):
                    report.own_bytes[slot.arena] += spans
                    # Of a sharded one other ranks write the rest.
                    is_sharded = sharded_tensors.is_sharded(tensors[slot.name])
                    settled[slot.arena] += [slot.span] if is_sharded else spans
            if self._rank != 0:
                continue
            changes = ""
            if reason:
                report.stranded[received.path] = reason
            elif changes := _describe_changes(received, tensors):
                report.changes[received.path] = changes
            if keeps_states and (reason or changes):
                report.state_dicts[received.path] = _on_cpu(received.module.state_dict())
        for key, arena in arenas.items():
            # The notebook gets the file of this rank's own.
            if self._rank == 0 and arena.own_file is None:
                changed = memfd.ranges_without(arena.changed(written[key]), settled[key])
                for start, end in changed:
                    report.own_bytes[key].append((start, end))
                    if not arena.is_in_staging:
                        memfd.write_at(staging_files[key], arena.mapping.view(start, end), start)
        return report

    def _put_departed(
        self, received: ReceivedModule, staging_files: Mapping[str, int]
    ) -> Iterator[tuple[Slot, list[memfd.ByteRange]]]:
        """Copy tensors that left the arena into their slots of the staging file, as far as owed."""
        places: set[Slot] = set()
        for slot, tensor, mapping in self._departed(received):
            place = slot._replace(name="")
            # Every rank has a copy of a whole tensor, and rank 0's counts; of a sharded one a part.
            is_owed = self._rank == 0 or sharded_tensors.is_sharded(tensor)
            if not is_owed or place in places:
                continue
            places.add(place)
            # Mapped shared, because all ranks write their pieces of a sharded tensor there.
            staging = memfd.Mapping(staging_files[slot.arena], mapping.nbytes, is_private=False)
            spans = []
            for spot, piece in sharded_tensors.pieces(tensor, self._held.get(tensor)):
                theirs = slot.view(mapping)
                values = piece.detach()
                values = sharded_tensors.unrounded_values(values, theirs, spot, tensor.dtype)
                put = sharded_tensors.put_piece(slot.view(staging), spot, values)
                spans += [(slot.start + start, slot.start + end) for start, end in put]
            yield slot, spans

    def share_equal_pages(self) -> None:
        """The notebook has the weights: give back private pages that are equal to the arena's."""
        for received in self._modules.values():
            self._note_equal(received)
        self._has_stepped = False
        self._seen.clear()
        for arena in self._arenas.values():
            arena.leave_file()
            for equal_range in arena.equal_runs(arena.written()):
                arena.mapping.give_back(*equal_range)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to make a step: rank 0 trains in files from now on."""
        self._has_stepped = True
        if optimizer in self._seen:
            return
        self._seen.add(optimizer)
        for received in self._modules.values():
            for parameter in received.module.parameters():
                part = sharded_tensors.held_part(parameter)
                if part is not None:
                    self._held[parameter] = part
        # Only rank 0, because the notebook gets the model of rank 0.
        if self._rank != 0 or not self._share_back:
            return
        for key, arena in self._arenas.items():
            if arena.training_file is None:
                # Without room for the file, training goes on in private pages, copied later.
                with contextlib.suppress(OSError):
                    arena.train_in_file(self._staging.get(key), optimizer)


def _out_of_reach(tensors: Mapping[str, torch.Tensor], num_nodes: int) -> str:
    """Why pieces of sharded tensors cannot be put together here; empty if they can."""
    for name, tensor in tensors.items():
        if num_nodes > 1 and sharded_tensors.is_sharded(tensor):
            return f"it is sharded over {num_nodes} nodes, each with a part only; {_PART_REMEDY}"
        if placements := sharded_tensors.odd_placements(tensor):
            return f"{name} is placed as {placements}, which no rank can undo alone; {_PART_REMEDY}"
    return ""


def _mismatch_reason(slots: Sequence[Slot], tensors: Mapping[str, torch.Tensor]) -> str:
    """Why the module no longer fits the notebook's; empty if it does."""
    expected = {slot.name: slot.shape for slot in slots}
    shapes = {name: sharded_tensors.full_shape(tensor) for name, tensor in tensors.items()}
    # Empty tensors have no slot in the notebook, so they must not count as new here.
    shapes = {name: shape for name, shape in shapes.items() if math.prod(shape)}
    lines = [f"{name} is gone" for name in expected.keys() - shapes.keys()]
    lines += [f"{name} is new" for name in shapes.keys() - expected.keys()]
    lines += [
        f"{name} has shape {shapes[name]} instead of {shape}"
        for name, shape in expected.items()
        if name in shapes and shapes[name] != shape
    ]
    return first_few(sorted(lines), 3, separator="; ")


def _on_cpu(state: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in state.items():
        # A state dict may hold other objects, too (`get_extra_state`).
        values[key] = value
        if isinstance(value, torch.Tensor):
            local: Any = value.detach()
            values[key] = (local.to_local() if sharded_tensors.is_dtensor(value) else local).cpu()
    return values


def _untied_reason(slots: Sequence[Slot], tensors: Mapping[str, torch.Tensor]) -> str:
    """Which names share one tensor in the notebook, and hold different values here."""
    first_names: dict[Slot, str] = {}
    for slot in slots:
        first_name = first_names.setdefault(slot._replace(name=""), slot.name)
        if first_name != slot.name and not _are_equal(tensors[first_name], tensors[slot.name]):
            return f"{first_name} and {slot.name} were tied, and now have different values"
    return ""


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    # No rank has all values of a sharded tensor to compare.
    if one is other or sharded_tensors.is_sharded(one) or sharded_tensors.is_sharded(other):
        return True
    if one.device == other.device and one.data_ptr() == other.data_ptr():
        return True
    # Copies with equal values can still be written into one tensor.
    return one.dtype == other.dtype and torch.equal(one.detach().cpu(), other.detach().cpu())


def _describe_changes(received: ReceivedModule, tensors: Mapping[str, torch.Tensor]) -> str:
    """What is not as the notebook has it, although the values can be copied there."""
    names_by_dtypes: dict[tuple[torch.dtype, torch.dtype], list[str]] = {}
    replaced = []
    for slot in received.slots:
        tensor = tensors[slot.name]
        # An engine shards it, or FP8 stores it: by design, so not worth a message.
        if isinstance(tensor, ScaledTensor) or sharded_tensors.is_sharded(tensor):
            continue
        if tensor.dtype != slot.dtype:
            names_by_dtypes.setdefault((tensor.dtype, slot.dtype), []).append(slot.name)
        # Some models create buffers anew, so these do not count.
        elif isinstance(tensor, nn.Parameter) and tensor.device.type == "cpu":
            original = received.origins.get(slot.name)
            if original is not None and original() is not tensor:
                replaced.append(slot.name)
    clauses = [
        f"{first_few(names, 2)} came as {_short(new)} and {_were(names)} cast to {_short(old)}"
        for (new, old), names in names_by_dtypes.items()
    ]
    if replaced:
        clauses.append(f"{first_few(replaced, 2)} {_were(replaced)} replaced")
    return "; ".join(clauses)


def _were(names: Sequence[str]) -> str:
    return "was" if len(names) == 1 else "were"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
