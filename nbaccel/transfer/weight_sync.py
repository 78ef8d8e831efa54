"""How trained weights are copied back: workers write staging files, the notebook reads them.

The workers' side is here, the notebook's in `weight_receiver`.

[Note: writing weights back] Every arena has a *staging* file of the same size and layout, made by
the notebook process for one launch. It is sparse: pages that are not written cost nothing. Workers
put trained values there; the notebook's arena is not touched before all ranks have returned. Then
the notebook reads what was written into the arena, once, into pages that it has mapped already.
(Mapping the staging file in the arena's place looks cheaper and is not: the page faults that follow
cost several copies.) A launch that fails drops the staging file.

[Note: training in place] Rank 0 would pay twice: once for the private page that its first optimizer
step writes, once for copying that page to the staging file at the end. So just before its first
step it copies the arena to the staging file, maps that file where its model lies, and trains right
there: no private pages, and nothing to copy at the end. This is done only where most of the arena
is about to be trained; otherwise the kernel's table of private pages tells what was written.

[Note: staging files of a rank's own] A live worker cannot know when the next cell will train, so
the file that its rank 0 trains in is made by the worker itself, and travels to the notebook with
the report. Such a file holds a whole arena; everything else goes to the staging files that the
notebook made, for all ranks.

A tensor that left the arena (moved to a device, given another dtype) is copied into its slot, cast
to the dtype the notebook has, as `load_state_dict` would; one that equals the notebook's own,
rounded to a shorter format, was not trained and stays as it is there. Of a sharded tensor (DTensor,
ZeRO) every rank writes its own piece, so that no process holds the whole; see `sharded_tensors`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from nbaccel.base.units import first_few
from nbaccel.transfer import (
    memfd,
    page_comparison,
    sharded_tensors,
    training_in_place,
    weight_checks,
)
from nbaccel.transfer.arena import (
    Sharing,
    Slot,
    is_in_arena,
    named_tensors,
)

__all__ = ["Manifest", "WeightReport", "WeightWriter", "module_manifests"]


_PART_REMEDY = (
    "rank 0's part of it is here. For all of it, gather the tensors on all ranks before the "
    "function returns (tensor.full_tensor(), or torch's get_model_state_dict with "
    "full_state_dict=True)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a worker must know of one shared module to write its weights back."""

    path: str
    slots: tuple[tuple[str, Slot], ...]
    """Key of the arena, and where in it the tensor lies."""


@dataclass(kw_only=True)
class WeightReport:
    """What one rank put into the staging files."""

    rank: int = 0
    complete: set[str] = field(default_factory=set)
    """Arenas whose staging file holds every byte."""
    written: dict[str, list[memfd.ByteRange]] = field(default_factory=dict)
    """Of the others, the bytes that were written."""
    own_bytes: dict[str, list[memfd.ByteRange]] = field(default_factory=dict)
    """Exactly the bytes that this rank put into the staging files it was given: of a sharded
    tensor its own piece. Who copies these files to another host copies no others."""
    stranded: dict[str, str] = field(default_factory=dict)
    """Path of a module whose weights could not be written back → why."""
    state_dicts: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    """Weights on the CPU, so that they are not lost: of modules that are stranded or changed."""
    changes: dict[str, str] = field(default_factory=dict)
    """Path of a module that is written back with a change → what is different."""
    fingerprints: dict[str, str] = field(default_factory=dict)
    """Path of a module that this rank has trained → digest of its parameters."""


def module_manifests(
    module_sharing: Sharing, arena_keys: Mapping[int, str]
) -> tuple[Manifest, ...]:
    """Describe the shared modules for a worker, with arenas named by their keys."""
    return tuple(
        Manifest(
            path=module.path,
            slots=tuple((arena_keys[id(arena)], slot) for arena, slot in module.slots),
        )
        for module in module_sharing.modules
    )


# ------------------------------------------------------------------------- in the worker


