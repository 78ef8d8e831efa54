"""The modules that a worker received through an arena: what happens to their weights there.

staging files ◄───── rank 0's changed pages; of sharded tensors everyone's piece
    │ read by the notebook, once every rank has written all of it
arena file
    │ private map
worker's tensors ──► share_equal_pages: pages equal to the file are given back, shared again
                 ◄── adopt: the notebook wrote to the weights: what was written here goes
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from nbaccel.base import torch_private
from nbaccel.transfer import memfd, sharded_tensors
from nbaccel.transfer.arena import SharedModule, Slot, is_in_arena, named_tensors
from nbaccel.transfer.namespace_snapshot import ModuleChange
from nbaccel.transfer.weight_sync import (
    LocalArena,
    ReceivedModule,
    WeightReport,
    WeightWriter,
    trained_digest,
)

_Written = Mapping[str, list[memfd.ByteRange]]


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
        self._share_back = share_back
        self._staging = staging_files or {}  # of a launch, which has them from its start
        self._arenas: dict[str, LocalArena] = {}
        self._modules: dict[str, ReceivedModule] = {}
        self._has_stepped = False
        # By identity, because == on tensors compares elements.
        self._held = WeakIdKeyDictionary()
        self._writer = functools.partial(
            WeightWriter, rank=rank, num_nodes=num_nodes, held_parts=self._held
        )
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
        if mapping is not None:
            self._arenas[key] = LocalArena(fd, mapping)
        elif key not in self._arenas:
            self._arenas[key] = LocalArena.open(fd, num_bytes)

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
            return self._own_digest(received, written) not in ("", received.reported)
        is_written = any(memfd.overlap(slot.span, written[slot.arena]) for slot in received.slots)
        # With other names nothing comes home of it, and that is told.
        return is_written or received.notebook_names != received.tensor_names()

    def _own_digest(self, received: ReceivedModule, written: _Written) -> str:
        """Digest of what this rank has written of a module; empty if nothing."""
        return trained_digest(received, self._arenas, written, own_only=True)

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
        writer = self._writer(arenas=self._arenas, staging_files=self._staging)
        return writer.write(list(self._modules.values()), keeps_states=True)

    def write_changed(
        self, staging_files: Mapping[str, int]
    ) -> tuple[WeightReport, dict[str, int]]:
        """Write what has changed; returns files of its own that hold whole arenas, too."""
        changed = [
            received
            for received in map(self._modules.__getitem__, self.dirty())
            if received.arena_keys() <= staging_files.keys()
        ]
        keys = {key for received in changed for key in received.arena_keys()}
        arenas = {key: self._arenas[key] for key in sorted(keys)}
        writer = self._writer(arenas=arenas, staging_files=staging_files)
        report = writer.write(changed, keeps_states=False)
        if self._rank != 0:
            written = self._written()
            for received in changed:
                received.reported = self._own_digest(received, written)
        own_files = {key: arena.own_file for key, arena in arenas.items()}
        return report, {key: file for key, file in own_files.items() if file is not None}

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
