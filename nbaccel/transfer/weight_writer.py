"""How trained weights are copied back: workers write staging files, the notebook reads them.

The workers' side is here and in `received_modules`, the notebook's in `weight_receiver`.

[Note: writing weights back] Every arena has a *staging* file of the same size and layout, made by
the notebook process for one launch or cell. It is sparse: pages that are not written cost nothing.
Workers put trained values there; the notebook's arena is not touched before all ranks are done.
Then the notebook reads what was written into the arena, once, into pages that it has mapped
already. (Mapping the staging file in the arena's place looks cheaper and is not: the page faults
that follow cost several copies.) A launch that fails drops the staging file.

A tensor that left the arena (moved to a device, given another dtype) is copied into its slot, cast
to the dtype the notebook has, as `load_state_dict` would; one that equals the notebook's own,
rounded to a shorter format, was not trained and stays as it is there. Of a sharded tensor (DTensor,
ZeRO) every rank writes its own piece, so that no process holds the whole; see `sharded_tensors`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from nbaccel.base.units import first_few
from nbaccel.transfer import memfd, sharded_tensors, weight_checks
from nbaccel.transfer.arena import Manifest, Slot, is_in_arena, named_tensors
from nbaccel.transfer.local_arena import LocalArena

_PART_REMEDY = (
    "rank 0's part of it is here. For all of it, gather the tensors on all ranks before the "
    "function returns (tensor.full_tensor(), or torch's get_model_state_dict with "
    "full_state_dict=True)"
)


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


@dataclass(eq=False)
class ReceivedModule:
    """A module of the notebook's, as it is in a worker."""

    manifest: Manifest
    module: nn.Module
    origins: weight_checks.OriginalTensors
    notebook_names: tuple[str, ...] = ()
    """Names of its tensors, as they were when it came or was last copied back."""
    notebook_state: Hashable = None
    """Of the tensors that left the arena: the state in which they were last copied back."""
    reported: str = ""
    """Digest of what this rank has trained, as it was reported last."""

    def tensor_names(self) -> tuple[str, ...]:
        """Names of its tensors as they are now."""
        return tuple(name for name, _ in named_tensors(self.module))

    def arena_keys(self) -> set[str]:
        """The arenas that the notebook has it in."""
        return {slot.arena for slot in self.manifest.slots}


