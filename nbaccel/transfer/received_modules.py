"""The modules that a worker received through an arena: what happens to their weights there.

    staging files ◄───── write_weights: rank 0's changed pages; of sharded tensors everyone's piece
        │ read by the notebook, once every rank has written all of it
    arena file
        │ private map
    worker's tensors ──► share_equal_pages: pages equal to the file are given back, shared again
                     ◄── adopt: the notebook wrote to the weights: what was written here goes

A tensor that left the arena (moved to a device, sharded, given another dtype) is copied instead.
Where an optimizer is about to step most of an arena, rank 0 trains in a file of its own, which then
is its staging file: see [Note: training in place] in `transfer.weight_sync`.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from nbaccel.base import torch_private
from nbaccel.base.errors import InternalError
from nbaccel.transfer import memfd, sharded_tensors, weight_checks, weight_sync
from nbaccel.transfer.arena import Slot, is_in_arena, named_tensors
from nbaccel.transfer.namespace_update import Update

# The arena's alignment. Padding between tensors belongs to none of them, so it may be dropped too:
# whole pages can then be given back.
_SLOT_ALIGNMENT = 64


@dataclass(eq=False)
class _LocalArena:
    """A worker's own descriptor of an arena, and its private mapping."""

    fd: int
    mapping: memfd.Mapping
    """It closes the descriptor when it goes, which is with the last tensor that lives in it."""
    training_file: int | None = None
    """Descriptor of the file that the mapping shows instead, where this rank trains in one."""
    is_handed_over: bool = False
    """Whether every byte of that file was in the last report."""

    @classmethod
    def open(cls, file_descriptor: int, num_bytes: int) -> _LocalArena:
        """Map an arena; the descriptor stays the caller's."""
        # A copy, because the caller closes the descriptor that came with the message.
        descriptor = os.dup(file_descriptor)
        try:
            mapping = memfd.Mapping(descriptor, num_bytes, is_private=True)
        except BaseException:  # an interrupt must not leak the descriptor either
            os.close(descriptor)
            raise
        file = weakref.finalize(mapping, os.close, descriptor)
        file.atexit = False  # a process that ends closes it anyway
        return cls(descriptor, mapping)

    def written(self) -> list[memfd.ByteRange]:
        """What this rank has written to it."""
        whole = [(0, self.mapping.nbytes)]
        return self.mapping.written() if self.training_file is None else whole

    def equal_runs(self, spans: list[memfd.ByteRange]) -> Iterator[memfd.ByteRange]:
        """What of these bytes is here as it is in the notebook."""
        # The private mapping would show this worker's own pages.
        shared_mapping = memfd.Mapping(self.fd, self.mapping.nbytes, is_private=False)
        return memfd.equal_runs(self.mapping.bytes(), shared_mapping.bytes(), spans)

    def train_in_file(self) -> None:
        """Let the mapping show and write a new file from now on."""
        file_descriptor = memfd.create_file("staging", self.mapping.nbytes)
        try:
            weight_sync.move_mapping_to_file(self.mapping, file_descriptor)
        except BaseException:  # an interrupt must not leak the descriptor either
            os.close(file_descriptor)
            raise
        self.training_file = file_descriptor

    def leave_file(self) -> None:
        """Map the arena again, privately; what it does not say is kept as private pages."""
        whole = [(0, self.mapping.nbytes)]
        # The mapping keeps its address when replaced, so `own_bytes` shows the arena afterwards.
        own_bytes = self.mapping.bytes()
        kept_ranges = []
        if not self.is_handed_over:
            kept_ranges = [
                # Copied, because replacing the mapping takes these pages away.
                (byte_range, own_bytes[slice(*byte_range)].copy())
                for byte_range in memfd.ranges_without(whole, self.equal_runs(whole))
            ]
        self.mapping.replace(self.fd, is_private=True)
        for (first_byte, end_byte), new_values in kept_ranges:
            own_bytes[first_byte:end_byte] = new_values
        self.close_file()

    def close_file(self) -> None:
        """Close the descriptor of the file that this rank trains in."""
        if self.training_file is not None:
            os.close(self.training_file)
            self.training_file = None

    def show_again(self, first_byte: int, end_byte: int) -> None:
        """Let exactly these bytes show the notebook's values again."""
        page_bytes = memfd.PAGE_BYTES
        first_page = -(-first_byte // page_bytes) * page_bytes
        is_last = end_byte == self.mapping.nbytes
        pages_end = end_byte if is_last else end_byte // page_bytes * page_bytes
        copied_ranges = [(first_byte, end_byte)]
        # A file of this rank's own has no notebook pages beneath: all values are copied in.
        if self.training_file is None and first_page < pages_end:
            self.mapping.give_back(first_page, pages_end)
            # Pages at the edges also hold other modules' tensors: giving them back would undo
            # training.
            copied_ranges = [(first_byte, first_page), (pages_end, end_byte)]
        for low_byte, high_byte in copied_ranges:
            if low_byte < high_byte:
                memfd.read_at(self.fd, self.mapping.view(low_byte, high_byte), low_byte)


@dataclass(eq=False)
class _ReceivedModule:
    """A module of the notebook's, as it is here."""

    manifest: weight_sync.Manifest
    module: nn.Module
    origins: weight_checks.OriginalTensors
    notebook_names: tuple[str, ...]
    """Names of its tensors, as they were when it came or was last copied back."""
    notebook_state: Hashable = None
    """Of the tensors that left the arena: the state in which they were last copied back."""
    reported: str = ""
    """Digest of what this rank has trained, as it was reported last."""

    def tensor_names(self) -> tuple[str, ...]:
        return tuple(tensor_name for tensor_name, _ in named_tensors(self.module))

    def arena_keys(self) -> set[str]:
        return {arena_key for arena_key, _ in self.manifest.slots}


class ReceivedModules:
    """A worker's table of the notebook's modules, by key."""

    def __init__(self, *, own_rank: int, num_nodes: int = 1, share_back: bool = True) -> None:
        self._rank = own_rank
        self._num_nodes = num_nodes
        self._share_back = share_back
        self._arenas: dict[str, _LocalArena] = {}
        self._modules: dict[str, _ReceivedModule] = {}
        self._has_stepped = False
        self._held = sharded_tensors.HeldParts()
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Optimizers that have been looked at since weights were last copied back."""
        _report_steps(self)

    @property
    def mappings(self) -> dict[str, memfd.Mapping]:
        """This worker's mappings of the arenas, by key."""
        return {key: local_arena.mapping for key, local_arena in self._arenas.items()}

    def module(self, module_key: str) -> nn.Module:
        """The module that the notebook knows under this key."""
        if module_key not in self._modules:
            raise InternalError(
                f"rank {self._rank} has no module {module_key}, only {sorted(self._modules)}. "
                "Please report this."
            )
        return self._modules[module_key].module

    def open_arena(self, arena_key: str, num_bytes: int, file_descriptor: int) -> None:
        """Map an arena, unless this worker has it."""
        if arena_key not in self._arenas:
            self._arenas[arena_key] = _LocalArena.open(file_descriptor, num_bytes)

    def add(
        self, module_key: str, module_manifest: weight_sync.Manifest, module: nn.Module
    ) -> None:
        """A module arrived whole."""
        received = _ReceivedModule(
            module_manifest, module, weight_checks.original_tensors_of(module), ()
        )
        self._modules[module_key] = received
        self._note_equal(received)

    def _note_equal(self, received: _ReceivedModule) -> None:
        """The notebook has what there is here."""
        received.notebook_state = self._departed_state(received)
        received.notebook_names = received.tensor_names()

    def forget(self, module_keys: Iterable[str], arena_keys: Iterable[str]) -> None:
        """Drop the entries of what the notebook no longer has. What the worker still uses stays."""
        for key in module_keys:
            self._modules.pop(key, None)
        for key in arena_keys:
            # Tensors that still live in an arena keep its mapping alive without this entry.
            local_arena = self._arenas.pop(key, None)
            if local_arena is not None:
                local_arena.close_file()

    # ------------------------------------------------------------------- from the notebook

    def apply(self, module_update: Update) -> None:
        """Apply what the notebook changed. Parts that do not exist here are passed over."""
        module = self.module(module_update.key)
        for name, tensor in named_tensors(module):
            # torch refuses to change requires_grad of a tensor that is not a leaf.
            if name in module_update.requires_grad and tensor.is_leaf:
                tensor.requires_grad_(module_update.requires_grad[name])
        for path, submodule in module.named_modules(remove_duplicate=False):
            submodule.training = module_update.training.get(path, submodule.training)
            submodule.__dict__.update(module_update.attributes.get(path, {}))
            for name in module_update.removed.get(path, ()):
                submodule.__dict__.pop(name, None)
        if module_update.adopt:
            self._adopt(self._modules[module_update.key])

    def _adopt(self, received: _ReceivedModule) -> None:
        for arena_key, local_arena in self._arenas.items():
            spans = memfd.merge_ranges(
                (
                    slot.start,
                    -(-(slot.start + slot.nbytes) // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT,
                )
                for owner_key, slot in received.manifest.slots
                if owner_key == arena_key
            )
            for first_byte, end_byte in spans:
                local_arena.show_again(first_byte, min(end_byte, local_arena.mapping.nbytes))
        with torch.no_grad():
            for slot, module_tensor, mapping in self._departed(received):
                if sharded_tensors.full_shape(module_tensor) == slot.shape:
                    sharded_tensors.fill_local_part(module_tensor, slot.view(mapping))
        # Adopting raises the version counters; without this it would look like training.
        received.notebook_state = self._departed_state(received)

    # ------------------------------------------------------------------- to the notebook

    def dirty(self) -> tuple[str, ...]:
        """Keys of the modules whose weights the notebook may not have got yet."""
        written_ranges = self._written()
        return tuple(
            key
            for key, received in self._modules.items()
            if self._has_changed(received, written_ranges)
            or self._is_trained_apart(received, written_ranges)
        )

    def _has_changed(
        self, received: _ReceivedModule, written_ranges: Mapping[str, list[memfd.ByteRange]]
    ) -> bool:
        """Whether this rank has something of a module that the notebook is to get."""
        state = self._departed_state(received)
        # Some optimizers write weights without raising torch's counter, hence the step as well.
        if state is not None and (self._has_stepped or state != received.notebook_state):
            return True
        return self._rank == 0 and (
            _overlaps_written(received.manifest, written_ranges)
            # Nothing comes home of it, and that is told.
            or received.notebook_names != received.tensor_names()
        )

    def _is_trained_apart(
        self, received: _ReceivedModule, written_ranges: Mapping[str, list[memfd.ByteRange]]
    ) -> bool:
        """Whether it is to be told that this rank has trained what the notebook gets of rank 0."""
        if self._rank == 0:
            return False
        digest = self._own_digest(received, written_ranges)
        return bool(digest) and digest != received.reported

    def _own_digest(
        self, received: _ReceivedModule, written_ranges: Mapping[str, list[memfd.ByteRange]]
    ) -> str:
        """Digest of what this rank has written of a module; empty if nothing."""
        # An arena that the notebook has dropped cannot be compared.
        if not self._arenas.keys() >= received.arena_keys():
            return ""
        return weight_checks.fingerprint_of(
            received.manifest.slots, received.module, self.mappings, written_ranges, own_only=True
        )

    def _written(self) -> dict[str, list[memfd.ByteRange]]:
        keys = {key for received in self._modules.values() for key in received.arena_keys()}
        return {key: self._arenas[key].written() for key in keys & self._arenas.keys()}

    def _departed_state(self, received: _ReceivedModule) -> Hashable:
        """Changes when a tensor outside the arena that this rank copies back changes."""
        tensor_states = tuple(
            (slot.name, id(module_tensor), torch_private.tensor_version(module_tensor))
            for slot, module_tensor, _ in self._departed(received)
            if self._rank == 0 or sharded_tensors.is_sharded(module_tensor)
        )
        return tensor_states or None

    def _departed(
        self, received: _ReceivedModule
    ) -> Iterator[tuple[Slot, torch.Tensor, memfd.Mapping]]:
        module_tensors = dict(named_tensors(received.module))
        for key, slot in received.manifest.slots:
            module_tensor = module_tensors.get(slot.name)
            local_arena = self._arenas.get(key)
            if (
                module_tensor is None
                or local_arena is None
                or is_in_arena(module_tensor, slot, local_arena.mapping)
            ):
                continue
            yield slot, module_tensor, local_arena.mapping

    def write_weights(
        self, staging_files: Mapping[str, int]
    ) -> tuple[weight_sync.WeightReport, dict[str, int]]:
        """Write what this rank owes of the changed modules into staging files."""
        changed_modules = [
            received
            for received in map(self._modules.__getitem__, self.dirty())
            if staging_files.keys() >= received.arena_keys() & self._arenas.keys()
        ]
        used_keys = {key for received in changed_modules for key in received.arena_keys()}
        used_arenas = {key: self._arenas[key] for key in sorted(used_keys & self._arenas.keys())}
        own_files = {
            key: local_arena.training_file
            for key, local_arena in used_arenas.items()
            if local_arena.training_file is not None
        }
        weight_report = weight_sync.WeightWriter(
            own_rank=self._rank,
            shared_modules=[(received.manifest, received.module) for received in changed_modules],
            arena_mappings={key: local_arena.mapping for key, local_arena in used_arenas.items()},
            staging_files={key: staging_files[key] for key in used_arenas},
            num_nodes=self._num_nodes,
            held_parts=self._held,
            in_files=own_files,
            original_tensors={
                received.manifest.path: received.origins for received in changed_modules
            },
            keeps_states=False,
            arena_files={key: local_arena.fd for key, local_arena in used_arenas.items()},
        ).write()
        if self._rank != 0:
            written_ranges = self._written()
            for received in changed_modules:
                received.reported = self._own_digest(received, written_ranges)
        # A stranded module's bytes were not taken by the notebook, so its arena does not count.
        kept_keys = {
            key
            for received in self._modules.values()
            if received.manifest.path in weight_report.stranded
            for key in received.arena_keys()
        }
        for key, local_arena in self._arenas.items():
            local_arena.is_handed_over = key in own_files.keys() - kept_keys
        return weight_report, own_files

    def share_equal_pages(self) -> None:
        """The notebook has the weights: give back private pages that are equal to the arena's."""
        for received in self._modules.values():
            self._note_equal(received)
        self._has_stepped = False
        self._seen.clear()
        for key, spans in self._written().items():
            local_arena = self._arenas[key]
            if local_arena.training_file is not None:
                local_arena.leave_file()
                continue
            for equal_range in local_arena.equal_runs(spans):
                local_arena.mapping.give_back(*equal_range)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to make a step: rank 0 trains in its own files from now on."""
        self._has_stepped = True
        self._held.hold_for(optimizer, (received.module for received in self._modules.values()))
        if self._rank != 0 or not self._share_back or optimizer in self._seen:
            return
        self._seen.add(optimizer)
        unmoved_mappings = {
            key: local_arena.mapping
            for key, local_arena in self._arenas.items()
            if local_arena.training_file is None
        }
        for key in weight_sync.arenas_to_train_in(unmoved_mappings, optimizer):
            # Without room for the file, training goes on in private pages, which are copied later.
            with contextlib.suppress(OSError):
                self._arenas[key].train_in_file()


def _overlaps_written(
    module_manifest: weight_sync.Manifest, written_ranges: Mapping[str, list[memfd.ByteRange]]
) -> bool:
    return any(
        first_byte < slot.start + slot.nbytes and slot.start < end_byte
        for key, slot in module_manifest.slots
        for first_byte, end_byte in written_ranges.get(key, ())
    )


def _report_steps(received_modules: ReceivedModules) -> None:
    """Report every optimizer's steps: some write weights without raising torch's counter."""
    # Weak: torch keeps the hook, and it must not keep the modules alive.
    modules_reference = weakref.ref(received_modules)

    def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        living_modules = modules_reference()
        if living_modules is not None:
            living_modules.before_step(optimizer)

    # The hook is torch's and global: without this it would outlive the pool.
    weakref.finalize(received_modules, register_optimizer_step_pre_hook(before_step).remove)
