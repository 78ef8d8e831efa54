"""How trained weights come home.

[Note: the way home] Every arena has a *staging* file of the same size and layout, made by the
notebook process for one launch. It is sparse: what nobody writes costs nothing. Workers put trained
values there; the notebook's arena is not touched before all ranks have returned. Then the notebook
reads what was written into the arena, once, into pages that it has mapped already. (Mapping the
staging file in the arena's place looks cheaper and is not: the page faults that follow cost several
copies.) A launch that fails drops the staging file.

[Note: training in place] Rank 0 would pay twice: once for the private page that its first optimizer
step writes, once for copying that page to the staging file at the end. So just before its first
step it copies the arena to the staging file, maps that file where its model lies, and trains right
there: no private pages, and nothing to copy at the end. This is done only where most of the arena
is about to be trained; otherwise the kernel's table of private pages tells what was written.

[Note: staging files of a rank's own] A live worker cannot know when the next cell will train, so
the file that its rank 0 trains in is made by the worker itself, and travels to the notebook with
the report. Such a file holds a whole arena; what else is owed goes to the staging files that the
notebook made, for all ranks.

A tensor that left the arena (moved to a device, given another dtype) is copied into its slot, cast
to the dtype the notebook has, as `load_state_dict` would; one that is but the notebook's own,
rounded to a shorter format, was not trained and stays as it is there. Of a sharded tensor (DTensor,
ZeRO) every rank writes its own piece, so that no one ever holds the whole; see `shards`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from nbaccel.launch.sharing import memory, shards, trained
from nbaccel.launch.sharing.arena import (
    PLAIN,
    Sharing,
    Slot,
    named_tensors,
    stayed,
)
from nbaccel.units import first_few

_IN_PLACE_SHARE = (
    0.5  # of an arena's bytes about to be trained: above it, train in the staging file
)


_PART = (
    "rank 0's part of it is here. For all of it, gather the tensors on all ranks before the "
    "function returns (tensor.full_tensor(), or torch's get_model_state_dict with "
    "full_state_dict=True)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a worker must know of one shared module to bring it home."""

    path: str
    slots: tuple[tuple[str, Slot], ...]
    """Key of the arena, and where in it the tensor lies."""


@dataclass(kw_only=True)
class HomeReport:
    """What one rank put into the staging files."""

    rank: int = 0
    complete: set[str] = field(default_factory=set)
    """Arenas whose staging file holds every byte."""
    written: dict[str, list[memory.Range]] = field(default_factory=dict)
    """Of the others, the bytes that were written."""
    stranded: dict[str, str] = field(default_factory=dict)
    """Path of a module that could not come home → why."""
    state_dicts: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    """Weights on the CPU, so that they are not lost: of modules that are stranded or changed."""
    changes: dict[str, str] = field(default_factory=dict)
    """Path of a module that comes home, but not as it is → what is different."""
    fingerprints: dict[str, str] = field(default_factory=dict)
    """Path of a module that this rank has trained → digest of its parameters."""


def manifests(sharing: Sharing, keys: Mapping[int, str]) -> tuple[Manifest, ...]:
    """Describe the shared modules for a worker, with arenas named by their keys."""
    return tuple(
        Manifest(path=m.path, slots=tuple((keys[id(arena)], slot) for arena, slot in m.slots))
        for m in sharing.modules
    )


# ------------------------------------------------------------------------- in the worker


