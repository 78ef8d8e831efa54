"""How trained weights are copied back: workers write staging files, the notebook reads them.

[Note: writing weights back] Every arena has a *staging* file of the same size and layout, made by
the notebook process for one launch or cell. It is sparse: pages that are not written cost nothing.
Workers put trained values there; once all ranks are done, the notebook reads what was written into
the arena, into pages that it has mapped already. (Mapping the staging file in the arena's place
looks cheaper and is not: the page faults that follow cost several copies.)

A tensor that left the arena (moved to a device, given another dtype) is copied into its slot, cast
to the dtype the notebook has, as `load_state_dict` would; one that equals the notebook's own,
rounded to a shorter format, was not trained and stays as it is there.

[Note: training in place] Rank 0 would pay twice: once for the private page that its first optimizer
step writes, once for copying that page to the staging file at the end. So just before its first
step it copies the arena to a file, maps that file where its model lies, and trains right there.
This is done only where most of the arena is about to be trained; otherwise the kernel's table of
private pages tells what was written. In a launch it is the staging file. A live worker cannot know
when the next cell will train: it makes a file of its own, which travels to the notebook.

Did all ranks train the same model? A plain loop without DDP does not, and only rank 0's is copied
back: each rank takes a digest of the parameters that it trained, and the notebook compares them.
"""

from __future__ import annotations

import contextlib
import math
import os
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from torch import nn
from torch.autograd.graph import increment_version

from nbaccel.base.processes import uninterrupted
from nbaccel.base.units import first_few
from nbaccel.precision.fp8.scaled_tensor import ScaledTensor
from nbaccel.transfer import memfd, sharded_tensors
from nbaccel.transfer.arena import (
    PLAIN,
    Arena,
    Sharing,
    Slot,
    host_copies,
    is_in_arena,
    module_version,
    named_tensors,
)

_PART_REMEDY = (
    "rank 0's part of it is here. Gather it on all ranks before the function returns "
    "(tensor.full_tensor(), or torch's get_model_state_dict with full_state_dict=True)"
)

_NUM_SAMPLES = 16
_SAMPLE_BYTES = 4096  # in so many pieces: training changes nearly all bytes

# Share of an arena's bytes that is about to be trained. Training in place copies the whole arena
# once, otherwise the trained part is copied twice: half is where both cost the same.
_IN_PLACE_SHARE = 0.5


@dataclass(eq=False)
class LocalArena:
    """A worker's own descriptor of an arena, and its mapping."""

    fd: int
    mapping: memfd.Mapping
    training_file: int | None = None  # the file that the mapping shows instead
    is_in_staging: bool = False  # it is the notebook's staging file: nothing is copied there

    @classmethod
    def open(cls, fd: int, num_bytes: int) -> LocalArena:
        """Map an arena; the descriptor stays the caller's."""
        # A copy that goes with the mapping, which is with the last tensor that lives in it.
        mapping = memfd.Mapping(os.dup(fd), num_bytes, is_private=True, owns_file=True)
        return cls(mapping.fd, mapping)

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
        # A mapping of its own, because this worker's shows its own pages. Private, because the file
        # may be a checkpoint that is open for reading only.
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
        fd = staging_file
        if fd is None:
            fd = memfd.create_file("staging", self.mapping.nbytes)
        with contextlib.ExitStack() as on_error:
            if staging_file is None:
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
        pages_end = end
        if end != self.mapping.nbytes:
            pages_end = end // page_bytes * page_bytes
        copied = [(start, end)]
        # A file of this rank's own has no notebook pages beneath: all values are copied in.
        if self.training_file is None and pages_start < pages_end:
            self.mapping.give_back(pages_start, pages_end)
            # The edges hold other modules' tensors, too: giving them back would undo training.
            copied = [(start, pages_start), (pages_end, end)]
        for low, high in copied:
            if low < high:
                memfd.read_at(self.fd, self.mapping.view(low, high), low)


