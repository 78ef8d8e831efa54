"""What is sent from the notebook's namespace to the workers: what a cell needs and they lack.

    names of a cell ─► fingerprints ─► what a group of equal ranks lacks ─► one part for it
               (NamespaceSnapshot)                                       (PreparedPart)

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
from nbaccel.transfer import arena, memfd, namespace_snapshot, pickling
from nbaccel.transfer.free_names import Names, is_users
from nbaccel.transfer.namespace_snapshot import (
    Fingerprint,
    ModuleChange,
    ModuleRecord,
    ModuleRecords,
    ModuleState,
    NamespaceSnapshot,
    difference,
)
from nbaccel.transfer.object_walk import find_in
from nbaccel.transfer.pickling import ModulePlace, Reducer
from nbaccel.transfer.worker_namespace import Load, NamespaceUpdate

# A module found in one round changes what another value refers to in the next.
_MAX_SURVEY_ROUNDS = 4


@dataclass
class _RankState:
    """What one rank has, as far as the notebook knows."""

    seen: dict[str, Hashable] = field(default_factory=dict)
    """Token of the notebook's value when the name was sent, or bound there."""
    modules: dict[str, ModuleState] = field(default_factory=dict)
    """Modules that it has, by key, in the state that was sent last."""
    arenas: dict[str, weakref.ref[arena.Arena]] = field(default_factory=dict)


@dataclass(frozen=True)
class PreparedPart:
    """What ranks that lack the same are sent, and what they have once they have taken it."""

    ranks: tuple[int, ...]
    message: NamespaceUpdate
    fds: list[int]
    tokens: Mapping[str, Hashable]
    states: Mapping[str, ModuleState]
    arenas: Mapping[str, arena.Arena]


@dataclass
class PreparedUpdate:
    """An update with its descriptors, ready to be sent. Close it after sending."""

    parts: list[PreparedPart] = field(default_factory=list)
    fds: list[int] = field(default_factory=list)
    nbytes: int = 0
    """Of the payloads, and of arenas that ranks are sent."""

    def close(self) -> None:
        """Give up the descriptors."""
        fds = self.fds
        self.fds = []
        memfd.close_all(fds)


class _LeaveOut(Exception):
    """These names cannot be sent, and are not needed for sure: go on without them."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        self.names = frozenset(names)


class NamespaceSync:
    """The notebook's side of the synchronisation of names."""

    def __init__(self, namespace: Mapping[str, Any], ranks: Sequence[int]) -> None:
        self._namespace = namespace
        self._ranks = {rank: _RankState() for rank in ranks}
        self._modules = ModuleRecords()
        self.reasons: dict[str, str] = {}

    def prepare(
        self, names: Names, ranks: Sequence[int], *, force_send: bool = False
    ) -> PreparedUpdate | None:
        """Pack what these ranks lack of these names, and of what those refer to."""
        left_out: frozenset[str] = frozenset()
        while True:
            # A new one per attempt: what the failed attempt packed refers to the names left out.
            packing = _UpdatePacking(self, names, left_out, force_send=force_send)
            try:
                packing.pack(ranks)
            except _LeaveOut as error:
                packing.prepared.close()
                left_out |= error.names
            except BaseException:  # an interrupt must not leak the descriptors either
                packing.prepared.close()
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
                for key, sent in part.arenas.items():
                    # Weak: what a rank has must not keep the notebook's memory alive.
                    state.arenas[key] = weakref.ref(sent)

    def bound(self, rank: int, names: Iterable[str]) -> None:
        """A rank's cell bound or deleted these: the notebook's are sent only if they change."""
        tokens = self._ranks[rank].seen
        snapshot = NamespaceSnapshot(self._namespace, self._modules)
        for name in names:
            tokens.pop(name, None)
            if name in self._namespace:
                tokens[name] = self._token(snapshot, name)

    def _token(self, snapshot: NamespaceSnapshot, name: str) -> Hashable:
        value = self._namespace[name]
        try:
            return snapshot.fingerprint(name, value).token
        # The id still shows that a name was bound anew.
        except Exception:  # pickling runs user code: it may raise anything
            return ("unsendable", id(value))

    def records(self, keys: Collection[str]) -> list[ModuleRecord]:
        """The modules with these keys that still live in the notebook."""
        return [
            record
            for record in self._modules.with_keys(sorted(keys))
            if record.slots is not None and record.module is not None
        ]

    @contextlib.contextmanager
    def taking_weights(self, records: Iterable[ModuleRecord]) -> Iterator[None]:
        """A block in which weights come from the ranks: no news to them, to be taken over."""
        arenas = {key for record in records for key in record.sharing.arenas}
        # Modules may share an arena, so one that was not trained can change with another.
        versions = {
            record: record.versions()
            for record in tuple(self._modules.values())
            if arenas & record.sharing.arenas.keys()
        }
        yield
        for record, before in versions.items():
            increase = record.versions() - before
            for state in self._ranks.values():
                sent = state.modules.get(record.key)
                if sent is not None and increase:
                    state.modules[record.key] = replace(sent, versions=sent.versions + increase)


