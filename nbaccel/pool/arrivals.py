"""The modules that came to a worker by an arena: what happens to their weights there.

    staging files ◄───── write_home: rank 0's changed pages; of sharded tensors everyone's piece
        │ read by the notebook, once every rank has written all of it
    arena file
        │ private map
    worker's tensors ──► settle: pages that equal the file are given back, and shared again
                     ◄── adopt: the notebook wrote to the weights: what was written here goes

A tensor that left the arena (moved to a device, sharded, given another dtype) is copied instead.
Where an optimizer is about to step most of an arena, rank 0 trains in a file of its own, which then
is its staging file: see [Note: training in place] in `launch.sharing.home`.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from nbaccel.errors import InternalError
from nbaccel.launch.sharing import home, memory, shards, trained
from nbaccel.launch.sharing.arena import Slot, named_tensors, stayed
from nbaccel.pool.cargo import Update

__all__ = ["Arrivals"]

_CHUNK_BYTES = 1 << 20  # compared at a time: what is read twice stays in the cache
_WORD_BYTES = 8


@dataclass(frozen=True)
class _Arena:
    """A worker's own descriptor of an arena, and its private mapping."""

    fd: int
    mapping: memory.Mapping
    """It closes the descriptor when it goes, which is with the last tensor that lives in it."""

    @classmethod
    def open(cls, fd: int, nbytes: int) -> _Arena:
        """Take an arena in; the descriptor stays the caller's."""
        own = os.dup(fd)
        try:
            mapping = memory.Mapping(own, nbytes, private=True)
        except BaseException:  # no descriptor is lost to an interrupt either
            os.close(own)
            raise
        close = weakref.finalize(mapping, os.close, own)
        close.atexit = False  # a process that ends closes it anyway
        return cls(own, mapping)

    def as_the_notebook_sees_it(self) -> memory.Mapping:
        return memory.Mapping(self.fd, self.mapping.nbytes, private=False)


