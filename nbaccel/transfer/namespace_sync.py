"""What is sent from the notebook's namespace to the workers: what a cell needs and they lack.

For every rank `NamespaceSync` remembers the fingerprint that each name had in the notebook when the
rank got it, or bound it itself. A name is sent when the notebook's value has another fingerprint.
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nbaccel.base.errors import ModelNotShareable, NotSendable
from nbaccel.transfer import arena, memfd, pickling
from nbaccel.transfer.free_names import Names, is_users
from nbaccel.transfer.namespace_snapshot import (
    Fingerprint,
    ModuleChange,
    ModuleRecord,
    ModuleRecords,
    ModuleState,
    NamespaceSnapshot,
    OpaqueToken,
)
from nbaccel.transfer.object_walk import find_in, pickles
from nbaccel.transfer.pickling import ModulePlace
from nbaccel.transfer.worker_namespace import Load, NamespaceUpdate

# A module found in one round changes what another value refers to in the next.
_MAX_SURVEY_ROUNDS = 4


@dataclass
class _RankState:
    """What one rank has, as far as the notebook knows."""

    seen: dict[str, Hashable] = field(default_factory=dict)  # tokens of what it was sent or bound
    modules: dict[str, ModuleState] = field(default_factory=dict)  # those it has, as sent last
    arenas: dict[str, weakref.ref[arena.Arena]] = field(default_factory=dict)


@dataclass(frozen=True)
class PreparedPart:
    """What ranks that lack the same are sent, and what they have once they have taken it."""

    ranks: tuple[int, ...]
    message: NamespaceUpdate
    fds: list[int]
    tokens: Mapping[str, Hashable]
    states: Mapping[str, ModuleState]
    arenas: Mapping[str, weakref.ref[arena.Arena]]


@dataclass
class PreparedUpdate:
    """An update with its descriptors, ready to be sent. Close it after sending."""

    parts: list[PreparedPart] = field(default_factory=list)
    fds: list[int] = field(default_factory=list)
    nbytes: int = 0  # of the payloads, and of arenas that ranks are sent

    def close(self) -> None:
        """Give up the descriptors."""
        fds, self.fds = self.fds, []
        memfd.close_all(fds)


class _LeftOut(Exception):
    """A name that is not needed for sure cannot be sent: begin again without it."""


class NamespaceSync:
    """The notebook's side of the synchronisation of names."""

    def __init__(self, namespace: Mapping[str, Any], ranks: Sequence[int]) -> None:
        self._namespace = namespace
        self._ranks = {rank: _RankState() for rank in ranks}
        self._records: ModuleRecords = {}
        self.reasons: dict[str, str] = {}

    def prepare(
        self, names: Names, ranks: Sequence[int], *, force_send: bool = False
    ) -> PreparedUpdate | None:
        """Pack what these ranks lack of these names, and of what those refer to."""
        left_out: set[str] = set()
        while True:
            # A new one per attempt: what the failed attempt packed refers to the names left out.
            packing = _UpdatePacking(self, names, left_out, force_send=force_send)
            try:
                packing.pack(ranks)
            except BaseException as error:  # an interrupt must not leak the descriptors either
                packing.prepared.close()
                if not isinstance(error, _LeftOut):
                    raise
            else:
                return packing.prepared if packing.prepared.parts else None

    def taken(self, update: PreparedUpdate) -> None:
        """Record that the ranks have taken the update."""
        for part in update.parts:
            for state in map(self._ranks.__getitem__, part.ranks):
                state.seen.update(part.tokens)
                state.modules.update(part.states)
                for key in part.message.forget:
                    state.modules.pop(key, None)
                for key in part.message.forget_arenas:
                    state.arenas.pop(key, None)
                state.arenas.update(part.arenas)

    def bound(self, rank: int, names: Iterable[str]) -> None:
        """A rank's cell bound or deleted these: the notebook's are sent only if they change."""
        tokens = self._ranks[rank].seen
        snapshot = NamespaceSnapshot(self._namespace, self._records)
        for name in names:
            tokens.pop(name, None)
            if name in self._namespace:
                # Even the id alone shows that a name was bound anew.
                tokens[name] = snapshot.fingerprint_or_id(name, self._namespace[name]).token

    def records(self, keys: Collection[str]) -> list[ModuleRecord]:
        """The modules with these keys that still live in the notebook."""
        records = [self._records[key] for key in sorted(keys) if key in self._records]
        return [record for record in records if record.sharing.modules]

    @contextlib.contextmanager
    def taking_weights(self, records: Iterable[ModuleRecord]) -> Iterator[None]:
        """A block in which weights come from the ranks: no news to them, to be taken over."""
        arenas = {key for record in records for key in record.arenas}
        # Modules may share an arena, so one that was not trained can change with another.
        versions = [
            (record.key, module, arena.module_version(module))
            for record in tuple(self._records.values())
            if (module := record.module()) is not None and arenas & record.arenas.keys()
        ]
        yield
        for key, module, before in versions:
            increase = arena.module_version(module) - before
            for state in self._ranks.values():
                sent = state.modules.get(key)
                if sent is not None and increase:
                    state.modules[key] = replace(sent, versions=sent.versions + increase)