class WeightWriter:
    """A worker's side of writing back: watches the first optimizer step, writes at the end."""

    def __init__(
        self,
        *,
        own_rank: int,
        shared_modules: Sequence[tuple[Manifest, nn.Module]],
        arena_mappings: Mapping[str, memfd.Mapping],
        staging_files: Mapping[str, int],
        num_nodes: int = 1,
        held_parts: sharded_tensors.HeldParts | None = None,
        in_files: Mapping[str, int] | None = None,
        original_tensors: Mapping[str, weight_checks.OriginalTensors] | None = None,
        keeps_states: bool = True,
        arena_files: Mapping[str, int] | None = None,
    ) -> None:
        self._rank = own_rank
        self._num_nodes = num_nodes
        self._modules = shared_modules
        self._mappings = arena_mappings
        self._staging = staging_files
        self._in_files = dict(in_files or {})
        self._keeps_states = keeps_states
        self._arena_files = arena_files or {}
        self._origins = original_tensors or {
            module_manifest.path: weight_checks.original_tensors_of(module)
            for module_manifest, module in shared_modules
        }
        self._has_stepped = False
        self._sharded: dict[str, list[memfd.ByteRange]] = {}
        """Storages of which every rank writes a piece, by key of the arena."""
        self._held = held_parts or sharded_tensors.HeldParts()

    def watch_first_step(self) -> Callable[[], None]:
        """Arrange for rank 0 to train in the staging file. See [Note: training in place].

        Parts that an engine keeps beside the parameters are held on to, on every rank.
        """
        if not self._mappings:
            return lambda: None

        def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            # Not removed after the first step: torch iterates over its hooks while it calls them.
            self._held.hold_for(optimizer, (module for _, module in self._modules))
            # Only rank 0, because the notebook gets the model of rank 0.
            if not self._has_stepped and self._rank == 0:
                self._move_in(
                    parameter_group["params"] for parameter_group in optimizer.param_groups
                )
            self._has_stepped = True

        return register_optimizer_step_pre_hook(before_step).remove

    def _move_in(self, groups: Iterable[Iterable[torch.Tensor]]) -> None:
        for key in training_in_place.arenas_to_train_in(self._mappings, groups):
            training_in_place.move_mapping_to_file(self._mappings[key], self._staging[key])
            self._in_files[key] = self._staging[key]

    def write(self) -> WeightReport:
        """Put what this rank owes into the staging files. No communication."""
        weight_report = WeightReport(rank=self._rank)
        kept_slots: list[tuple[str, Slot]] = []
        written_ranges = {arena_key: self._written_to(arena_key) for arena_key in self._mappings}
        self._take_fingerprints(weight_report, written_ranges)
        for module_manifest, module in self._modules:
            current_tensors = dict(named_tensors(module))
            stranded_reason = _mismatch_reason(
                module_manifest, current_tensors
            ) or self._out_of_reach(current_tensors)
            stranded_reason = stranded_reason or weight_checks.untied_reason(
                module_manifest.slots, current_tensors
            )
            change_clause = ""
            if stranded_reason is None:
                self._write_departed(module_manifest, current_tensors, weight_report)
                change_clause = weight_checks.describe_changes(
                    module_manifest.slots,
                    current_tensors,
                    self._origins.get(module_manifest.path, {}),
                )
            elif self._rank == 0:
                weight_report.stranded[module_manifest.path] = stranded_reason
                kept_slots += module_manifest.slots
            if self._rank == 0 and change_clause:
                weight_report.changes[module_manifest.path] = change_clause
            if self._rank == 0 and self._keeps_states and (stranded_reason or change_clause):
                weight_report.state_dicts[module_manifest.path] = _on_cpu(module.state_dict())
        # After the loop: private pages must not overwrite the tensors that were written in it.
        if self._rank == 0:
            self._write_arenas(weight_report, kept_slots, written_ranges)
        return weight_report

    def _take_fingerprints(
        self,
        weight_report: WeightReport,
        written_ranges: Mapping[str, Sequence[memfd.ByteRange]],
    ) -> None:
        for module_manifest, module in self._modules:
            module_digest = weight_checks.fingerprint_of(
                module_manifest.slots, module, self._mappings, written_ranges
            )
            if module_digest:
                weight_report.fingerprints[module_manifest.path] = module_digest

    def _written_to(self, key: str) -> list[memfd.ByteRange]:
        mapping = self._mappings[key]
        return [(0, mapping.nbytes)] if key in self._in_files else mapping.written()

    def _out_of_reach(self, tensors: Mapping[str, torch.Tensor]) -> str | None:
        """Why pieces of sharded tensors cannot be put together here, if so."""
        sharded_by_name = {
            tensor_name: module_tensor
            for tensor_name, module_tensor in tensors.items()
            if sharded_tensors.is_sharded(module_tensor)
        }
        if sharded_by_name and self._num_nodes > 1:
            return (
                f"it is sharded over {self._num_nodes} nodes, each with a part only; {_PART_REMEDY}"
            )
        for tensor_name, tensor in sharded_by_name.items():
            odd_placements = sharded_tensors.odd_placements(tensor)
            if odd_placements:
                return (
                    f"{tensor_name} is placed as {odd_placements}, which no rank can undo alone; "
                    f"{_PART_REMEDY}"
                )
        return None

    def _write_arenas(
        self,
        weight_report: WeightReport,
        kept_slots: Sequence[tuple[str, Slot]],
        written_ranges: Mapping[str, Sequence[memfd.ByteRange]],
    ) -> None:
        """Write every private page, but none of modules that cannot be applied (`kept_slots`)."""
        for arena_key in self._mappings:
            # Rank 0 has trained in this file, so there is nothing to copy.
            if arena_key in self._in_files:
                weight_report.complete.add(arena_key)
                self._own_trained_file(arena_key, weight_report)
                continue
            taken_ranges = [
                (arena_slot.start, arena_slot.start + arena_slot.nbytes)
                for kept_key, arena_slot in kept_slots
                if kept_key == arena_key
            ]
            taken_ranges += weight_report.written.get(arena_key, [])
            for byte_span in self._changed(arena_key, written_ranges[arena_key]):
                self._write_around(arena_key, byte_span, taken_ranges, weight_report)

    def _changed(
        self, key: str, byte_ranges: Sequence[memfd.ByteRange]
    ) -> Sequence[memfd.ByteRange]:
        if key not in self._arena_files:
            return byte_ranges
        return page_comparison.changed_ranges(
            self._mappings[key], self._arena_files[key], byte_ranges
        )

    def _own_trained_file(self, key: str, weight_report: WeightReport) -> None:
        """Report as this rank's what it has trained in, without the other ranks' pieces."""
        if self._is_in_training(key):
            weight_report.own_bytes.setdefault(key, []).extend(
                memfd.gaps_between(
                    memfd.merge_ranges(self._sharded.get(key, [])),
                    self._mappings[key].nbytes,
                )
            )

    def _write_around(
        self,
        arena_key: str,
        byte_span: memfd.ByteRange,
        taken_ranges: Sequence[memfd.ByteRange],
        weight_report: WeightReport,
    ) -> None:
        """Write a run of private pages, but not over tensors that came from a device."""
        arena_mapping = self._mappings[arena_key]
        taken_ranges = [
            taken_range
            for taken_range in taken_ranges
            if taken_range[0] < byte_span[1] and byte_span[0] < taken_range[1]
        ]
        shifted_ranges = memfd.merge_ranges(
            (
                max(range_start, byte_span[0]) - byte_span[0],
                min(range_end, byte_span[1]) - byte_span[0],
            )
            for range_start, range_end in taken_ranges
        )
        for gap_start, gap_end in memfd.gaps_between(shifted_ranges, byte_span[1] - byte_span[0]):
            own_range = (byte_span[0] + gap_start, byte_span[0] + gap_end)
            memfd.write_at(self._staging[arena_key], arena_mapping.view(*own_range), own_range[0])
            weight_report.written.setdefault(arena_key, []).append(own_range)
            weight_report.own_bytes.setdefault(arena_key, []).append(own_range)

    def _write_departed(
        self,
        module_manifest: Manifest,
        current_tensors: Mapping[str, torch.Tensor],
        weight_report: WeightReport,
    ) -> None:
        """Copy tensors that no longer live in the arena into their slots of the staging file."""
        written_places: set[tuple[str, int, int]] = set()
        seeded_storages: set[tuple[str, int]] = set()
        for arena_key, arena_slot in module_manifest.slots:
            current_tensor = current_tensors[arena_slot.name].detach()
            is_sharded = sharded_tensors.is_sharded(current_tensors[arena_slot.name])
            # Every rank has a copy of a whole tensor, and rank 0's counts; of a sharded one each a
            # part.
            is_own_part = is_sharded or self._rank == 0
            tensor_place = (arena_key, arena_slot.start, arena_slot.offset)
            if (
                not is_own_part
                or tensor_place in written_places
                or is_in_arena(current_tensor, arena_slot, self._mappings[arena_key])
            ):
                continue
            written_places.add(tensor_place)
            # Of what an engine shards (ZeRO, FSDP), its own copy counts, and this one may be stale.
            if not is_sharded and (arena_key, arena_slot.start) not in seeded_storages:
                # Seeding a second time would undo what is written below.
                seeded_storages.add((arena_key, arena_slot.start))
                self._seed(arena_key, arena_slot, current_tensor, weight_report)
            # Mapped shared, because all ranks write their pieces of a sharded tensor into this
            # file.
            target_view = arena_slot.view(
                memfd.Mapping(
                    self._staging[arena_key], self._mappings[arena_key].nbytes, is_private=False
                )
            )
            whole_tensor = current_tensors[arena_slot.name]
            own_pieces = sharded_tensors.pieces(
                whole_tensor if is_sharded else current_tensor, self._held.of(whole_tensor)
            )
            piece_ranges = self._put_pieces(
                own_pieces, target_view, arena_slot.view(self._mappings[arena_key]), whole_tensor
            )
            self._note_departed(arena_key, arena_slot, weight_report, piece_ranges)
            if is_sharded:
                slot_range = (arena_slot.start, arena_slot.start + arena_slot.nbytes)
                self._sharded.setdefault(arena_key, []).append(slot_range)

    def _put_pieces(
        self,
        own_pieces: Iterable[tuple[sharded_tensors.PieceSpot, torch.Tensor]],
        target_view: torch.Tensor,
        notebook_values: torch.Tensor,
        whole_tensor: torch.Tensor,
    ) -> list[memfd.ByteRange]:
        """Copy what this rank has of a tensor; returns which bytes of its storage that are."""
        written_ranges = []
        for piece_spot, piece_values in own_pieces:
            unrounded_piece = sharded_tensors.unrounded_values(
                piece_values.detach(), notebook_values, piece_spot, whole_tensor.dtype
            )
            sharded_tensors.put_piece(target_view, piece_spot, unrounded_piece)
            written_ranges += sharded_tensors.piece_ranges(
                target_view, piece_spot, piece_values.numel()
            )
        return written_ranges

    def _note_departed(
        self,
        key: str,
        slot: Slot,
        weight_report: WeightReport,
        piece_ranges: Iterable[memfd.ByteRange],
    ) -> None:
        # What it trains in is reported as a whole.
        ranges = weight_report.own_bytes.setdefault(key, [])
        ranges += (
            (slot.start + first_byte, slot.start + end_byte)
            for first_byte, end_byte in piece_ranges
        )
        if not self._is_in_training(key):
            slot_range = (slot.start, slot.start + slot.nbytes)
            weight_report.written.setdefault(key, []).append(slot_range)

    def _seed(
        self,
        key: str,
        slot: Slot,
        tensor: torch.Tensor,
        weight_report: WeightReport,
    ) -> None:
        """Fill the slot's storage first, where other tensors view parts of it too."""
        # A tensor that covers the storage overwrites it all, so seeding would be wasted.
        covers_storage = tensor.numel() * slot.dtype.itemsize == slot.nbytes
        if not covers_storage and not self._is_in_training(key):
            span = (slot.start, slot.start + slot.nbytes)
            memfd.write_at(self._staging[key], self._mappings[key].view(*span), span[0])
            weight_report.own_bytes.setdefault(key, []).append(span)

    def _is_in_training(self, key: str) -> bool:
        """Whether the arena's staging file is the very one that this rank trains in."""
        return self._in_files.get(key) == self._staging[key]