class Homebound:
    """A worker's side of the way home: watches the first optimizer step, writes at the end.

    Args:
        rank: The worker's rank among those that share these staging files (on its node).
        modules: The shared modules, with what the notebook knows of them.
        mappings: This worker's mappings of the arenas, by key.
        staging: Descriptors of the staging files, by key.
        num_nodes: Machines that take part; the others' pieces of a sharded tensor are out of reach.
        held: What is needed to read parts whose engine is gone.
        in_files: Descriptors of the files that this rank has trained in already, by key of the
            arena. See [Note: staging files of a rank's own].
        origins: The modules' tensors as they came; by default as they are now.
        keeps_states: Whether the report has the weights of modules that do not come home as they
            are.
    """

    def __init__(
        self,
        *,
        rank: int,
        modules: Sequence[tuple[Manifest, nn.Module]],
        mappings: Mapping[str, memory.Mapping],
        staging: Mapping[str, int],
        num_nodes: int = 1,
        held: shards.Held | None = None,
        in_files: Mapping[str, int] | None = None,
        origins: Mapping[str, trained.Origin] | None = None,
        keeps_states: bool = True,
    ) -> None:
        self._rank = rank
        self._num_nodes = num_nodes
        self._modules = modules
        self._mappings = mappings
        self._staging = staging
        self._in_files = dict(in_files or {})
        self._keeps_states = keeps_states
        self._origins = origins or {m.path: trained.origin(module) for m, module in modules}
        self._has_stepped = False
        self._held = held or shards.Held()

    def watch_first_step(self) -> Callable[[], None]:
        """Arrange for rank 0 to train in the staging file. See [Note: training in place].

        Parts that an engine keeps beside the parameters are held on to, on every rank.

        Returns:
            Ends the watch.
        """
        if not self._mappings:
            return lambda: None

        def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            # Not removed after the first step: torch iterates over its hooks while it calls them.
            self._held.hold_for(optimizer, (module for _, module in self._modules))
            if not self._has_stepped and self._rank == 0:
                self._move_in(group["params"] for group in optimizer.param_groups)
            self._has_stepped = True

        return register_optimizer_step_pre_hook(before_step).remove

    def _move_in(self, groups: Iterable[Iterable[torch.Tensor]]) -> None:
        for key in about_to_be_trained(self._mappings, groups):
            move_in(self._mappings[key], self._staging[key])
            self._in_files[key] = self._staging[key]

    def write(self) -> HomeReport:
        """Put what this rank owes into the staging files. No communication."""
        report = HomeReport(rank=self._rank)
        kept: list[tuple[str, Slot]] = []
        written = {key: self._written_to(key) for key in self._mappings}
        self._take_fingerprints(report, written)
        for manifest, module in self._modules:
            current = dict(named_tensors(module))
            reason = _mismatch(manifest, current) or self._out_of_reach(current)
            reason = reason or trained.came_apart(manifest.slots, current)
            changes = ""
            if reason is None:
                self._write_departed(manifest, current, report)
                changes = trained.changes(
                    manifest.slots, current, self._origins.get(manifest.path, {})
                )
            elif self._rank == 0:
                report.stranded[manifest.path] = reason
                kept += manifest.slots
            if self._rank == 0 and changes:
                report.changes[manifest.path] = changes
            if self._rank == 0 and self._keeps_states and (reason or changes):
                report.state_dicts[manifest.path] = _on_cpu(module.state_dict())
        if self._rank == 0:
            self._write_arenas(report, kept, written)
        return report

    def _take_fingerprints(
        self, report: HomeReport, written: Mapping[str, Sequence[memory.Range]]
    ) -> None:
        for manifest, module in self._modules:
            found = trained.fingerprint_of(manifest.slots, module, self._mappings, written)
            if found:
                report.fingerprints[manifest.path] = found

    def _written_to(self, key: str) -> list[memory.Range]:
        mapping = self._mappings[key]
        return [(0, mapping.nbytes)] if key in self._in_files else mapping.written()

    def _out_of_reach(self, current: Mapping[str, torch.Tensor]) -> str | None:
        """Why pieces of sharded tensors cannot be put together here, if so."""
        sharded = {name: t for name, t in current.items() if shards.is_sharded(t)}
        if sharded and self._num_nodes > 1:
            return f"it is sharded over {self._num_nodes} nodes, each with a part only; {_PART}"
        for name, tensor in sharded.items():
            odd = shards.odd_placements(tensor)
            if odd:
                return f"{name} is placed as {odd}, which no rank can undo alone; {_PART}"
        return None

    def _write_arenas(
        self,
        report: HomeReport,
        kept: Sequence[tuple[str, Slot]],
        written: Mapping[str, Sequence[memory.Range]],
    ) -> None:
        """Write every private page, but of the modules that cannot come home (`kept`) none."""
        for key in self._mappings:
            if key in self._in_files:
                report.complete.add(key)
                continue
            taken = [(slot.start, slot.start + slot.nbytes) for k, slot in kept if k == key]
            taken += report.written.get(key, [])
            for start, stop in written[key]:
                self._write_around(key, (start, stop), taken, report)

    def _write_around(
        self, key: str, span: memory.Range, taken: Sequence[memory.Range], report: HomeReport
    ) -> None:
        """Write a run of private pages, but not over tensors that came from a device."""
        mapping = self._mappings[key]
        taken = [r for r in taken if r[0] < span[1] and span[0] < r[1]]
        shifted = memory.merge(
            (max(a, span[0]) - span[0], min(b, span[1]) - span[0]) for a, b in taken
        )
        for start, stop in list(memory.gaps(shifted, span[1] - span[0])):
            at = (span[0] + start, span[0] + stop)
            memory.write_at(self._staging[key], mapping.view(*at), at[0])
            report.written.setdefault(key, []).append(at)

    def _write_departed(
        self, manifest: Manifest, current: Mapping[str, torch.Tensor], report: HomeReport
    ) -> None:
        """Copy tensors that no longer live in the arena into their slots of the staging file."""
        written: set[tuple[str, int, int]] = set()
        seeded: set[tuple[str, int]] = set()
        for key, slot in manifest.slots:
            tensor = current[slot.name].detach()
            sharded = shards.is_sharded(current[slot.name])
            mine = sharded or self._rank == 0
            place = (key, slot.start, slot.offset)
            if not mine or place in written or stayed(tensor, slot, self._mappings[key]):
                continue
            written.add(place)
            if not sharded and (key, slot.start) not in seeded:
                seeded.add((key, slot.start))  # a second time would undo what is written below
                self._seed(key, slot, tensor)
            into = slot.view(
                memory.Mapping(self._staging[key], self._mappings[key].nbytes, private=False)
            )
            whole, before = current[slot.name], slot.view(self._mappings[key])
            for spot, values in shards.pieces(whole if sharded else tensor, self._held.of(whole)):
                shards.put(into, spot, shards.unrounded(values.detach(), before, spot, whole.dtype))
            if not self._is_in_training(key):
                report.written.setdefault(key, []).append((slot.start, slot.start + slot.nbytes))

    def _seed(self, key: str, slot: Slot, tensor: torch.Tensor) -> None:
        """Fill the slot's storage first, where other tensors view parts of it too."""
        whole = tensor.numel() * slot.dtype.itemsize == slot.nbytes
        if not whole and not self._is_in_training(key):
            span = (slot.start, slot.start + slot.nbytes)
            memory.write_at(self._staging[key], self._mappings[key].view(*span), span[0])

    def _is_in_training(self, key: str) -> bool:
        """Whether the arena's staging file is the very one that this rank trains in."""
        return self._in_files.get(key) == self._staging[key]