class Arrivals:
    """A worker's table of the notebook's modules, by key.

    Args:
        rank: The worker's rank.
        num_nodes: Machines that take part.
        share_back: Whether weights go home; if not, nothing is prepared for that.
    """

    def __init__(self, *, rank: int, num_nodes: int = 1, share_back: bool = True) -> None:
        self._rank = rank
        self._num_nodes = num_nodes
        self._share_back = share_back
        self._arenas: dict[str, _Arena] = {}
        self._modules: dict[str, tuple[home.Manifest, nn.Module]] = {}
        self._origins: dict[str, trained.Origin] = {}
        self._reported: dict[str, str] = {}
        """Digests of what this rank has trained, as they were reported last, by module."""
        self._at_home: dict[str, Hashable] = {}
        """Of the tensors that left the arena: the state in which they last came home."""
        self._has_stepped = False
        self._held = shards.Held()
        self._in_files: dict[str, int] = {}
        """Descriptors of the files that this rank trains in, by key of the arena."""
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Optimizers that have been looked at since weights came home last."""
        self._handed_over: frozenset[str] = frozenset()
        """Keys of the arenas of which every byte was in the last report."""
        _tell_of_steps(self)

    @property
    def mappings(self) -> dict[str, memory.Mapping]:
        """This worker's mappings of the arenas, by key."""
        return {key: found.mapping for key, found in self._arenas.items()}

    def module(self, key: str) -> nn.Module:
        """The module that the notebook knows under this key."""
        if key not in self._modules:
            raise InternalError(
                f"rank {self._rank} has no module {key}, only {sorted(self._modules)}. "
                "Please report this."
            )
        return self._modules[key][1]

    def open_arena(self, key: str, nbytes: int, fd: int) -> None:
        """Map an arena, unless this worker has it."""
        if key not in self._arenas:
            self._arenas[key] = _Arena.open(fd, nbytes)

    def add(self, key: str, manifest: home.Manifest, module: nn.Module) -> None:
        """A module arrived whole."""
        self._modules[key] = (manifest, module)
        self._origins[key] = trained.origin(module)
        self._reported.pop(key, None)
        self._at_home[key] = self._departed_state(key)

    def forget(self, modules: Iterable[str], arenas: Iterable[str]) -> None:
        """The notebook has no use for these any more. What the worker uses of them stays."""
        for key in modules:
            for table in (self._modules, self._origins, self._reported, self._at_home):
                table.pop(key, None)
        for key in arenas:
            self._arenas.pop(key, None)
            self._stop_training_in(key)

    # ------------------------------------------------------------------- from the notebook

    def apply(self, update: Update) -> None:
        """Carry over what the notebook changed. Parts that are gone here are passed over."""
        module = self.module(update.key)
        tensors = dict(named_tensors(module))
        submodules = dict(module.named_modules(remove_duplicate=False))
        for name, flag in update.requires_grad.items():
            if name in tensors and tensors[name].is_leaf:
                tensors[name].requires_grad_(flag)
        for path, flag in update.training.items():
            if path in submodules:
                submodules[path].training = flag
        for path, values in update.attributes.items():
            if path in submodules:
                submodules[path].__dict__.update(values)
        for path, names in update.removed.items():
            for name in names if path in submodules else ():
                submodules[path].__dict__.pop(name, None)
        if update.adopt:
            self._adopt(update.key)

    def _adopt(self, key: str) -> None:
        manifest, module = self._modules[key]
        for name, arena in self._arenas.items():
            spans = memory.merge(
                (slot.start, -(-(slot.start + slot.nbytes) // _ALIGN) * _ALIGN)
                for owner, slot in manifest.slots
                if owner == name
            )
            for start, stop in spans:
                self._let_go(name, start, min(stop, arena.mapping.nbytes))
        with torch.no_grad():
            for slot, tensor, mapping in self._departed(manifest, module):
                if shards.whole_shape(tensor) == slot.shape:
                    shards.fill(tensor, slot.view(mapping))
        self._at_home[key] = self._departed_state(key)

    # ------------------------------------------------------------------- to the notebook

    def dirty(self) -> tuple[str, ...]:
        """Keys of the modules whose weights the notebook may not have got yet."""
        mine = self._changed_modules()
        return tuple(mine) if self._rank == 0 else (*mine, *self._trained_apart(mine))

    def _trained_apart(self, besides: Collection[str]) -> Iterator[str]:
        """Modules that this rank has trained, though rank 0's are what the notebook gets."""
        written = self._written()
        for key in self._modules.keys() - set(besides):
            found = self._own_digest(key, written)
            if found and found != self._reported.get(key):
                yield key

    def _own_digest(self, key: str, written: Mapping[str, list[memory.Range]]) -> str:
        """Of what this rank has written of a module; empty if nothing."""
        (manifest, module), mappings = self._modules[key], self.mappings
        if not mappings.keys() >= {name for name, _ in manifest.slots}:
            return ""
        return trained.fingerprint_of(manifest.slots, module, mappings, written, own_only=True)

    def _used_by(self, modules: Iterable[str]) -> tuple[str, ...]:
        used = {name for key in modules for name, _ in self._modules[key][0].slots}
        return tuple(sorted(used & self._arenas.keys()))

    def _changed_modules(self) -> list[str]:
        written = self._written() if self._rank == 0 else {}
        return [
            key
            for key, (manifest, _) in self._modules.items()
            if _overlap(manifest, written) or self._has_changed_elsewhere(key)
        ]

    def _written(self) -> dict[str, list[memory.Range]]:
        used = {name for manifest, _ in self._modules.values() for name, _ in manifest.slots}
        return {key: self._written_to(key) for key in used if key in self._arenas}

    def _written_to(self, key: str) -> list[memory.Range]:
        mapping = self._arenas[key].mapping
        return [(0, mapping.nbytes)] if key in self._in_files else mapping.written()

    def _has_changed_elsewhere(self, key: str) -> bool:
        state = self._departed_state(key)
        return state is not None and (self._has_stepped or state != self._at_home[key])

    def _departed_state(self, key: str) -> Hashable:
        """Changes when a tensor that this rank brings home, though not by pages, does."""
        found = tuple(
            (slot.name, id(tensor), 0 if tensor.is_inference() else tensor._version)
            for slot, tensor, _ in self._departed(*self._modules[key])
            if self._rank == 0 or shards.is_sharded(tensor)
        )
        return found or None

    def _departed(
        self, manifest: home.Manifest, module: nn.Module
    ) -> Iterator[tuple[Slot, torch.Tensor, memory.Mapping]]:
        tensors = dict(named_tensors(module))
        for key, slot in manifest.slots:
            tensor = tensors.get(slot.name)
            arena = self._arenas.get(key)
            if tensor is None or arena is None or stayed(tensor, slot, arena.mapping):
                continue
            yield slot, tensor, arena.mapping

    def write_home(self, staging: Mapping[str, int]) -> tuple[home.HomeReport, dict[str, int]]:
        """Write what this rank owes of the changed modules into staging files.

        Args:
            staging: Descriptors of the notebook's staging files by key of the arena. A module that
                lies in others as well stays here.

        Returns:
            What was written, and the files of this rank's own that hold whole arenas, by key: their
            descriptors stay this object's.
        """
        changed = [k for k in self.dirty() if staging.keys() >= set(self._used_by([k]))]
        keys = self._used_by(changed)
        files = {key: self._in_files[key] for key in keys if key in self._in_files}
        report = home.Homebound(
            rank=self._rank,
            modules=[self._modules[key] for key in changed],
            mappings={key: self._arenas[key].mapping for key in keys},
            staging={key: staging[key] for key in keys},
            num_nodes=self._num_nodes,
            held=self._held,
            in_files=files,
            origins={self._modules[key][0].path: self._origins[key] for key in changed},
            keeps_states=False,
        ).write()
        if self._rank != 0:
            written = self._written()
            self._reported |= {key: self._own_digest(key, written) for key in changed}
        stays = {
            key
            for m, _ in self._modules.values()
            if m.path in report.stranded
            for key, _ in m.slots
        }
        self._handed_over = frozenset(files.keys() - stays)
        return report, files

    def settle(self) -> None:
        """The notebook has the weights: give back private pages that are equal to the arena's."""
        for key in self._modules:
            self._at_home[key] = self._departed_state(key)
        self._has_stepped = False
        self._seen.clear()
        for key, spans in self._written().items():
            arena = self._arenas[key]
            if key in self._in_files:
                self._move_back(key, arena)
                continue
            shared = arena.as_the_notebook_sees_it().bytes()
            own = arena.mapping.bytes()
            for start, stop in _equal(own, shared, spans):
                arena.mapping.give_back(start, stop)

    def _move_back(self, key: str, arena: _Arena) -> None:
        """Map the arena again, privately; what it does not say is kept as private pages."""
        own, kept = arena.mapping.bytes(), []
        if key not in self._handed_over:
            shared = arena.as_the_notebook_sees_it().bytes()
            kept = [(at, own[slice(*at)].copy()) for at in _different(own, shared)]
        arena.mapping.replace(arena.fd, private=True)
        for (start, stop), values in kept:
            own[start:stop] = values
        self._stop_training_in(key)

    def _stop_training_in(self, key: str) -> None:
        fd = self._in_files.pop(key, None)
        if fd is not None:
            os.close(fd)

    def _let_go(self, key: str, start: int, stop: int) -> None:
        """Let these bytes be the notebook's again, and no others."""
        arena = self._arenas[key]
        if key in self._in_files:
            memory.read_at(arena.fd, arena.mapping.view(start, stop), start)
        else:
            _let_go(arena, start, stop)

    # ------------------------------------------------------------------- while it is trained

    def about_to_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to make a step: let rank 0 train in files of its own."""
        if self._rank != 0 or not self._share_back or optimizer in self._seen:
            return
        self._seen.add(optimizer)
        left = {key: m for key, m in self.mappings.items() if key not in self._in_files}
        for key in home.about_to_be_trained(left, (g["params"] for g in optimizer.param_groups)):
            with contextlib.suppress(OSError):  # no room: private pages do, and the end will tell
                self._in_files[key] = _moved_in(left[key])

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer made a step."""
        self._held.hold_for(optimizer, (module for _, module in self._modules.values()))
        self._has_stepped = True


def _moved_in(mapping: memory.Mapping) -> int:
    """A new file that the mapping shows and writes from now on."""
    fd = memory.create_file("staging", mapping.nbytes)
    try:
        home.move_in(mapping, fd)
    except BaseException:  # no descriptor is lost to an interrupt either
        os.close(fd)
        raise
    return fd


_ALIGN = 64  # what lies between the tensors of an arena belongs to nobody


def _overlap(manifest: home.Manifest, written: dict[str, list[memory.Range]]) -> bool:
    return any(
        start < slot.start + slot.nbytes and slot.start < stop
        for key, slot in manifest.slots
        for start, stop in written.get(key, ())
    )


def _let_go(arena: _Arena, start: int, stop: int) -> None:
    """Let these bytes be the notebook's again, and no others."""
    page = memory.PAGE_BYTES
    first = -(-start // page) * page
    last = stop if stop == arena.mapping.nbytes else stop // page * page
    if first < last:
        arena.mapping.give_back(first, last)
    edges = (
        [(start, min(first, stop)), (max(last, start), stop)] if first < last else [(start, stop)]
    )
    for low, high in edges:  # pages that others have a part in
        if low < high:
            memory.read_at(arena.fd, arena.mapping.view(low, high), low)


def _equal(
    own: np.ndarray[Any, Any], shared: np.ndarray[Any, Any], spans: Sequence[memory.Range]
) -> Iterator[memory.Range]:
    """The runs of whole pages in these spans that are the same in both."""
    for begin, end in spans:
        for start in range(begin, end, _CHUNK_BYTES):
            stop = min(start + _CHUNK_BYTES, end)
            if np.array_equal(_words(own[start:stop]), _words(shared[start:stop])):
                yield start, stop
                continue
            for low in range(start, stop, memory.PAGE_BYTES):
                high = min(low + memory.PAGE_BYTES, stop)
                if np.array_equal(own[low:high], shared[low:high]):
                    yield low, high


def _different(own: np.ndarray[Any, Any], shared: np.ndarray[Any, Any]) -> Iterator[memory.Range]:
    """The runs of whole pages that are not the same in both."""
    return memory.gaps(memory.merge(_equal(own, shared, [(0, own.size)])), own.size)


def _words(raw: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return raw.view(np.uint64) if raw.size % _WORD_BYTES == 0 else raw


def _tell_of_steps(arrivals: Arrivals) -> None:
    """Tell it of every optimizer's steps: some write weights past torch's counting."""
    known = weakref.ref(arrivals)

    def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        found = known()
        if found is not None:
            found.about_to_step(optimizer)

    def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        found = known()
        if found is not None:
            found.stepped(optimizer)

    for handle in (
        register_optimizer_step_pre_hook(before_step),
        register_optimizer_step_post_hook(after_step),
    ):
        weakref.finalize(arrivals, _remove, handle)


def _remove(handle: Any) -> None:
    with contextlib.suppress(KeyError):
        handle.remove()