def _mismatch_reason(module_manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> str | None:
    """Why the module no longer fits the notebook's, if so."""
    expected_shapes = {arena_slot.name: arena_slot.shape for _, arena_slot in module_manifest.slots}
    shapes = {
        tensor_name: sharded_tensors.full_shape(tensor) for tensor_name, tensor in tensors.items()
    }
    # Empty tensors have no slot in the notebook, so they must not count as new here.
    nonempty_shapes = {
        tensor_name: whole_shape
        for tensor_name, whole_shape in shapes.items()
        if math.prod(whole_shape)
    }
    mismatch_lines = [
        f"{tensor_name} is gone" for tensor_name in expected_shapes.keys() - nonempty_shapes.keys()
    ]
    mismatch_lines += [
        f"{tensor_name} is new" for tensor_name in nonempty_shapes.keys() - expected_shapes.keys()
    ]
    mismatch_lines += [
        f"{tensor_name} has shape {nonempty_shapes[tensor_name]} instead of {whole_shape}"
        for tensor_name, whole_shape in expected_shapes.items()
        if tensor_name in nonempty_shapes and nonempty_shapes[tensor_name] != whole_shape
    ]
    if not mismatch_lines:
        return None
    return first_few(sorted(mismatch_lines), 3, separator="; ")


def _on_cpu(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _value_on_cpu(value)
        # A state dict may hold other objects, too (`get_extra_state`).
        if isinstance(value, torch.Tensor)
        else value
        for key, value in state.items()
    }


def _value_on_cpu(tensor: Any) -> torch.Tensor:
    values: torch.Tensor = tensor.detach()
    if sharded_tensors.is_dtensor(tensor):
        values = tensor.detach().to_local()
    return values.cpu()