def about_to_be_trained(
    mappings: Mapping[str, memory.Mapping], groups: Iterable[Iterable[torch.Tensor]]
) -> list[str]:
    """Which arenas are worth training in a file. See [Note: training in place].

    Args:
        mappings: This worker's mappings of the arenas, by key.
        groups: The parameters that an optimizer is about to step, in its groups.

    Returns:
        Keys of the arenas most of whose bytes will be written.
    """
    trained = {id(p): p for group in groups for p in group if p.requires_grad}
    found = []
    for key, mapping in mappings.items():
        spans = (_span_in(mapping, p) for p in trained.values())
        about = memory.total(memory.merge(span for span in spans if span))
        if about >= _IN_PLACE_SHARE * mapping.nbytes:
            found.append(key)
    return found


def move_in(mapping: memory.Mapping, fd: int) -> None:
    """Copy what a mapping shows to a file, and let the mapping show and write that file."""
    memory.write_at(fd, mapping.view(0, mapping.nbytes), 0)
    mapping.replace(fd, private=False)


def _span_in(mapping: memory.Mapping, tensor: torch.Tensor) -> memory.Range | None:
    if tensor.device.type != "cpu" or type(tensor) not in PLAIN:
        return None
    storage = tensor.untyped_storage()
    if not mapping.contains(storage.data_ptr(), storage.nbytes()):
        return None
    start = storage.data_ptr() - mapping.address
    return (start, start + storage.nbytes())


def _mismatch(manifest: Manifest, current: Mapping[str, torch.Tensor]) -> str | None:
    """Why the module no longer fits the notebook's, if so."""
    expected = {slot.name: slot.shape for _, slot in manifest.slots}
    shapes = {name: shards.whole_shape(tensor) for name, tensor in current.items()}
    found = {name: shape for name, shape in shapes.items() if math.prod(shape)}
    lines = [f"{name} is gone" for name in expected.keys() - found.keys()]
    lines += [f"{name} is new" for name in found.keys() - expected.keys()]
    lines += [
        f"{name} has shape {found[name]} instead of {shape}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if not lines:
        return None
    return first_few(sorted(lines), 3, separator="; ")


def _on_cpu(state: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _value_on_cpu(v) if isinstance(v, torch.Tensor) else v for k, v in state.items()}


def _value_on_cpu(tensor: Any) -> torch.Tensor:
    values: torch.Tensor = tensor.detach()
    if shards.is_dtensor(tensor):
        values = tensor.detach().to_local()
    return values.cpu()
