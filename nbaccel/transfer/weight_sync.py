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
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from nbaccel.base.units import first_few
from nbaccel.transfer import memfd, sharded_tensors, weight_checks
from nbaccel.transfer.arena import PLAIN, Arena, Slot, is_in_arena, named_tensors

_PART_REMEDY = (
    "rank 0's part of it is here. For all of it, gather the tensors on all ranks before the "
    "function returns (tensor.full_tensor(), or torch's get_model_state_dict with "
    "full_state_dict=True)"
)

# Share of an arena's bytes that is about to be trained. Training in place copies the whole arena
# once, otherwise the trained part is copied twice: half is where both cost the same.
_IN_PLACE_SHARE = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a worker must know of one shared module to write its weights back."""

    path: str
    slots: tuple[tuple[str, Slot], ...]
    """Key of the arena, and where in it the tensor lies."""

    @classmethod
    def of(cls, path: str, slots: Iterable[tuple[Arena, Slot]]) -> Manifest:
        """Describe a module for a worker."""
        return cls(path=path, slots=tuple((arena.key, slot) for arena, slot in slots))


@dataclass(kw_only=True)
class WeightReport:
    """What one rank put into the staging files."""

    rank: int = 0
    own_bytes: dict[str, list[memfd.ByteRange]] = field(default_factory=dict)
    """Exactly the bytes that this rank has put into each staging file: of a sharded tensor its own
    piece."""
    stranded: dict[str, str] = field(default_factory=dict)
    """Path of a module whose weights could not be written back → why."""
    state_dicts: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    """Weights on the CPU, so that they are not lost: of modules that are stranded or changed."""
    changes: dict[str, str] = field(default_factory=dict)
    """Path of a module that is written back with a change → what is different."""
    fingerprints: dict[str, str] = field(default_factory=dict)
    """Path of a module that this rank has trained → digest of its parameters."""


# ------------------------------------------------------------------------- training in place


def arenas_to_train_in(
    arena_mappings: Mapping[str, memfd.Mapping], optimizer: torch.optim.Optimizer
) -> list[str]:
    """Which arenas are worth training in a file. See [Note: training in place]."""
    trained_parameters = {
        id(parameter): parameter
        for parameter_group in optimizer.param_groups
        for parameter in parameter_group["params"]
        if parameter.requires_grad
    }
    keys = []
    for arena_key, arena_mapping in arena_mappings.items():
        parameter_spans = (
            _span_in(arena_mapping, parameter) for parameter in trained_parameters.values()
        )
        # Merged first: tied parameters and views of one storage would count twice.
        trained_bytes = memfd.total_bytes(
            memfd.merge_ranges(byte_span for byte_span in parameter_spans if byte_span)
        )
        if trained_bytes >= _IN_PLACE_SHARE * arena_mapping.nbytes:
            keys.append(arena_key)
    return keys


def move_mapping_to_file(arena_mapping: memfd.Mapping, file_descriptor: int) -> None:
    """Copy what a mapping shows to a file, and let the mapping show and write that file."""
    memfd.write_at(file_descriptor, arena_mapping.view(0, arena_mapping.nbytes), 0)
    # In this order: the mapping must never show a file that has not been filled.
    arena_mapping.replace(file_descriptor, is_private=False)


def _span_in(mapping: memfd.Mapping, tensor: torch.Tensor) -> memfd.ByteRange | None:
    if tensor.device.type != "cpu" or type(tensor) not in PLAIN:
        return None
    tensor_storage = tensor.untyped_storage()
    if not mapping.contains(tensor_storage.data_ptr(), tensor_storage.nbytes()):
        return None
    first_byte = tensor_storage.data_ptr() - mapping.address
    return (first_byte, first_byte + tensor_storage.nbytes())


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
        in_files: Collection[str] = (),
        original_tensors: Mapping[str, weight_checks.OriginalTensors] | None = None,
        keeps_states: bool = True,
        arena_files: Mapping[str, int] | None = None,
    ) -> None:
        self._rank = own_rank
        self._num_nodes = num_nodes
        self._modules = shared_modules
        self._mappings = arena_mappings
        self._staging = staging_files
        self._in_files = frozenset(in_files)
        """Arenas that this rank has trained in files of its own."""
        self._in_staging: set[str] = set()
        """Arenas that this rank trains in their staging files."""
        self._keeps_states = keeps_states
        self._arena_files = arena_files or {}
        self._origins = original_tensors or {
            module_manifest.path: weight_checks.original_tensors_of(module)
            for module_manifest, module in shared_modules
        }
        self._has_stepped = False
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
                for key in arenas_to_train_in(self._mappings, optimizer):
                    move_mapping_to_file(self._mappings[key], self._staging[key])
                    self._in_staging.add(key)
            self._has_stepped = True

        return register_optimizer_step_pre_hook(before_step).remove

    def write(self) -> WeightReport:
        """Put what this rank owes into the staging files. No communication."""
        weight_report = WeightReport(rank=self._rank)
        own_bytes: defaultdict[str, list[memfd.ByteRange]] = defaultdict(list)
        # Private pages must not overwrite these: they are written by themselves, or not at all.
        settled_slots: list[tuple[str, Slot]] = []
        written_ranges = {arena_key: self._written_to(arena_key) for arena_key in self._mappings}
        self._take_fingerprints(weight_report, written_ranges)
        for module_manifest, module in self._modules:
            current_tensors = dict(named_tensors(module))
            stranded_reason = self._stranded_reason(module_manifest, current_tensors)
            if stranded_reason:
                settled_slots += module_manifest.slots
            else:
                settled_slots += self._write_departed(module_manifest, current_tensors, own_bytes)
            if self._rank == 0:
                self._report(module_manifest, module, stranded_reason, weight_report)
        if self._rank == 0:
            self._write_arenas(settled_slots, written_ranges, own_bytes)
        weight_report.own_bytes |= own_bytes
        return weight_report

    def _report(
        self,
        module_manifest: Manifest,
        module: nn.Module,
        stranded_reason: str,
        weight_report: WeightReport,
    ) -> None:
        """Note what the notebook's module will not have as it is here."""
        path = module_manifest.path
        change_clause = ""
        if stranded_reason:
            weight_report.stranded[path] = stranded_reason
        else:
            change_clause = weight_checks.describe_changes(
                module_manifest.slots, dict(named_tensors(module)), self._origins.get(path, {})
            )
        if change_clause:
            weight_report.changes[path] = change_clause
        if self._keeps_states and (stranded_reason or change_clause):
            weight_report.state_dicts[path] = _on_cpu(module.state_dict())

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
        is_in_file = key in self._in_files or key in self._in_staging
        return [(0, mapping.nbytes)] if is_in_file else mapping.written()

    def _stranded_reason(
        self, module_manifest: Manifest, current_tensors: Mapping[str, torch.Tensor]
    ) -> str:
        """Why the module cannot be written back; empty if it can."""
        return (
            _mismatch_reason(module_manifest, current_tensors)
            or self._out_of_reach(current_tensors)
            or weight_checks.untied_reason(module_manifest.slots, current_tensors)
            or ""
        )

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
        settled_slots: Sequence[tuple[str, Slot]],
        written_ranges: Mapping[str, list[memfd.ByteRange]],
        own_bytes: defaultdict[str, list[memfd.ByteRange]],
    ) -> None:
        """Write every private page that has changed, around what is settled."""
        for key, mapping in self._mappings.items():
            # The notebook gets the file of this rank's own.
            if key in self._in_files:
                continue
            byte_ranges = written_ranges[key]
            if key in self._arena_files and key not in self._in_staging:
                byte_ranges = memfd.changed_ranges(mapping, self._arena_files[key], byte_ranges)
            settled_ranges = [
                (slot.start, slot.start + slot.nbytes)
                for slot_key, slot in settled_slots
                if slot_key == key
            ]
            for first_byte, end_byte in memfd.ranges_without(byte_ranges, settled_ranges):
                # Where rank 0 has trained in this file, there is nothing to copy.
                if key not in self._in_staging:
                    memfd.write_at(
                        self._staging[key], mapping.view(first_byte, end_byte), first_byte
                    )
                own_bytes[key].append((first_byte, end_byte))

    def _write_departed(
        self,
        module_manifest: Manifest,
        current_tensors: Mapping[str, torch.Tensor],
        own_bytes: defaultdict[str, list[memfd.ByteRange]],
    ) -> list[tuple[str, Slot]]:
        """Copy tensors that no longer live in the arena into their slots of the staging file."""
        written_slots: dict[tuple[str, int, int], tuple[str, Slot]] = {}
        seeded_storages: set[tuple[str, int]] = set()
        for key, slot in module_manifest.slots:
            tensor = current_tensors[slot.name]
            is_sharded = sharded_tensors.is_sharded(tensor)
            # Every rank has a copy of a whole tensor, and rank 0's counts; of a sharded one each a
            # part.
            is_own_part = is_sharded or self._rank == 0
            tensor_place = (key, slot.start, slot.offset)
            if (
                not is_own_part
                or tensor_place in written_slots
                or is_in_arena(tensor.detach(), slot, self._mappings[key])
            ):
                continue
            written_slots[tensor_place] = (key, slot)
            slot_range = (slot.start, slot.start + slot.nbytes)
            if is_sharded:
                own_bytes[key] += self._put_pieces(key, slot, tensor)
                continue
            # A second time would undo what was written below; a tensor that covers the storage
            # overwrites it all.
            if (key, slot.start) not in seeded_storages:
                seeded_storages.add((key, slot.start))
                covers_storage = tensor.numel() * slot.dtype.itemsize == slot.nbytes
                if not covers_storage and key not in self._in_staging:
                    # First, because other tensors view parts of it, too.
                    memfd.write_at(
                        self._staging[key], self._mappings[key].view(*slot_range), slot.start
                    )
            self._put_pieces(key, slot, tensor)
            own_bytes[key].append(slot_range)
        return list(written_slots.values())

    def _put_pieces(self, key: str, slot: Slot, tensor: torch.Tensor) -> list[memfd.ByteRange]:
        """Copy what this rank has of a tensor; returns which bytes of a sharded one that are."""
        # Mapped shared, because all ranks write their pieces of a sharded tensor into this file.
        staging_mapping = memfd.Mapping(
            self._staging[key], self._mappings[key].nbytes, is_private=False
        )
        target_view = slot.view(staging_mapping)
        notebook_values = slot.view(self._mappings[key])
        is_sharded = sharded_tensors.is_sharded(tensor)
        own_pieces = sharded_tensors.pieces(
            tensor if is_sharded else tensor.detach(), self._held.of(tensor)
        )
        written_ranges = []
        for piece_spot, piece_values in own_pieces:
            unrounded_piece = sharded_tensors.unrounded_values(
                piece_values.detach(), notebook_values, piece_spot, tensor.dtype
            )
            sharded_tensors.put_piece(target_view, piece_spot, unrounded_piece)
            if is_sharded:
                written_ranges += [
                    (slot.start + first_byte, slot.start + end_byte)
                    for first_byte, end_byte in sharded_tensors.piece_ranges(
                        target_view, piece_spot, piece_values.numel()
                    )
                ]
        return written_ranges


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
