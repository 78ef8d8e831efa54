"""What is sent from the notebook's namespace to the workers: what a cell needs and they lack.

    names of a cell ─► fingerprints ─► what each rank lacks ─► one part per group of equal ranks
               (NamespaceSnapshot)        (_RankLack)       (UpdatePart, in a PreparedUpdate)

For every rank `NamespaceSync` remembers the fingerprint that each name had in the notebook when the
rank got it, or bound it itself. A name is sent when the notebook's value has another fingerprint.
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nbaccel.base.errors import ModelNotShareable, NotSendable
from nbaccel.transfer import arena, memfd, namespace_snapshot, pickling
from nbaccel.transfer.free_names import Names, is_users
from nbaccel.transfer.function_pickling import ModulePlace, Reducer
from nbaccel.transfer.module_registry import ModuleRecord, ModuleRegistry, ModuleState, difference
from nbaccel.transfer.namespace_snapshot import Fingerprint, NamespaceSnapshot
from nbaccel.transfer.namespace_update import Load, NamespaceUpdate, Update, UpdatePart

__all__ = ["NamespaceSync", "PreparedUpdate"]


# A module found in one round changes what another value refers to in the next.
_MAX_SURVEY_ROUNDS = 4

_ModuleChanges = Mapping[str, tuple[Update, tuple[type, ...]]]
"""Key of a module that ranks have → what changed in it, and its classes that changed."""


@dataclass
class _RankState:
    """What one rank has, as far as the notebook knows."""

    seen: dict[str, Hashable] = field(default_factory=dict)
    """Token of the notebook's value when the name was sent, or bound there."""
    sent_states: dict[str, ModuleState] = field(default_factory=dict)
    """Modules that it has, by key, in the state that was sent last."""
    arenas: dict[str, weakref.ref[arena.Arena]] = field(default_factory=dict)


@dataclass(frozen=True)
class _RankLack:
    """What a rank lacks. Equal for ranks that can be given the same."""

    names: tuple[str, ...]
    whole: tuple[str, ...]
    known: frozenset[str]
    """Keys of the living modules that it has."""
    states: tuple[tuple[str, ModuleState], ...]
    """The states that were sent of those that the cell can reach."""


@dataclass(frozen=True)
class _PackedPart:
    """A part, and what its ranks have once they have taken it."""

    part: UpdatePart
    tokens: Mapping[str, Hashable]
    states: Mapping[str, ModuleState]


@dataclass
class PreparedUpdate:
    """An update with its descriptors, ready to be sent. Close it after sending."""

    message: NamespaceUpdate
    fds: list[int]
    nbytes: int
    """Bytes that were copied for it: the payloads, and arenas made for modules."""
    packed_parts: list[_PackedPart]
    arenas: dict[str, arena.Arena]

    @property
    def wanted(self) -> dict[int, tuple[str, ...]]:
        """Per rank, the names to bind there."""
        return {
            rank: tuple(packed.tokens) for packed in self.packed_parts for rank in packed.part.ranks
        }

    def close(self) -> None:
        """Give up the descriptors."""
        file_descriptors = self.fds
        self.fds = []
        memfd.close_all(file_descriptors)


class _LeaveOut(Exception):
    """These names cannot be sent, and are not needed for sure: go on without them."""

    def __init__(self, cell_names: Iterable[str]) -> None:
        super().__init__()
        self.names = frozenset(cell_names)