class WeightWriter:
    """Puts what a rank owes of some modules into staging files. No communication."""

    def __init__(
        self,
        *,
        rank: int,
        num_nodes: int,
        arenas: Mapping[str, LocalArena],
        staging_files: Mapping[str, int],
        held_parts: sharded_tensors.HeldParts,
    ) -> None:
        self._rank = rank
        self._num_nodes = num_nodes
        self._arenas = arenas
        self._staging = staging_files
        self._held = held_parts
        self._report = WeightReport(rank=rank)
        self._own_bytes: defaultdict[str, list[memfd.ByteRange]] = defaultdict(list)
        self._settled: defaultdict[str, list[memfd.ByteRange]] = defaultdict(list)
        """Private pages must not overwrite these: they are written by themselves, or not at all."""

    def write(self, modules: Iterable[ReceivedModule], *, keeps_states: bool) -> WeightReport:
        """Write these modules."""
        modules = list(modules)
        written = {key: arena.written() for key, arena in self._arenas.items()}
        for received in modules:
            digest = weight_checks.trained_digest(
                received.manifest.slots, received.module, self._arenas, written
            )
            if digest:
                self._report.fingerprints[received.manifest.path] = digest
        for received in modules:
            tensors = dict(named_tensors(received.module))
            reason = self._stranded_reason(received.manifest, tensors)
            if reason:
                for slot in received.manifest.slots:
                    self._settled[slot.arena].append(slot.span)
            else:
                self._write_departed(received.manifest, tensors)
            if self._rank == 0:
                self._tell(received, reason, keeps_states=keeps_states)
        if self._rank == 0:
            self._write_pages(written)
        self._report.own_bytes |= self._own_bytes
        return self._report

    def _tell(self, received: ReceivedModule, reason: str, *, keeps_states: bool) -> None:
        """Note what the notebook's module will not have as it is here."""
        path = received.manifest.path
        changes = ""
        if reason:
            self._report.stranded[path] = reason
        else:
            tensors = dict(named_tensors(received.module))
            changes = weight_checks.describe_changes(
                received.manifest.slots, tensors, received.origins
            )
        if changes:
            self._report.changes[path] = changes
        if keeps_states and (reason or changes):
            self._report.state_dicts[path] = _on_cpu(received.module.state_dict())

    # ------------------------------------------------------------------- what does not fit

    def _stranded_reason(self, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> str:
        """Why the module cannot be written back; empty if it can."""
        return (
            _mismatch_reason(manifest, tensors)
            or self._out_of_reach(tensors)
            or weight_checks.untied_reason(manifest.slots, tensors)
        )

    def _out_of_reach(self, tensors: Mapping[str, torch.Tensor]) -> str:
        """Why pieces of sharded tensors cannot be put together here; empty if they can."""
        for name, tensor in tensors.items():
            if not sharded_tensors.is_sharded(tensor):
                continue
            if self._num_nodes > 1:
                return (
                    f"it is sharded over {self._num_nodes} nodes, each with a part only; "
                    f"{_PART_REMEDY}"
                )
            placements = sharded_tensors.odd_placements(tensor)
            if placements:
                return (
                    f"{name} is placed as {placements}, which no rank can undo alone; "
                    f"{_PART_REMEDY}"
                )
        return ""

    # ------------------------------------------------------------------- writing

    def _write_pages(self, written: Mapping[str, list[memfd.ByteRange]]) -> None:
        """Write every page that has changed, around what is settled."""
        for key, arena in self._arenas.items():
            # The notebook gets the file of this rank's own.
            if arena.own_file is not None:
                continue
            changed = arena.changed(written[key])
            for start, end in memfd.ranges_without(changed, self._settled[key]):
                if not arena.is_in_staging:
                    memfd.write_at(self._staging[key], arena.mapping.view(start, end), start)
                self._own_bytes[key].append((start, end))

    def _write_departed(self, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors that no longer live in the arena into their slots of the staging file."""
        places: set[tuple[str, int, int]] = set()
        seeded: set[tuple[str, int]] = set()
        for slot in manifest.slots:
            tensor = tensors[slot.name]
            key = slot.arena
            arena = self._arenas[key]
            is_sharded = sharded_tensors.is_sharded(tensor)
            place = (key, slot.start, slot.offset)
            if (
                # Every rank has a copy of a whole tensor, and rank 0's counts; of a sharded one
                # each a part.
                not (is_sharded or self._rank == 0)
                or place in places
                or is_in_arena(tensor.detach(), slot, arena.mapping)
            ):
                continue
            places.add(place)
            self._settled[key].append(slot.span)
            if is_sharded:
                self._own_bytes[key] += self._put_pieces(slot, tensor)
                continue
            # A tensor that covers the storage overwrites it all.
            is_whole = tensor.numel() * slot.dtype.itemsize == slot.nbytes
            # A second time would undo what was written below.
            if (key, slot.start) not in seeded and not is_whole and not arena.is_in_staging:
                # First, because other tensors view parts of it, too.
                memfd.write_at(self._staging[key], arena.mapping.view(*slot.span), slot.start)
            seeded.add((key, slot.start))
            self._put_pieces(slot, tensor)
            self._own_bytes[key].append(slot.span)

    def _put_pieces(self, slot: Slot, tensor: torch.Tensor) -> list[memfd.ByteRange]:
        """Copy what this rank has of a tensor; returns which bytes of a sharded one that are."""
        mapping = self._arenas[slot.arena].mapping
        # Mapped shared, because all ranks write their pieces of a sharded tensor into this file.
        staging = memfd.Mapping(self._staging[slot.arena], mapping.nbytes, is_private=False)
        target = slot.view(staging)
        before = slot.view(mapping)
        is_sharded = sharded_tensors.is_sharded(tensor)
        pieces = sharded_tensors.pieces(
            tensor if is_sharded else tensor.detach(), self._held.of(tensor)
        )
        dtype = tensor.dtype
        written = []
        for spot, piece in pieces:
            values = sharded_tensors.unrounded_values(piece.detach(), before, spot, dtype)
            sharded_tensors.put_piece(target, spot, values)
            if is_sharded:
                written += [
                    (slot.start + start, slot.start + end)
                    for start, end in sharded_tensors.piece_ranges(target, spot, values.numel())
                ]
        return written


def _mismatch_reason(manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> str:
    """Why the module no longer fits the notebook's; empty if it does."""
    expected = {slot.name: slot.shape for slot in manifest.slots}
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
    # A state dict may hold other objects, too (`get_extra_state`).
    return {
        key: _tensor_on_cpu(value) if isinstance(value, torch.Tensor) else value
        for key, value in state.items()
    }


def _tensor_on_cpu(tensor: Any) -> torch.Tensor:
    values: torch.Tensor = tensor.detach()
    if sharded_tensors.is_dtensor(tensor):
        values = tensor.detach().to_local()
    return values.cpu()