class _UpdatePacking:
    """One attempt to pack what a cell needs."""

    def __init__(
        self, sync: NamespaceSync, names: Names, left_out: set[str], *, force_send: bool
    ) -> None:
        self._namespace = sync._namespace
        self._records = sync._records
        self._ranks = sync._ranks
        self._reasons = sync.reasons
        self._names = names
        self._left_out = left_out
        self._forced = names.needed if force_send else frozenset()
        self._snapshot = NamespaceSnapshot(self._namespace, self._records)
        self._found: dict[str, Fingerprint] = {}
        self.prepared = PreparedUpdate()

    def pack(self, ranks: Sequence[int]) -> None:
        for _ in range(_MAX_SURVEY_ROUNDS):
            known = set(self._records)
            self._found = self._fingerprints_now()
            if known >= self._records.keys():
                break
        # Grouped, because ranks mostly have the same: one pickle then serves all of them.
        left = list(ranks)
        while left:
            state = self._ranks[left[0]]
            group = tuple(rank for rank in left if self._ranks[rank] == state)
            left = [rank for rank in left if rank not in group]
            self._add_part(group, state)

    def _fingerprints_now(self) -> dict[str, Fingerprint]:
        """The fingerprints of all names that are to be there, also of those that others read."""
        found: dict[str, Fingerprint] = {}
        unvisited = deque(sorted(self._names.needed) + sorted(self._names.possible))
        while unvisited:
            name = unvisited.popleft()
            if (
                name in found
                or name in self._left_out
                or name not in self._namespace
                or not is_users(name)
            ):
                continue
            try:
                found[name] = self._snapshot.fingerprint(name, self._namespace[name])
            except Exception as error:  # pickling runs user code: it may raise anything
                self._refuse(name, error)
                continue
            self._reasons.pop(name, None)
            unvisited.extend(sorted(found[name].names))
            for key in self._reach(found[name].modules):
                unvisited.extend(sorted(self._snapshot.state(key).names))
        return found

    def _reach(self, keys: Iterable[str]) -> list[str]:
        """These modules, and those that their attributes refer to."""
        reached: dict[str, None] = {}
        unvisited = deque(sorted(keys))
        while unvisited:
            key = unvisited.popleft()
            if key not in reached:
                reached[key] = None
                unvisited.extend(sorted(self._snapshot.state(key).modules))
        return list(reached)

    def _modules_in(self, variable_names: Iterable[str]) -> set[str]:
        return {key for name in variable_names for key in self._found[name].modules}

    def _change(self, key: str, sent: ModuleState, *, adopt: bool) -> ModuleChange | None:
        """What must be sent to a worker that has a module in this state; None if nothing."""
        state = self._snapshot.state(key)
        changed = {
            place
            for place, token in state.tokens.items()
            # What does not pickle cannot be sent; the worker keeps its own value.
            if sent.tokens.get(place) != token and not isinstance(token, OpaqueToken)
        }
        removed = frozenset(sent.tokens.keys() - state.tokens.keys())
        adopt = adopt or sent.versions != state.versions
        if not (changed or removed or adopt):
            return None
        if adopt:
            # Workers cannot read the notebook's device memory; they adopt from these copies.
            for tensor, host_copy in arena.host_copies(self._records[key].sharing):
                host_copy.copy_(tensor)
        parts = self._snapshot.surveys[key].changeable()
        values = {place: value for place, value in parts if place in changed}
        return ModuleChange(key=key, values=values, removed=removed, adopt=adopt)

    def _share(self, names: Iterable[str], whole: Collection[str]) -> None:
        """Move the modules that come whole to arenas; leaves out names whose module cannot."""
        for name in names:
            try:
                for key in self._reach(self._found[name].modules):
                    if key in whole:
                        self._records[key].share()
            except ModelNotShareable as error:
                if name in self._names.needed:
                    raise
                # A name that is only possibly read must not make the cell fail.
                self._reasons[name] = str(error)
                self._left_out.add(name)
                raise _LeftOut from error
        # The rest: modules that a changed attribute of a known module refers to.
        for key in whole:
            self._records[key].share()

    def _add_part(self, ranks: tuple[int, ...], state: _RankState) -> None:
        names = [
            name
            for name, fingerprint in self._found.items()
            if name in self._forced or state.seen.get(name) != fingerprint.token
        ]
        known = {key for key in state.modules if key in self._records}
        reached = [key for key in self._reach(self._modules_in(self._found)) if key in known]
        starts = self._modules_in(names).union(reached)
        whole = [key for key in self._reach(starts) if key not in known]
        forced = self._modules_in(self._forced & self._found.keys())
        changes = {
            key: change
            for key in reached
            if (change := self._change(key, state.modules[key], adopt=key in forced))
        }
        if not (names or whole or changes):
            return
        # Before packing: the pickle refers to tensors by their place in an arena.
        self._share(names, whole)
        records = [self._records[key] for key in whole]
        content: Load = (
            {name: self._namespace[name] for name in names},
            tuple((record.key, shared) for record in records for shared in record.sharing.modules),
            tuple(changes.values()),
        )
        sender = self._snapshot.sender(self._places(known))
        try:
            packed, payload_fd = pickling.pack(content, sender)
        except Exception as error:  # pickling runs user code: it may raise anything
            self._find_culprit(names, error)
            raise
        self.prepared.fds.append(payload_fd)
        used = dict(sender.arenas)
        for record in records:
            used |= record.arenas
        new = {key: found for key, found in used.items() if key not in state.arenas}
        self.prepared.nbytes += packed.nbytes + sum(found.nbytes for found in new.values())
        arena_fds = self._arena_fds(new.values())
        message = NamespaceUpdate(
            arenas=tuple((key, found.nbytes) for key, found in new.items()),
            payload=packed,
            sources=sender.sources,
            forget=tuple(sorted(state.modules.keys() - known)),
            forget_arenas=tuple(sorted(key for key, held in state.arenas.items() if not held())),
            # A module or tensor that comes, or whose weights are to be taken over anew.
            reads_arenas=bool(used) or any(change.adopt for change in changes.values()),
        )
        part = PreparedPart(
            ranks=ranks,
            message=message,
            fds=[*arena_fds, payload_fd],
            tokens={name: self._found[name].token for name in names},
            states={key: self._snapshot.state(key) for key in (*whole, *changes)},
            # Weak: what a rank has must not keep the notebook's memory alive.
            arenas={key: weakref.ref(found) for key, found in new.items()},
        )
        self.prepared.parts.append(part)

    def _arena_fds(self, arenas: Iterable[arena.Arena]) -> list[int]:
        """Copies of their descriptors, which are closed after sending."""
        fds = []
        for found in arenas:
            # Live workers follow what cells write to it, so it cannot be a checkpoint's file.
            found.leave_file()
            fds.append(os.dup(found.fd))
            self.prepared.fds.append(fds[-1])
        return fds

    def _places(self, known: Collection[str]) -> Callable[[Any], ModulePlace | None]:
        """Finds what lies in modules that the ranks have."""

        # At first use: most pickles hold no module, and the table visits all of them.
        @functools.cache
        def places() -> dict[int, ModulePlace]:
            # Only modules that these ranks have: a place in any other would name nothing there.
            return self._snapshot.places(known)

        return lambda part: places().get(id(part))

    def _refuse(self, name: str, error: Exception) -> None:
        """Raise for a needed name; leave others out, with the reason."""
        if name not in self._names.needed:
            self._reasons[name] = f"{type(error).__name__}: {error}"
            self._left_out.add(name)
            return
        path = find_in(self._namespace[name], name, self._namespace)
        raise NotSendable(
            f"{path} cannot be sent to the workers: {type(error).__name__}: {error}.\n"
            "Make it in a %%accelerate cell instead, or send what it is made from.",
            path=path,
        ) from error

    def _find_culprit(self, names: Iterable[str], error: Exception) -> None:
        """Find the names that make the whole update unpicklable, and refuse or leave them out."""
        culprits = [name for name in names if not pickles(self._namespace[name], self._namespace)]
        for name in culprits:
            self._refuse(name, error)
        if culprits:
            raise _LeftOut from error
