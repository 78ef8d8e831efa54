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
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from nbaccel.base import torch_private
from nbaccel.base.errors import InternalError
from nbaccel.transfer import (
    memfd,
    page_comparison,
    sharded_tensors,
    training_in_place,
    weight_checks,
    weight_sync,
)
from nbaccel.transfer.arena import Slot, is_in_arena, named_tensors
from nbaccel.transfer.namespace_update import Update

__all__ = ["ReceivedModules"]


@dataclass(frozen=True)
class _LocalArena:
    """A worker's own descriptor of an arena, and its private mapping."""

    fd: int
    mapping: memfd.Mapping
    """It closes the descriptor when it goes, which is with the last tensor that lives in it."""

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

    def as_the_notebook_sees_it(self) -> memfd.Mapping:
        return memfd.Mapping(self.fd, self.mapping.nbytes, is_private=False)


class ReceivedModules:
    """A worker's table of the notebook's modules, by key."""

    def __init__(self, *, own_rank: int, num_nodes: int = 1, share_back: bool = True) -> None:
        self._rank = own_rank
        self._num_nodes = num_nodes
        self._share_back = share_back
        self._arenas: dict[str, _LocalArena] = {}
        self._modules: dict[str, tuple[weight_sync.Manifest, nn.Module]] = {}
        self._origins: dict[str, weight_checks.OriginalTensors] = {}
        self._reported: dict[str, str] = {}
        """Digests of what this rank has trained, as they were reported last, by module."""
        self._notebook_states: dict[str, Hashable] = {}
        """Of the tensors that left the arena: the state in which they were last copied back."""
        self._known_names: dict[str, tuple[str, ...]] = {}
        """Names of a module's tensors, as they were when it came or was last copied back."""
        self._has_stepped = False
        self._held = sharded_tensors.HeldParts()
        self._in_files: dict[str, int] = {}
        """Descriptors of the files that this rank trains in, by key of the arena."""
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Optimizers that have been looked at since weights were last copied back."""
        self._handed_over: frozenset[str] = frozenset()
        """Keys of the arenas of which every byte was in the last report."""
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
        return self._modules[module_key][1]

    def open_arena(self, arena_key: str, num_bytes: int, file_descriptor: int) -> None:
        """Map an arena, unless this worker has it."""
        if arena_key not in self._arenas:
            self._arenas[arena_key] = _LocalArena.open(file_descriptor, num_bytes)

    def add(
        self, module_key: str, module_manifest: weight_sync.Manifest, module: nn.Module
    ) -> None:
        """A module arrived whole."""
        self._modules[module_key] = (module_manifest, module)
        self._origins[module_key] = weight_checks.original_tensors_of(module)
        self._reported.pop(module_key, None)
        self._notebook_states[module_key] = self._departed_state(module_key)
        self._known_names[module_key] = self._tensor_names(module_key)

    def forget(self, module_keys: Iterable[str], arena_keys: Iterable[str]) -> None:
        """Drop the entries of what the notebook no longer has. What the worker still uses stays."""
        for key in module_keys:
            for table in (
                self._modules,
                self._origins,
                self._reported,
                self._notebook_states,
                self._known_names,
            ):
                table.pop(key, None)
        # Tensors that still live in an arena keep its mapping alive without this entry.
        for key in arena_keys:
            self._arenas.pop(key, None)
            self._stop_training_in(key)

    # ------------------------------------------------------------------- from the notebook

    def apply(self, module_update: Update) -> None:
        """Apply what the notebook changed. Parts that do not exist here are passed over."""
        module = self.module(module_update.key)
        module_tensors = dict(named_tensors(module))
        named_submodules = dict(module.named_modules(remove_duplicate=False))
        for tensor_name, flag_value in module_update.requires_grad.items():
            # torch refuses to change requires_grad of a tensor that is not a leaf.
            if tensor_name in module_tensors and module_tensors[tensor_name].is_leaf:
                module_tensors[tensor_name].requires_grad_(flag_value)
        for path, flag_value in module_update.training.items():
            if path in named_submodules:
                named_submodules[path].training = flag_value
        for path, new_values in module_update.attributes.items():
            if path in named_submodules:
                named_submodules[path].__dict__.update(new_values)
        for path, removed_names in module_update.removed.items():
            for tensor_name in removed_names if path in named_submodules else ():
                named_submodules[path].__dict__.pop(tensor_name, None)
        if module_update.adopt:
            self._adopt(module_update.key)

    def _adopt(self, module_key: str) -> None:
        module_manifest, module = self._modules[module_key]
        for arena_key, local_arena in self._arenas.items():
            spans = memfd.merge_ranges(
                (
                    slot.start,
                    -(-(slot.start + slot.nbytes) // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT,
                )
                for owner_key, slot in module_manifest.slots
                if owner_key == arena_key
            )
            for first_byte, end_byte in spans:
                self._let_go(arena_key, first_byte, min(end_byte, local_arena.mapping.nbytes))
        with torch.no_grad():
            for slot, module_tensor, mapping in self._departed(module_manifest, module):
                if sharded_tensors.full_shape(module_tensor) == slot.shape:
                    sharded_tensors.fill_local_part(module_tensor, slot.view(mapping))
        # Adopting raises the version counters; without this it would look like training.
        self._notebook_states[module_key] = self._departed_state(module_key)

    # ------------------------------------------------------------------- to the notebook

    def dirty(self) -> tuple[str, ...]:
        """Keys of the modules whose weights the notebook may not have got yet."""
        # The notebook gets rank 0's weights; other ranks only report that theirs differ.
        changes = self._changed_modules()
        return tuple(changes) if self._rank == 0 else (*changes, *self._trained_apart(changes))

    def _trained_apart(self, other_keys: Collection[str]) -> Iterator[str]:
        """Modules that this rank has trained, though rank 0's are what the notebook gets."""
        written_ranges = self._written()
        for module_key in self._modules.keys() - set(other_keys):
            digest = self._own_digest(module_key, written_ranges)
            if digest and digest != self._reported.get(module_key):
                yield module_key

    def _own_digest(
        self, module_key: str, written_ranges: Mapping[str, list[memfd.ByteRange]]
    ) -> str:
        """Digest of what this rank has written of a module; empty if nothing."""
        (module_manifest, module) = self._modules[module_key]
        mappings = self.mappings
        # An arena that the notebook has dropped cannot be compared.
        if not mappings.keys() >= {arena_key for arena_key, _ in module_manifest.slots}:
            return ""
        return weight_checks.fingerprint_of(
            module_manifest.slots, module, mappings, written_ranges, own_only=True
        )

    def _used_by(self, module_keys: Iterable[str]) -> tuple[str, ...]:
        keys = {
            arena_key
            for module_key in module_keys
            for arena_key, _ in self._modules[module_key][0].slots
        }
        return tuple(sorted(keys & self._arenas.keys()))

    def _changed_modules(self) -> list[str]:
        written_ranges = self._written() if self._rank == 0 else {}
        return [
            key
            for key, (module_manifest, _) in self._modules.items()
            if _overlaps_written(module_manifest, written_ranges)
            or self._has_changed_elsewhere(key)
            # Nothing comes home of it, and that is told.
            or (self._rank == 0 and self._known_names[key] != self._tensor_names(key))
        ]

    def _tensor_names(self, key: str) -> tuple[str, ...]:
        return tuple(tensor_name for tensor_name, _ in named_tensors(self._modules[key][1]))

    def _written(self) -> dict[str, list[memfd.ByteRange]]:
        keys = {
            slot_key
            for module_manifest, _ in self._modules.values()
            for slot_key, _ in module_manifest.slots
        }
        return {
            arena_key: self._written_to(arena_key)
            for arena_key in keys
            if arena_key in self._arenas
        }

    def _written_to(self, key: str) -> list[memfd.ByteRange]:
        mapping = self._arenas[key].mapping
        return [(0, mapping.nbytes)] if key in self._in_files else mapping.written()

    def _has_changed_elsewhere(self, key: str) -> bool:
        state = self._departed_state(key)
        return state is not None and (
            # Some optimizers write weights without raising torch's counter, hence the step as well.
            self._has_stepped or state != self._notebook_states[key]
        )

    def _departed_state(self, key: str) -> Hashable:
        """Changes when a tensor outside the arena that this rank copies back changes."""
        tensor_states = tuple(
            (slot.name, id(module_tensor), torch_private.tensor_version(module_tensor))
            for slot, module_tensor, _ in self._departed(*self._modules[key])
            if self._rank == 0 or sharded_tensors.is_sharded(module_tensor)
        )
        return tensor_states or None

    def _departed(
        self, module_manifest: weight_sync.Manifest, module: nn.Module
    ) -> Iterator[tuple[Slot, torch.Tensor, memfd.Mapping]]:
        module_tensors = dict(named_tensors(module))
        for key, slot in module_manifest.slots:
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
        changed_keys = [
            module_key
            for module_key in self.dirty()
            if staging_files.keys() >= set(self._used_by([module_key]))
        ]
        used_arenas = self._used_by(changed_keys)
        own_files = {key: self._in_files[key] for key in used_arenas if key in self._in_files}
        writer = weight_sync.WeightWriter(
            own_rank=self._rank,
            shared_modules=[self._modules[key] for key in changed_keys],
            arena_mappings={key: self._arenas[key].mapping for key in used_arenas},
            staging_files={key: staging_files[key] for key in used_arenas},
            num_nodes=self._num_nodes,
            held_parts=self._held,
            in_files=own_files,
            original_tensors={
                self._modules[key][0].path: self._origins[key] for key in changed_keys
            },
            keeps_states=False,
            arena_files={key: self._arenas[key].fd for key in used_arenas},
        )
        weight_report = writer.write()
        if self._rank != 0:
            written_ranges = self._written()
            self._reported |= {key: self._own_digest(key, written_ranges) for key in changed_keys}
        kept_arenas = {
            key
            for module_manifest, _ in self._modules.values()
            if module_manifest.path in weight_report.stranded
            for key, _ in module_manifest.slots
        }
        # A stranded module's bytes were not taken by the notebook, so its arena does not count.
        self._handed_over = frozenset(own_files.keys() - kept_arenas)
        return weight_report, own_files

    def share_equal_pages(self) -> None:
        """The notebook has the weights: give back private pages that are equal to the arena's."""
        for key in self._modules:
            self._notebook_states[key] = self._departed_state(key)
            self._known_names[key] = self._tensor_names(key)
        self._has_stepped = False
        self._seen.clear()
        for key, spans in self._written().items():
            local_arena = self._arenas[key]
            if key in self._in_files:
                self._move_back(key, local_arena)
                continue
            # The private mapping would show this worker's own pages.
            notebook_bytes = local_arena.as_the_notebook_sees_it().bytes()
            own_bytes = local_arena.mapping.bytes()
            for equal_range in page_comparison.equal_runs(own_bytes, notebook_bytes, spans):
                local_arena.mapping.give_back(*equal_range)

    def _move_back(self, key: str, local_arena: _LocalArena) -> None:
        """Map the arena again, privately; what it does not say is kept as private pages."""
        # The mapping keeps its address when replaced, so `own_bytes` shows the arena afterwards.
        own_bytes = local_arena.mapping.bytes()
        kept_ranges = []
        if key not in self._handed_over:
            notebook_bytes = local_arena.as_the_notebook_sees_it().bytes()
            kept_ranges = [
                # Copied, because replacing the mapping takes these pages away.
                (byte_range, own_bytes[slice(*byte_range)].copy())
                for byte_range in page_comparison.different_runs(own_bytes, notebook_bytes)
            ]
        local_arena.mapping.replace(local_arena.fd, is_private=True)
        for (first_byte, end_byte), new_values in kept_ranges:
            own_bytes[first_byte:end_byte] = new_values
        self._stop_training_in(key)

    def _stop_training_in(self, key: str) -> None:
        file_descriptor = self._in_files.pop(key, None)
        if file_descriptor is not None:
            os.close(file_descriptor)

    def _let_go(self, key: str, first_byte: int, end_byte: int) -> None:
        """Let exactly these bytes show the notebook's values again."""
        local_arena = self._arenas[key]
        if key in self._in_files:
            # A file of this rank's own has no notebook pages beneath: the values are copied in.
            memfd.read_at(
                local_arena.fd, local_arena.mapping.view(first_byte, end_byte), first_byte
            )
        else:
            _give_back_range(local_arena, first_byte, end_byte)

    # ------------------------------------------------------------------- while it is trained

    def about_to_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Let rank 0 train in its own files from an optimizer's step on."""
        if self._rank != 0 or not self._share_back or optimizer in self._seen:
            return
        self._seen.add(optimizer)
        unmoved_mappings = {
            key: arena_mapping
            for key, arena_mapping in self.mappings.items()
            if key not in self._in_files
        }
        for key in training_in_place.arenas_to_train_in(
            unmoved_mappings,
            (group["params"] for group in optimizer.param_groups),
        ):
            # Without room for the file, training goes on in private pages, which are copied later.
            with contextlib.suppress(OSError):
                self._in_files[key] = _moved_in(unmoved_mappings[key])

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer made a step."""
        self._held.hold_for(optimizer, (module for _, module in self._modules.values()))
        self._has_stepped = True


def _moved_in(mapping: memfd.Mapping) -> int:
    """A new file that the mapping shows and writes from now on."""
    file_descriptor = memfd.create_file("staging", mapping.nbytes)
    try:
        training_in_place.move_mapping_to_file(mapping, file_descriptor)
    except BaseException:  # an interrupt must not leak the descriptor either
        os.close(file_descriptor)
        raise
    return file_descriptor


# The arena's alignment. Padding between tensors belongs to none of them, so it may be dropped too:
# whole pages can then be given back.
_SLOT_ALIGNMENT = 64


def _overlaps_written(
    module_manifest: weight_sync.Manifest, written_ranges: dict[str, list[memfd.ByteRange]]
) -> bool:
    return any(
        first_byte < slot.start + slot.nbytes and slot.start < end_byte
        for key, slot in module_manifest.slots
        for first_byte, end_byte in written_ranges.get(key, ())
    )


def _give_back_range(local_arena: _LocalArena, first_byte: int, end_byte: int) -> None:
    """Let exactly these bytes show the notebook's values again."""
    page_bytes = memfd.PAGE_BYTES
    first_page_byte = -(-first_byte // page_bytes) * page_bytes
    last_page_byte = (
        end_byte if end_byte == local_arena.mapping.nbytes else end_byte // page_bytes * page_bytes
    )
    if first_page_byte < last_page_byte:
        local_arena.mapping.give_back(first_page_byte, last_page_byte)
    edge_ranges = (
        [(first_byte, min(first_page_byte, end_byte)), (max(last_page_byte, first_byte), end_byte)]
        if first_page_byte < last_page_byte
        else [(first_byte, end_byte)]
    )
    # Pages at the edges also hold other modules' tensors: giving them back would undo training.
    for low_byte, high_byte in edge_ranges:
        if low_byte < high_byte:
            memfd.read_at(local_arena.fd, local_arena.mapping.view(low_byte, high_byte), low_byte)


def _report_steps(received_modules: ReceivedModules) -> None:
    """Report every optimizer's steps: some write weights without raising torch's counter."""
    # Weak: torch keeps the hooks, and they must not keep the modules alive.
    modules_reference = weakref.ref(received_modules)

    def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        living_modules = modules_reference()
        if living_modules is not None:
            living_modules.about_to_step(optimizer)

    def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        living_modules = modules_reference()
        if living_modules is not None:
            living_modules.stepped(optimizer)

    for handle in (
        register_optimizer_step_pre_hook(before_step),
        register_optimizer_step_post_hook(after_step),
    ):
        # The hooks are torch's and global: without this they would outlive the pool.
        weakref.finalize(received_modules, _remove_hook, handle)


def _remove_hook(handle: Any) -> None:
    with contextlib.suppress(KeyError):
        handle.remove()