@dataclass(kw_only=True)
class WeightReport:
    """What one rank put into the staging files."""

    rank: int = 0
    own_bytes: defaultdict[str, list[memfd.ByteRange]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """Exactly the bytes that this rank has put into each staging file: of a sharded tensor its own
    piece."""
    stranded: dict[str, str] = field(default_factory=dict)  # module's path → why not written back
    state_dicts: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    """Weights on the CPU, so that they are not lost: of modules that are stranded or changed."""
    changes: dict[str, str] = field(default_factory=dict)  # module's path → what is different
    fingerprints: dict[str, str] = field(default_factory=dict)  # module's path → its digest


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


@dataclass(kw_only=True, eq=False)
class WeightWriter:
    """Puts what a rank owes of some modules into staging files. No communication."""

    rank: int
    num_nodes: int  # notebooks that launch together; each gets the weights of its own workers
    arenas: Mapping[str, LocalArena]
    staging_files: Mapping[str, int]
    held_parts: Mapping[torch.Tensor, object]  # to read sharded tensors without their engine
    settled: defaultdict[str, list[memfd.ByteRange]] = field(
        default_factory=lambda: defaultdict(list), init=False
    )
    """Private pages must not overwrite these, which are written by themselves."""

    def write(self, modules: Sequence[ReceivedModule], *, keeps_states: bool) -> WeightReport:
        """Write these modules."""
        report = WeightReport(rank=self.rank)
        written = {key: arena.written() for key, arena in self.arenas.items()}
        for received in modules:
            if digest := trained_digest(received, self.arenas, written):
                report.fingerprints[received.path] = digest
        for received in modules:
            tensors = dict(named_tensors(received.module))
            reason = (
                _mismatch_reason(received.slots, tensors)
                or _out_of_reach(tensors, self.num_nodes)
                or untied_reason(received.slots, tensors)
            )
            if not reason:
                self._write_departed(received.slots, tensors, report)
            if self.rank != 0:
                continue
            changes = ""
            if reason:
                report.stranded[received.path] = reason
            elif changes := describe_changes(received, tensors):
                report.changes[received.path] = changes
            if keeps_states and (reason or changes):
                report.state_dicts[received.path] = _on_cpu(received.module.state_dict())
        for key, arena in self.arenas.items():
            # The notebook gets the file of this rank's own.
            if self.rank == 0 and arena.own_file is None:
                changed = memfd.ranges_without(arena.changed(written[key]), self.settled[key])
                for start, end in changed:
                    report.own_bytes[key].append((start, end))
                    if not arena.is_in_staging:
                        view = arena.mapping.view(start, end)
                        memfd.write_at(self.staging_files[key], view, start)
        return report

    def _write_departed(
        self, slots: Sequence[Slot], tensors: Mapping[str, torch.Tensor], report: WeightReport
    ) -> None:
        """Copy tensors that no longer live in the arena into their slots of the staging file."""
        places: set[Slot] = set()
        for slot in slots:
            tensor = tensors[slot.name]
            place = slot._replace(name="")
            is_sharded = sharded_tensors.is_sharded(tensor)
            # Every rank has a copy of a whole tensor, and rank 0's counts; of a sharded one a part.
            is_owed = is_sharded or self.rank == 0
            mapping = self.arenas[slot.arena].mapping
            if is_owed and place not in places and not is_in_arena(tensor.detach(), slot, mapping):
                places.add(place)
                written = self._put_pieces(slot, tensor)
                report.own_bytes[slot.arena] += written
                # Of a sharded one other ranks write the rest.
                self.settled[slot.arena] += [slot.span] if is_sharded else written

    def _put_pieces(self, slot: Slot, tensor: torch.Tensor) -> list[memfd.ByteRange]:
        """Copy what this rank has of a tensor; returns which bytes that are."""
        mapping = self.arenas[slot.arena].mapping
        # Mapped shared, because all ranks write their pieces of a sharded tensor into this file.
        staging = memfd.Mapping(self.staging_files[slot.arena], mapping.nbytes, is_private=False)
        target = slot.view(staging)
        before = slot.view(mapping)
        written = []
        for spot, piece in sharded_tensors.pieces(tensor, self.held_parts.get(tensor)):
            values = sharded_tensors.unrounded_values(piece.detach(), before, spot, tensor.dtype)
            written += [
                (slot.start + start, slot.start + end)
                for start, end in sharded_tensors.put_piece(target, spot, values)
            ]
        return written


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


def trained_digest(
    received: ReceivedModule,
    arenas: Mapping[str, LocalArena],
    written: Mapping[str, Sequence[memfd.ByteRange]],
    *,
    own_only: bool = False,
) -> str:
    """A digest of a module's parameters, or `own_only` of the trained ones; empty without any."""
    tensors = dict(named_tensors(received.module))
    compared = []
    trained = []
    for slot in received.slots:
        tensor = tensors.get(slot.name)
        if tensor is None or not _is_compared(tensor):
            continue
        compared.append(tensor)
        in_arena = is_in_arena(tensor, slot, arenas[slot.arena].mapping)
        if not in_arena or memfd.overlap(slot.span, written[slot.arena]):
            trained.append(tensor)
    if not trained:
        return ""
    return _digest(trained if own_only else compared)


def _is_compared(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and not sharded_tensors.is_sharded(tensor)


def _digest(tensors: Iterable[torch.Tensor]) -> str:
    digest = xxhash.xxh3_64()
    for tensor in tensors:
        values = tensor.detach().reshape(-1)
        length = _SAMPLE_BYTES // tensor.element_size()
        if values.numel() > length * _NUM_SAMPLES and tensor.is_contiguous():
            # The first and the last sample lie at the ends.
            values = values.unfold(0, length, (values.numel() - length) // (_NUM_SAMPLES - 1))
        # Viewed as bytes, because NumPy has no bfloat16.
        digest.update(values.contiguous().cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def untied_reason(slots: Sequence[Slot], tensors: Mapping[str, torch.Tensor]) -> str:
    """Which names share one tensor in the notebook, and hold different values here."""
    first_names: dict[Slot, str] = {}
    for slot in slots:
        first_name = first_names.setdefault(slot._replace(name=""), slot.name)
        if first_name != slot.name and not _have_same_values(
            tensors[first_name], tensors[slot.name]
        ):
            return f"{first_name} and {slot.name} were tied, and now have different values"
    return ""


def _have_same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    # No rank has all values of a sharded tensor to compare.
    if one is other or sharded_tensors.is_sharded(one) or sharded_tensors.is_sharded(other):
        return True
    if one.device == other.device and one.data_ptr() == other.data_ptr():
        return True
    # Copies with equal values can still be written into one tensor.
    return one.dtype == other.dtype and torch.equal(one.detach().cpu(), other.detach().cpu())


def describe_changes(received: ReceivedModule, tensors: Mapping[str, torch.Tensor]) -> str:
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


class WeightReceiver:
    """The notebook's side: owns the staging files of one launch and applies them at the end."""

    def __init__(self, sharing: Sharing, arenas: Mapping[str, Arena]) -> None:
        self._sharing = sharing
        self._versions = self._versions_now()
        self._arenas = arenas
        self.staging: dict[str, int] = {}
        try:
            for key, arena in arenas.items():
                self.staging[key] = memfd.create_file("staging", arena.nbytes)
        except OSError:
            self.close()
            raise

    @property
    def modules(self) -> list[tuple[str, nn.Module]]:
        """The notebook's modules that get weights, each with its path."""
        return [(shared.path, shared.module) for shared in self._sharing.modules]

    def apply(
        self, reports: Sequence[WeightReport], whole_files: Mapping[str, int] | None = None
    ) -> None:
        """Copy the trained values into the notebook's modules, once all ranks have returned."""
        whole_files = whole_files or {}
        stranded = {path for report in reports for path in report.stranded}
        left_out = [
            slot for path, slots, _ in self._sharing.modules for slot in slots if path in stranded
        ]
        changed = {key for report in reports for key, spans in report.own_bytes.items() if spans}
        changed.update(whole_files)
        # What can fail comes first: afterwards half of the new values may be there.
        for key in changed:
            self._arenas[key].leave_file()
        for key in changed:
            arena = self._arenas[key]
            kept = [slot.span for slot in left_out if slot.arena == key]
            if key in whole_files:
                # First: departed and sharded tensors are in the staging file, which is read next.
                _read(whole_files[key], arena, [(0, arena.nbytes)], kept)
            spans = (span for report in reports for span in report.own_bytes.get(key, ()))
            _read(self.staging[key], arena, memfd.merge_ranges(spans), kept)
        # After the arenas: tensors on devices are filled from their host copies there.
        for tensor, host_copy in host_copies(self._sharing, stranded):
            tensor.copy_(host_copy)
        # Lets a graph that needs the old values say so, and a pool's workers adopt the new.
        for path, slots, module in self._sharing.modules if changed else ():
            if path not in stranded:
                tensors = dict(named_tensors(module))
                written = [tensors[slot.name] for slot in slots]
                # Inference tensors have no version counter; torch raises for them.
                increment_version([tensor for tensor in written if not tensor.is_inference()])

    def disturbed(self) -> list[str]:
        """Paths of the modules that the notebook has written to meanwhile. Ask before `apply`."""
        versions = self._versions_now()
        return [path for path, before in self._versions.items() if versions[path] != before]

    def differing(self, reports: Sequence[WeightReport]) -> dict[str, str]:
        """Which ranks trained another model than rank 0's, by module path. Ask before `apply`."""
        messages = {}
        for path, _, module in self._sharing.modules:
            digests = {report.rank: report.fingerprints.get(path, "") for report in reports}
            digest_of_0 = digests.get(0, "")
            # A rank without a digest has trained nothing.
            trained = {rank: digest for rank, digest in digests.items() if digest}
            if set(trained.values()) <= {digest_of_0}:
                continue
            # Nor has one whose weights equal the notebook's.
            own = _digest(tensor for _, tensor in named_tensors(module) if _is_compared(tensor))
            known = {digest_of_0, own}
            ranks = sorted(rank for rank, digest in trained.items() if digest not in known)
            if ranks:
                messages[path] = _differing_models(path, ranks, rank_0_trained=bool(digest_of_0))
        return messages

    def _versions_now(self) -> dict[str, int]:
        return {path: module_version(module) for path, _, module in self._sharing.modules}

    def close(self, close_files: Callable[[Sequence[int]], None] = memfd.close_all) -> None:
        """Close the staging files."""
        with uninterrupted():
            # Cleared before closing: a second close could hit another file with the same number.
            files = list(self.staging.values())
            self.staging.clear()
            close_files(files)


def _read(
    fd: int, arena: Arena, spans: list[memfd.ByteRange], left_out: list[memfd.ByteRange]
) -> None:
    for start, end in memfd.ranges_without(spans, left_out):
        memfd.read_at(fd, arena.view(start, end), start)


def _differing_models(path: str, ranks: Sequence[int], *, rank_0_trained: bool) -> str:
    names = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    if not rank_0_trained:
        return (
            f"{names} trained {path} and rank 0 did not. The notebook gets rank 0's weights, so "
            "what was trained is lost. Train on rank 0, or return the state_dict from the others."
        )
    return (
        f"The ranks trained different models: {names} ended with other weights of {path} than "
        "rank 0, and the notebook has rank 0's. Nothing averaged the gradients: wrap the model in "
        "DistributedDataParallel, or pass it through Accelerator.prepare. (If it is wrapped, some "
        "parameters took no part in the loss: find_unused_parameters=True.)"
    )
