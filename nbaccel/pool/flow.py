"""What flows from the notebook's namespace to the workers: what a cell needs and they lack.

    names of a cell ─► fingerprints ─► what each rank lacks ─► one part per group of equal ranks
                        (Moment)          (_Lack)                 (Part, in a Shipment)

For every rank the flow remembers the fingerprint that each name had in the notebook when the rank
got it, or bound it itself. A name is sent when the notebook's value has another one by now.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections import defaultdict, deque
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nbaccel.errors import ModelNotShareable, NotSendable
from nbaccel.launch.sharing import arena, blame, memory, parcel
from nbaccel.pool import digests
from nbaccel.pool.cargo import Cargo, Load, Part, Update
from nbaccel.pool.digests import Fingerprint
from nbaccel.pool.modules import Modules, Record, State, difference
from nbaccel.pool.moment import Moment
from nbaccel.pool.names import Names, is_users
from nbaccel.pool.travel import Place, Reducer

__all__ = ["Flow", "Shipment"]

_ROUNDS = 4  # a module found in one round changes what another value refers to in the next


@dataclass
class _Rank:
    """What one rank has, as far as the notebook knows."""

    seen: dict[str, Hashable] = field(default_factory=dict)
    """Token of the notebook's value when the name was sent, or bound there."""
    told: dict[str, State] = field(default_factory=dict)
    """Modules that it has, by key, as they were when it last heard of them."""
    arenas: dict[str, weakref.ref[arena.Arena]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Lack:
    """What a rank lacks. Equal for ranks that can be given the same."""

    names: tuple[str, ...]
    whole: tuple[str, ...]
    known: frozenset[str]
    """Keys of the living modules that it has."""
    states: tuple[tuple[str, State], ...]
    """What it was told of those that the cell can reach."""

    def is_nothing(self, changes: Mapping[str, Any]) -> bool:
        return not (self.names or self.whole or changes)


@dataclass(frozen=True)
class _Settled:
    """What a rank has once it has taken its part."""

    tokens: Mapping[str, Hashable]
    states: Mapping[str, State]
    forgotten: tuple[str, ...]
    forgotten_arenas: tuple[str, ...]


@dataclass
class Shipment:
    """Cargo with its descriptors, ready to be sent. Close it when it has been."""

    message: Cargo
    fds: list[int]
    wanted: dict[int, tuple[str, ...]]
    """Per rank, the names to bind there."""
    nbytes: int
    """Bytes that were copied for it: the parcels, and arenas made for modules."""
    settled: dict[int, _Settled]
    arenas: dict[str, arena.Arena]

    def close(self) -> None:
        """Give up the descriptors."""
        fds, self.fds = self.fds, []
        memory.close_all(fds)


class _LeaveOut(Exception):
    """These names cannot be sent, and are not needed for sure: go on without them."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        self.names = frozenset(names)


class Flow:
    """The notebook's side of the flow of names.

    Args:
        namespace: The notebook's own dict: functions of cells are known by having it as globals.
        ranks: The ranks of the pool.
    """

    def __init__(self, namespace: Mapping[str, Any], ranks: Sequence[int]) -> None:
        self._namespace = namespace
        self._ranks = {rank: _Rank() for rank in ranks}
        self._modules = Modules()
        self.reasons: dict[str, str] = {}
        """Names that could not be sent, with why."""

    def prepare(
        self, names: Names, ranks: Sequence[int], *, force: bool = False
    ) -> Shipment | None:
        """Pack what these ranks lack of these names, and of what those refer to.

        Args:
            names: What a cell reads.
            ranks: Who will run it.
            force: Send the needed names even if they did not change since.

        Returns:
            What is to be sent, or None if they have it all.

        Raises:
            NotSendable: If a needed name holds something that cannot be pickled.
            ModelNotShareable: If a needed name holds a module without memory to share.
        """
        left_out: frozenset[str] = frozenset()
        while True:
            packing = _Packing(self, names, left_out, force=force)
            try:
                return packing.pack(ranks)
            except _LeaveOut as without:
                packing.close()
                left_out |= without.names
            except BaseException:  # an interrupt too must not cost descriptors
                packing.close()
                raise

    def taken(self, shipment: Shipment) -> None:
        """The ranks have it."""
        for number, settled in shipment.settled.items():
            rank = self._ranks[number]
            rank.seen.update(settled.tokens)
            rank.told.update(settled.states)
            for key in settled.forgotten:
                rank.told.pop(key, None)
            for key in settled.forgotten_arenas:
                rank.arenas.pop(key, None)
            for key, found in shipment.arenas.items():
                rank.arenas.setdefault(key, weakref.ref(found))

    def bound(self, rank: int, names: Iterable[str]) -> None:
        """That rank's cell bound or deleted these names itself: they are its own now.

        What the notebook has under such a name is sent only when it changes after this.
        """
        seen, moment = self._ranks[rank].seen, Moment(self._namespace, self._modules)
        for name in names:
            seen.pop(name, None)
            if name in self._namespace:
                seen[name] = self._token(moment, name)

    def _token(self, moment: Moment, name: str) -> Hashable:
        value = self._namespace[name]
        try:
            return moment.fingerprint(name, value).token
        except Exception:  # pickling runs user code; then the object itself is all there is to know
            return ("unsendable", id(value))

    def records(self, keys: Collection[str]) -> list[Record]:
        """The modules with these keys that still live in the notebook."""
        found = (self._modules.by_key(key) for key in sorted(keys))
        return [r for r in found if r is not None and r.is_shared and r.module is not None]

    @contextlib.contextmanager
    def coming_home(self, records: Iterable[Record]) -> Iterator[None]:
        """Weights of these modules come from the ranks within this block.

        What changes in their tensors is no news to the ranks: they are not asked to take it over.
        """
        arenas = {key for record in records for key in record.arenas()}
        concerned = [r for r in self._modules.all() if arenas & r.arenas().keys()]
        before = {record.key: record.versions() for record in concerned}
        yield
        for record in concerned:
            grown = record.versions() - before[record.key]
            for rank in self._ranks.values():
                state = rank.told.get(record.key)
                if state is not None and grown:
                    rank.told[record.key] = replace(state, versions=state.versions + grown)


class _Packing:
    """One attempt to pack what a cell needs."""

    def __init__(self, flow: Flow, names: Names, left_out: frozenset[str], *, force: bool) -> None:
        self._flow = flow
        self._namespace = flow._namespace
        self._modules = flow._modules
        self._names = names
        self._left_out = left_out
        self._forced = names.needed if force else frozenset()
        self._moment = Moment(self._namespace, self._modules)
        self._found: dict[str, Fingerprint] = {}
        self._fds: list[int] = []
        self._nbytes = 0

    def close(self) -> None:
        memory.close_all(self._fds)
        self._fds.clear()

    def pack(self, ranks: Sequence[int]) -> Shipment | None:
        for _ in range(_ROUNDS):
            before = self._moment.news
            self._found = self._look()
            if self._moment.news == before:
                break
        groups: dict[_Lack, list[int]] = defaultdict(list)
        for rank in ranks:
            groups[self._lack(self._flow._ranks[rank])].append(rank)
        parts: list[Part] = []
        arenas: dict[str, arena.Arena] = {}
        settled: dict[int, _Settled] = {}
        wanted: dict[int, tuple[str, ...]] = {}
        for lack, members in groups.items():
            changes = self._changes(lack)
            if lack.is_nothing(changes):
                continue
            self._share(lack)
            part, result = self._part(lack, changes, tuple(members), arenas)
            parts.append(part)
            settled |= dict.fromkeys(members, result)
            wanted |= dict.fromkeys(members, lack.names)
        return self._shipment(parts, arenas, settled, wanted) if parts else None

    def _shipment(
        self,
        parts: list[Part],
        arenas: dict[str, arena.Arena],
        settled: dict[int, _Settled],
        wanted: dict[int, tuple[str, ...]],
    ) -> Shipment:
        new = {
            key: found
            for key, found in arenas.items()
            if any(key not in self._flow._ranks[rank].arenas for rank in wanted)
        }
        for found in reversed(new.values()):
            self._fds.insert(0, os.dup(found.fd))
        for name in {name for names in wanted.values() for name in names}:
            self._flow.reasons.pop(name, None)
        return Shipment(
            message=Cargo(
                arenas=tuple((key, found.nbytes) for key, found in new.items()),
                parts=tuple(parts),
            ),
            fds=self._fds,
            wanted=wanted,
            nbytes=self._nbytes,
            settled=settled,
            arenas=new,
        )

    # ------------------------------------------------------------------- what there is

    def _look(self) -> dict[str, Fingerprint]:
        """The fingerprints of all names that are to be there, also of those that others read."""
        found: dict[str, Fingerprint] = {}
        queue = deque(sorted(self._names.needed) + sorted(self._names.possible))
        while queue:
            name = queue.popleft()
            if name in found or name in self._left_out or not is_users(name):
                continue
            if name not in self._namespace:
                continue
            try:
                found[name] = self._moment.fingerprint(name, self._namespace[name])
            except Exception as error:  # pickling runs user code: anything may come out of it
                self._refuse(name, error)
                continue
            queue.extend(sorted(found[name].names))
            for key in self._reach(found[name].modules):
                queue.extend(sorted(self._moment.state(key).names))
        return found

    def _reach(self, keys: Iterable[str]) -> list[str]:
        """These modules, and those that their attributes refer to."""
        reached: dict[str, None] = {}
        queue = deque(sorted(keys))
        while queue:
            key = queue.popleft()
            if key not in reached:
                reached[key] = None
                queue.extend(sorted(self._moment.state(key).modules))
        return list(reached)

    def _lack(self, rank: _Rank) -> _Lack:
        names = tuple(
            name
            for name, fingerprint in self._found.items()
            if name in self._forced or rank.seen.get(name) != fingerprint.token
        )
        known = frozenset(key for key in rank.told if self._modules.by_key(key) is not None)
        reach = self._reach({key for f in self._found.values() for key in f.modules})
        states = tuple((key, rank.told[key]) for key in reach if key in known)
        start = {key for name in names for key in self._found[name].modules}
        start |= {key for key, _ in states}
        whole = tuple(key for key in self._reach(start) if key not in known)
        return _Lack(names, whole, known, states)

    def _changes(self, lack: _Lack) -> dict[str, tuple[Update, tuple[type, ...]]]:
        pushed = {
            key for name in self._forced & self._found.keys() for key in self._found[name].modules
        }
        changes = {}
        for key, old in lack.states:
            found = difference(
                key, old, self._moment.state(key), self._moment.survey(key), adopt=key in pushed
            )
            record = self._modules.by_key(key)
            if found is None or record is None:
                continue
            changes[key] = found
            if found[0].adopt:
                arena.restock(record.sharing)
        return changes

    # ------------------------------------------------------------------- packing

    def _share(self, lack: _Lack) -> None:
        """Move the modules that come whole to arenas; leaves out names whose module cannot."""
        for name in lack.names:
            for key in self._reach(self._found[name].modules):
                record = self._modules.by_key(key)
                if key not in lack.whole or record is None:
                    continue
                try:
                    self._nbytes += record.share()
                except ModelNotShareable as error:
                    if name in self._names.needed:
                        raise
                    self._flow.reasons[name] = str(error)
                    raise _LeaveOut([name]) from error
        for key in lack.whole:  # those that a changed attribute of a known module refers to
            record = self._modules.by_key(key)
            self._nbytes += record.share() if record is not None else 0

    def _part(
        self,
        lack: _Lack,
        changes: Mapping[str, tuple[Update, tuple[type, ...]]],
        ranks: tuple[int, ...],
        arenas: dict[str, arena.Arena],
    ) -> tuple[Part, _Settled]:
        records = [r for r in (self._modules.by_key(key) for key in lack.whole) if r is not None]
        load = Load(
            names={name: self._namespace[name] for name in lack.names},
            modules=tuple((r.key, r.manifest(), r.module) for r in records if r.module is not None),
            updates=tuple(update for update, _ in changes.values()),
            classes=tuple(dict.fromkeys(c for _, classes in changes.values() for c in classes)),
        )
        reducer = Reducer(self._namespace, self._places(lack))
        sender = parcel.Sender.create(self._moment.stand_ins())
        sender.reduce = reducer
        try:
            packed, fd = parcel.pack(load, sender)
        except Exception as error:  # pickling runs user code: anything may come out of it
            self._find_culprit(lack, error)
            raise
        self._fds.append(fd)
        self._nbytes += packed.nbytes
        for record in records:
            arenas |= record.arenas()
        arenas |= sender.arenas
        members = [self._flow._ranks[rank] for rank in ranks]
        gone = {key for rank in members for key in rank.told.keys() - lack.known}
        dead = {key for rank in members for key, ref in rank.arenas.items() if ref() is None}
        result = _Settled(
            tokens={name: self._found[name].token for name in lack.names},
            states={key: self._moment.state(key) for key in [*lack.whole, *changes]},
            forgotten=tuple(sorted(gone)),
            forgotten_arenas=tuple(sorted(dead)),
        )
        part = Part(
            ranks=ranks,
            parcel=packed,
            sources=sender.sources | reducer.sources,
            forget=result.forgotten,
            forget_arenas=result.forgotten_arenas,
        )
        return part, result

    def _places(self, lack: _Lack) -> Any:
        """Finds what lies in modules that the ranks have."""
        table: dict[int, Place] | None = None

        def place(obj: Any) -> Place | None:
            nonlocal table
            if table is None:
                known = (self._modules.by_key(key) for key in sorted(lack.known))
                table = self._moment.table(record for record in known if record is not None)
            return table.get(id(obj))

        return place

    # ------------------------------------------------------------------- what cannot be sent

    def _refuse(self, name: str, error: Exception) -> None:
        """Raise for a needed name; note the reason for others."""
        if name not in self._names.needed:
            self._flow.reasons[name] = f"{type(error).__name__}: {error}"
            return
        culprit = blame.find_in(self._namespace[name], name, pickles=self._pickles)
        raise NotSendable(
            f"{culprit} cannot be sent to the workers: {type(error).__name__}: {error}.\n"
            "Make it in a %%accelerate cell instead, or send what it is made from.",
            path=culprit,
        ) from error

    def _pickles(self, value: Any) -> bool:
        try:
            digests.of_pickle(value, Reducer(self._namespace))
        except Exception:  # whatever it is, it does not pickle: that is the answer
            return False
        return True

    def _find_culprit(self, lack: _Lack, error: Exception) -> None:
        """A module's attribute does not pickle: find whose it is."""
        found = [name for name in lack.names if not self._pickles(self._namespace[name])]
        for name in found:
            self._refuse(name, error)
        if found:
            raise _LeaveOut(found) from error