class NamespaceSync:
    """The notebook's side of the synchronisation of names."""

    def __init__(self, notebook_namespace: Mapping[str, Any], rank_numbers: Sequence[int]) -> None:
        self._namespace = notebook_namespace
        self._ranks = {rank: _RankState() for rank in rank_numbers}
        self._modules = ModuleRegistry()
        self.reasons: dict[str, str] = {}
        """Names that could not be sent, with why."""

    def prepare(
        self, cell_names: Names, rank_numbers: Sequence[int], *, force_send: bool = False
    ) -> PreparedUpdate | None:
        """Pack what these ranks lack of these names, and of what those refer to."""
        left_out: frozenset[str] = frozenset()
        while True:
            # A new one per attempt: what the failed attempt packed refers to the names left out.
            update_packing = _UpdatePacking(self, cell_names, left_out, force_send=force_send)
            try:
                return update_packing.pack(rank_numbers)
            except _LeaveOut as left_out_now:
                update_packing.close()
                left_out |= left_out_now.names
            except BaseException:  # an interrupt must not leak the descriptors either
                update_packing.close()
                raise

    def taken(self, prepared_update: PreparedUpdate) -> None:
        """Record that the ranks have taken the update."""
        for packed in prepared_update.packed_parts:
            for rank_state in map(self._ranks.__getitem__, packed.part.ranks):
                rank_state.seen.update(packed.tokens)
                rank_state.sent_states.update(packed.states)
                for key in packed.part.forget:
                    rank_state.sent_states.pop(key, None)
                for key in packed.part.forget_arenas:
                    rank_state.arenas.pop(key, None)
                for key, shared_arena in prepared_update.arenas.items():
                    # Weak: what a rank has must not keep the notebook's memory alive.
                    rank_state.arenas.setdefault(key, weakref.ref(shared_arena))

    def bound(self, rank: int, cell_names: Iterable[str]) -> None:
        """Record that a rank's cell bound or deleted these names itself.

        What the notebook has under such a name is sent only when it changes after this.
        """
        tokens = self._ranks[rank].seen
        snapshot = NamespaceSnapshot(self._namespace, self._modules)
        for variable_name in cell_names:
            tokens.pop(variable_name, None)
            if variable_name in self._namespace:
                tokens[variable_name] = self._token(snapshot, variable_name)

    def _token(self, snapshot: NamespaceSnapshot, name: str) -> Hashable:
        value = self._namespace[name]
        try:
            return snapshot.fingerprint(name, value).token
        # The id still shows that a name was bound anew.
        except Exception:  # pickling runs user code: it may raise anything
            return ("unsendable", id(value))

    def records(self, module_keys: Collection[str]) -> list[ModuleRecord]:
        """The modules with these keys that still live in the notebook."""
        return [
            record
            for record in self._modules.with_keys(sorted(module_keys))
            if record.is_shared and record.module is not None
        ]

    @contextlib.contextmanager
    def taking_weights(self, module_records: Iterable[ModuleRecord]) -> Iterator[None]:
        """Weights of these modules come from the ranks within this block.

        What changes in their tensors is no news to the ranks: they are not asked to take it over.
        """
        shared_arenas = {key for record in module_records for key in record.arenas()}
        # Modules may share an arena, so one that was not trained can change with another.
        versions_before = {
            record: record.versions()
            for record in self._modules.all()
            if shared_arenas & record.arenas().keys()
        }
        yield
        for record, version_before in versions_before.items():
            increase = record.versions() - version_before
            for rank_state in self._ranks.values():
                sent_state = rank_state.sent_states.get(record.key)
                if sent_state is not None and increase:
                    rank_state.sent_states[record.key] = replace(
                        sent_state, versions=sent_state.versions + increase
                    )