class _UpdatePacking:
    """One attempt to pack what a cell needs."""

    def __init__(
        self, sync: NamespaceSync, names: Names, left_out: frozenset[str], *, force_send: bool
    ) -> None:
        self._namespace = sync._namespace
        self._modules = sync._modules
        self._ranks = sync._ranks
        self._reasons = sync.reasons
        self._names = names
        self._left_out = left_out
        self._forced = names.needed if force_send else frozenset()
        self._snapshot = NamespaceSnapshot(self._namespace, self._modules)
        self._found: dict[str, Fingerprint] = {}
        self.prepared = PreparedUpdate()

    def pack(self, ranks: Sequence[int]) -> None:
        for _ in range(_MAX_SURVEY_ROUNDS):
            news = self._snapshot.news
            self._found = self._fingerprints_now()
            if self._snapshot.news == news:
                break
        # Grouped, because ranks mostly have the same: one pickle then serves all of them.
        groups: list[list[int]] = []
        for rank in ranks:
            state = self._ranks[rank]
            group = next((group for group in groups if self._ranks[group[0]] == state), None)
            if group is None:
                groups.append([rank])
            else:
                group.append(rank)
        for group in groups:
            self._add_part(tuple(group), self._ranks[group[0]])
        for part in self.prepared.parts:
            for name in part.tokens:
                self._reasons.pop(name, None)

    # ------------------------------------------------------------------- what there is

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
        state = self._snapshot.state(key)
        change = difference(key, sent, state, self._snapshot.survey(key), adopt=adopt)
        record = self._modules.get(key)
        if record is not None and change is not None and change.adopt:
            # Workers cannot read the notebook's device memory; they adopt from these copies.
            arena.update_host_copies(record.sharing)
        return change

    # ------------------------------------------------------------------- packing

    def _share(self, names: Iterable[str], whole: Collection[str]) -> None:
        """Move the modules that come whole to arenas; leaves out names whose module cannot."""
        for name in names:
            keys = self._reach(self._found[name].modules)
            try:
                self._share_modules(key for key in keys if key in whole)
            except ModelNotShareable as error:
                if name in self._names.needed:
                    raise
                self._reasons[name] = str(error)
                # A name that is only possibly read must not make the cell fail.
                raise _LeaveOut([name]) from error
        # The rest: modules that a changed attribute of a known module refers to.
        self._share_modules(whole)

    def _share_modules(self, keys: Iterable[str]) -> None:
        for record in self._modules.with_keys(keys):
            record.share()

    def _add_part(self, ranks: tuple[int, ...], state: _RankState) -> None:
        """Pack what ranks in this state lack."""
        names = [
            name
            for name, fingerprint in self._found.items()
            if name in self._forced or state.seen.get(name) != fingerprint.token
        ]
        known = {record.key for record in self._modules.with_keys(state.modules)}
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
        records = self._modules.with_keys(whole)
        content: Load = (
            {name: self._namespace[name] for name in names},
            tuple((record.key, shared) for record in records for shared in record.sharing.modules),
            tuple(changes.values()),
        )
        sender = pickling.Sender(
            self._snapshot.stand_ins(), Reducer(self._namespace, self._places(known))
        )
        try:
            packed, payload_fd = pickling.pack(content, sender)
        except Exception as error:  # pickling runs user code: it may raise anything
            self._find_culprit(names, error)
            raise
        self.prepared.fds.append(payload_fd)
        used = dict(sender.arenas)
        for record in records:
            used |= record.sharing.arenas
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
            arenas=new,
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
        def table() -> dict[int, ModulePlace]:
            # Only modules that these ranks have: a place in any other would name nothing there.
            return self._snapshot.table(self._modules.with_keys(sorted(known)))

        return lambda part: table().get(id(part))

    # ------------------------------------------------------------------- what cannot be sent

    def _refuse(self, name: str, error: Exception) -> None:
        """Raise for a needed name; note the reason for others."""
        if name not in self._names.needed:
            self._reasons[name] = f"{type(error).__name__}: {error}"
            return
        path = find_in(self._namespace[name], name, can_pickle=self._pickles)
        raise NotSendable(
            f"{path} cannot be sent to the workers: {type(error).__name__}: {error}.\n"
            "Make it in a %%accelerate cell instead, or send what it is made from.",
            path=path,
        ) from error

    def _pickles(self, value: Any) -> bool:
        try:
            namespace_snapshot.fingerprint_of_pickle(value, Reducer(self._namespace))
        except Exception:  # whatever is raised, it does not pickle
            return False
        return True

    def _find_culprit(self, names: Iterable[str], error: Exception) -> None:
        """Find the names that make the whole update unpicklable, and refuse or leave them out."""
        culprits = [name for name in names if not self._pickles(self._namespace[name])]
        for name in culprits:
            self._refuse(name, error)
        if culprits:
            raise _LeaveOut(culprits) from error