class _UpdatePacking:
    """One attempt to pack what a cell needs."""

    def __init__(
        self,
        namespace_sync: NamespaceSync,
        cell_names: Names,
        left_out: frozenset[str],
        *,
        force_send: bool,
    ) -> None:
        self._namespace = namespace_sync._namespace
        self._modules = namespace_sync._modules
        self._ranks = namespace_sync._ranks
        self._reasons = namespace_sync.reasons
        self._names = cell_names
        self._left_out = left_out
        self._forced = cell_names.needed if force_send else frozenset()
        self._snapshot = NamespaceSnapshot(self._namespace, self._modules)
        self._found: dict[str, Fingerprint] = {}
        self._fds: list[int] = []
        self._nbytes = 0
        self._adopts_weights = False
        self._arenas: dict[str, arena.Arena] = {}
        """Those that the payloads refer to."""

    def close(self) -> None:
        memfd.close_all(self._fds)
        self._fds.clear()

    def pack(self, rank_numbers: Sequence[int]) -> PreparedUpdate | None:
        for _ in range(_MAX_SURVEY_ROUNDS):
            count_before = self._snapshot.news
            self._found = self._fingerprints_now()
            if self._snapshot.news == count_before:
                break
        # Grouped, because ranks mostly lack the same: one pickle then serves all of them.
        ranks_by_lack: dict[_RankLack, list[int]] = defaultdict(list)
        for rank in rank_numbers:
            ranks_by_lack[self._lack(self._ranks[rank])].append(rank)
        packed_parts = []
        for rank_lack, group_ranks in ranks_by_lack.items():
            module_changes = self._changes(rank_lack)
            if rank_lack.names or rank_lack.whole or module_changes:
                # Before packing: the pickle refers to a module's tensors by their place in an
                # arena.
                self._share(rank_lack)
                packed_parts.append(self._part(rank_lack, module_changes, tuple(group_ranks)))
        return self._update(packed_parts) if packed_parts else None

    def _update(self, packed_parts: list[_PackedPart]) -> PreparedUpdate:
        ranks = [rank for packed in packed_parts for rank in packed.part.ranks]
        new_arenas = {
            key: found
            for key, found in self._arenas.items()
            if any(key not in self._ranks[rank].arenas for rank in ranks)
        }
        for found in reversed(new_arenas.values()):
            # Live workers follow what cells write to it, so it cannot be a checkpoint's file.
            found.leave_file()
            # A copy, because it is closed after sending. In front: arenas come before the parts.
            self._fds.insert(0, os.dup(found.fd))
        for packed in packed_parts:
            for variable_name in packed.tokens:
                self._reasons.pop(variable_name, None)
        return PreparedUpdate(
            message=NamespaceUpdate(
                arenas=tuple((key, found.nbytes) for key, found in new_arenas.items()),
                parts=tuple(packed.part for packed in packed_parts),
                # A module or tensor that comes, or whose weights are to be taken over anew.
                reads_arenas=bool(self._arenas) or self._adopts_weights,
            ),
            fds=self._fds,
            nbytes=self._nbytes,
            packed_parts=packed_parts,
            arenas=new_arenas,
        )

    # ------------------------------------------------------------------- what there is

    def _fingerprints_now(self) -> dict[str, Fingerprint]:
        """The fingerprints of all names that are to be there, also of those that others read."""
        fingerprints: dict[str, Fingerprint] = {}
        unvisited = deque(sorted(self._names.needed) + sorted(self._names.possible))
        while unvisited:
            variable_name = unvisited.popleft()
            if (
                variable_name in fingerprints
                or variable_name in self._left_out
                or variable_name not in self._namespace
                or not is_users(variable_name)
            ):
                continue
            try:
                fingerprints[variable_name] = self._snapshot.fingerprint(
                    variable_name, self._namespace[variable_name]
                )
            except Exception as pickling_error:  # pickling runs user code: it may raise anything
                self._refuse(variable_name, pickling_error)
                continue
            unvisited.extend(sorted(fingerprints[variable_name].names))
            for module_key in self._reach(fingerprints[variable_name].modules):
                unvisited.extend(sorted(self._snapshot.state(module_key).names))
        return fingerprints

    def _reach(self, module_keys: Iterable[str]) -> list[str]:
        """These modules, and those that their attributes refer to."""
        keys: dict[str, None] = {}
        unvisited = deque(sorted(module_keys))
        while unvisited:
            module_key = unvisited.popleft()
            if module_key not in keys:
                keys[module_key] = None
                unvisited.extend(sorted(self._snapshot.state(module_key).modules))
        return list(keys)

    def _modules_in(self, variable_names: Iterable[str]) -> set[str]:
        return {key for name in variable_names for key in self._found[name].modules}

    def _lack(self, rank_state: _RankState) -> _RankLack:
        cell_names = tuple(
            variable_name
            for variable_name, fingerprint in self._found.items()
            if variable_name in self._forced
            or rank_state.seen.get(variable_name) != fingerprint.token
        )
        known_keys = frozenset(
            record.key for record in self._modules.with_keys(rank_state.sent_states)
        )
        sent_states = tuple(
            (module_key, rank_state.sent_states[module_key])
            for module_key in self._reach(self._modules_in(self._found))
            if module_key in known_keys
        )
        start_keys = self._modules_in(cell_names) | {module_key for module_key, _ in sent_states}
        whole_keys = tuple(
            module_key for module_key in self._reach(start_keys) if module_key not in known_keys
        )
        return _RankLack(cell_names, whole_keys, known_keys, sent_states)

    def _changes(self, rank_lack: _RankLack) -> _ModuleChanges:
        forced_keys = self._modules_in(self._forced & self._found.keys())
        module_changes = {}
        for module_key, sent_state in rank_lack.states:
            module_change = difference(
                module_key,
                sent_state,
                self._snapshot.state(module_key),
                self._snapshot.survey(module_key),
                adopt_weights=module_key in forced_keys,
            )
            module_record = self._modules.by_key(module_key)
            if module_change is None or module_record is None:
                continue
            module_changes[module_key] = module_change
            if module_change[0].adopt:
                self._adopts_weights = True
                # Workers cannot read the notebook's device memory; they adopt from these copies.
                arena.update_host_copies(module_record.sharing)
        return module_changes

    # ------------------------------------------------------------------- packing

    def _share(self, rank_lack: _RankLack) -> None:
        """Move the modules that come whole to arenas; leaves out names whose module cannot."""
        for name in rank_lack.names:
            reached_keys = self._reach(self._found[name].modules)
            try:
                self._share_modules(key for key in reached_keys if key in rank_lack.whole)
            except ModelNotShareable as sharing_error:
                if name in self._names.needed:
                    raise
                self._reasons[name] = str(sharing_error)
                # A name that is only possibly read must not make the cell fail.
                raise _LeaveOut([name]) from sharing_error
        # The rest: modules that a changed attribute of a known module refers to.
        self._share_modules(rank_lack.whole)

    def _share_modules(self, module_keys: Iterable[str]) -> None:
        for record in self._modules.with_keys(module_keys):
            self._nbytes += record.share()

    def _part(
        self, rank_lack: _RankLack, module_changes: _ModuleChanges, rank_numbers: tuple[int, ...]
    ) -> _PackedPart:
        module_records = self._modules.with_keys(rank_lack.whole)
        changed_classes = [one for _, classes in module_changes.values() for one in classes]
        update_load = Load(
            names={name: self._namespace[name] for name in rank_lack.names},
            modules=tuple(
                (record.key, record.manifest(), record.module)
                for record in module_records
                if record.module is not None
            ),
            updates=tuple(module_update for module_update, _ in module_changes.values()),
            classes=tuple(dict.fromkeys(changed_classes)),
        )
        object_reducer = Reducer(self._namespace, self._places(rank_lack))
        pickle_sender = pickling.Sender.create(self._snapshot.stand_ins())
        pickle_sender.reduce = object_reducer
        try:
            packed_object, file_descriptor = pickling.pack(update_load, pickle_sender)
        except Exception as pickling_error:  # pickling runs user code: it may raise anything
            self._find_culprit(rank_lack, pickling_error)
            raise
        self._fds.append(file_descriptor)
        self._nbytes += packed_object.nbytes
        for record in module_records:
            self._arenas |= record.arenas()
        self._arenas |= pickle_sender.arenas
        rank_states = [self._ranks[number] for number in rank_numbers]
        sent_keys = {key for state in rank_states for key in state.sent_states}
        gone_arenas = {
            key for state in rank_states for key, found in state.arenas.items() if found() is None
        }
        return _PackedPart(
            part=UpdatePart(
                ranks=rank_numbers,
                payload=packed_object,
                sources=pickle_sender.sources | object_reducer.sources,
                forget=tuple(sorted(sent_keys - rank_lack.known)),
                forget_arenas=tuple(sorted(gone_arenas)),
            ),
            tokens={name: self._found[name].token for name in rank_lack.names},
            states={key: self._snapshot.state(key) for key in (*rank_lack.whole, *module_changes)},
        )

    def _places(self, rank_lack: _RankLack) -> Callable[[Any], ModulePlace | None]:
        """Finds what lies in modules that the ranks have."""

        # At first use: most pickles hold no module, and the table visits all of them.
        @functools.cache
        def place_table() -> dict[int, ModulePlace]:
            # Only modules that these ranks have: a place in any other would name nothing there.
            return self._snapshot.table(self._modules.with_keys(sorted(rank_lack.known)))

        return lambda module_part: place_table().get(id(module_part))

    # ------------------------------------------------------------------- what cannot be sent

    def _refuse(self, name: str, error: Exception) -> None:
        """Raise for a needed name; note the reason for others."""
        if name not in self._names.needed:
            self._reasons[name] = f"{type(error).__name__}: {error}"
            return
        path = pickling.find_in(self._namespace[name], name, can_pickle=self._pickles)
        raise NotSendable(
            f"{path} cannot be sent to the workers: "
            f"{type(error).__name__}: {error}.\n"
            "Make it in a %%accelerate cell instead, or send what it is made from.",
            path=path,
        ) from error

    def _pickles(self, value: Any) -> bool:
        try:
            namespace_snapshot.fingerprint_of_pickle(value, Reducer(self._namespace))
        except Exception:  # whatever is raised, it does not pickle
            return False
        return True

    def _find_culprit(self, rank_lack: _RankLack, error: Exception) -> None:
        """Find the names that make the whole update unpicklable, and refuse or leave them out."""
        culprit_names = [
            variable_name
            for variable_name in rank_lack.names
            if not self._pickles(self._namespace[variable_name])
        ]
        for variable_name in culprit_names:
            self._refuse(variable_name, error)
        if culprit_names:
            raise _LeaveOut(culprit_names) from error
