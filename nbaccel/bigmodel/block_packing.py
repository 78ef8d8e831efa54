"""Blocks of a model packed onto devices, in the model's order and within budgets.

Plain numbers and names: nothing here knows torch or modules, only that some tiers are slower.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a model that goes to one device, or is split into the blocks inside of it."""

    name: str  # dotted, unique
    size: float  # bytes of all in it; what is tied counts at its first name only
    # The block that it is a part of; None at the top. One that must stay whole has no parts.
    inside: str | None = None
    is_layer: bool = False  # whether it is brought onto a device whole when it is used


@dataclass(frozen=True, slots=True)
class Tier:
    """A device that blocks can lie on."""

    device: int | str  # its name or number
    budget: int | None  # bytes that it may hold; None where there is no limit
    level: int = 0  # 0 where blocks are computed, higher where they are kept and brought back from
    # Whether room is kept for the largest layer that lies on a slower tier.
    keeps_room: bool = False


@dataclass(frozen=True, slots=True)
class Refusal:
    """The block for which a tier had no room, so that the next tier was taken."""

    block: str
    size: float  # bytes of it and of what must share its device
    room_kept: float  # bytes that were kept free for a layer of a slower tier


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """Where the blocks went."""

    tiers: tuple[Tier, ...]  # in the order in which they were filled
    devices: dict[str, int | str]  # the device of each block by name, in the order of placing
    held: dict[int | str, float]  # bytes on each device
    refusals: dict[int | str, Refusal]  # by device, for those that were left
    is_complete: bool  # whether all blocks have a place
    largest_kept_away: float  # bytes of the largest layer on a tier that is not computed on

    @property
    def lacking_room(self) -> float:
        """Bytes over its budget that the first device in use holds with the largest layer there."""
        devices = set(self.devices.values())
        used = next((tier for tier in self.tiers if tier.device in devices), None)
        if used is None or used.level > self.tiers[0].level or used.budget is None:
            return 0
        return max(0, self.held[used.device] + self.largest_kept_away - used.budget)

    def bytes_below(self, level: int) -> float:
        """Bytes on tiers that are slower than a level."""
        return sum(self.held[tier.device] for tier in self.tiers if tier.level > level)

    def is_better(self, other: Packing) -> bool:
        """Whether it holds less on some slow tiers, and nowhere more on slower ones."""
        if self.is_complete != other.is_complete:
            return self.is_complete
        levels = sorted({tier.level for tier in self.tiers})
        own_bytes = [self.bytes_below(level) for level in levels]
        other_bytes = [other.bytes_below(level) for level in levels]
        pairs = zip(own_bytes, other_bytes, strict=True)
        return own_bytes != other_bytes and all(own <= others for own, others in pairs)


class BlockForest:
    """Blocks by number: those inside of a block follow it, so that it is a range of numbers."""

    def __init__(self, blocks: Sequence[Block], tied_groups: Iterable[Iterable[str]] = ()) -> None:
        self.blocks = tuple(blocks)
        self._numbers = {block.name: number for number, block in enumerate(self.blocks)}
        # The block that each is a part of; -1 at the top.
        self.parents = [self._numbers.get(block.inside, -1) for block in self.blocks]  # type: ignore[arg-type]
        # The blocks at the top.
        self.roots = [number for number, parent in enumerate(self.parents) if parent < 0]
        self.children: list[list[int]] = [[] for _ in self.blocks]  # the parts of each
        # For each the number behind the last block inside of it.
        self.ends = [number + 1 for number in range(len(self.blocks))]
        for number, parent in enumerate(self.parents):
            if parent >= 0:
                self.children[parent].append(number)
        for number, parent in reversed([*enumerate(self.parents)]):
            if parent >= 0:
                self.ends[parent] = max(self.ends[parent], self.ends[number])
        self._holders: list[tuple[int, ...]] = []
        # By block, numbers of the groups of which it holds some, and not all.
        self.ties: dict[int, list[int]] = {}
        for tied_names in tied_groups:
            self._add_ties(tied_names)
        # The blocks that are layers, the largest first.
        layers = [number for number, block in enumerate(self.blocks) if block.is_layer]
        self.layers = sorted(layers, key=lambda number: (-self.blocks[number].size, number))

    def size_of(self, numbers: Iterable[int]) -> float:
        """Bytes of several blocks."""
        return sum(self.blocks[number].size for number in numbers)

    def around(self, number: int) -> Iterable[int]:
        """A block and all that it is part of, from the inside out."""
        while number >= 0:
            yield number
            number = self.parents[number]

    def together(self, number: int, waiting: Container[int]) -> list[int]:
        """A block and all that must share its device, because tensors of them are tied."""
        found = {number: None}
        members = [number]
        for member in members:
            for group_number in self.ties.get(member, ()):
                for holder in self._holders[group_number]:
                    block = next((outer for outer in self.around(holder) if outer in waiting), None)
                    if block is not None and block not in found:
                        found[block] = None
                        members.append(block)
        return members

    def _add_ties(self, tied_names: Iterable[str]) -> None:
        found_holders = (self._innermost(tied_name) for tied_name in tied_names)
        holders = tuple(dict.fromkeys(number for number in found_holders if number >= 0))
        counts: dict[int, int] = {}
        for holder in holders:
            for number in self.around(holder):
                counts[number] = counts.get(number, 0) + 1
        for number, count in counts.items():
            if count < len(holders):
                self.ties.setdefault(number, []).append(len(self._holders))
        self._holders.append(holders)

    def _innermost(self, name: str) -> int:
        while name and name not in self._numbers:
            name = name.rpartition(".")[0]
        return self._numbers.get(name, -1)


def find_block(
    forest: BlockForest,
    waiting: Iterable[int],
    fits: Callable[[list[int], float], bool],
    skipped: int = -1,
) -> list[int]:
    """The first block, in the model's order and from the outside in, that fits somewhere."""
    known = set(waiting)
    stack = sorted(known - {skipped}, reverse=True)
    while stack:
        number = stack.pop()
        members = forest.together(number, known)
        if fits(members, forest.size_of(members)):
            return members
        if forest.children[number]:
            known.remove(number)
            known.update(forest.children[number])
            stack += reversed(forest.children[number])
    return []


def pack_blocks(
    forest: BlockForest, tiers: Sequence[Tier], *, may_skip_ahead: bool = False
) -> Packing:
    """Pack all blocks, tier by tier, and leave as little as possible to the slow ones.

    The first packing keeps room for the largest layer that has no place yet, as Accelerate's does;
    it stands unless another is better (`Packing.is_better`). A model that is computed on several
    devices needs no such room where nothing is kept away from them, and otherwise only as much as
    what is kept away; and what comes along with a block, being tied to it, needs none. Where no
    packing with room for what is brought back leaves as little to the slowest tier as the first
    one, the first one stands without that room: `lacking_room` says how much that is.
    """
    first_packing = _BlockPacker(forest, tiers, may_skip_ahead).pack()
    if first_packing.is_complete and not first_packing.bytes_below(tiers[0].level):
        return first_packing
    others: list[dict[str, Any]] = [{"counts_members": True}] if forest.ties else []
    computing = [tier for tier in tiers if tier.level == tiers[0].level]
    if len(computing) > 1:
        others += [{"room_kept": room} for room in (0.0, first_packing.largest_kept_away)]
    packers = [_BlockPacker(forest, tiers, may_skip_ahead, **rules) for rules in others]
    packings = [first_packing, *(packer.pack() for packer in packers)]
    if len(computing) > 1 and first_packing.lacking_room:
        # Layers come back to the first device in use. Accelerate keeps room on the one left empty.
        next_tier = replace(computing[1], keeps_room=True)
        later_tiers = [next_tier, *(tier for tier in tiers if tier not in computing[:2])]
        packings.append(pack_blocks(forest, later_tiers, may_skip_ahead=may_skip_ahead))
    with_room = [packing for packing in packings if not packing.lacking_room]
    best = with_room[0] if with_room else first_packing
    for packing in with_room[1:]:
        best = packing if packing.is_better(best) else best
    slowest = tiers[-1].device
    leaves_more = best.held[slowest] > first_packing.held[slowest]
    return first_packing if leaves_more and first_packing.is_complete else best


@dataclass(eq=False)
class _BlockPacker:
    """One way through the blocks."""

    _forest: BlockForest
    _tiers: Sequence[Tier]
    may_skip_ahead: bool  # as in `pack_blocks`
    # Whether what comes along with a block needs no room when room is kept.
    counts_members: bool = False
    # Bytes kept free on the first tier; None: as many as the largest layer without a place.
    room_kept: float | None = None

    def __post_init__(self) -> None:
        forest = self._forest
        self._waiting = set(forest.roots)
        # In ascending order, it is a heap.
        self._queue = list(forest.roots)
        self._levels: list[int | None] = [None] * len(forest.blocks)
        self._num_passed = 0
        self._current = 0
        self._devices: dict[str, int | str] = {}
        self._held: dict[int | str, float] = {tier.device: 0 for tier in self._tiers}
        self._refusals: dict[int | str, Refusal] = {}

    def pack(self) -> Packing:
        """Place all blocks that can be placed."""
        while self._queue and self._current < len(self._tiers):
            number = heapq.heappop(self._queue)
            # What came with another block is still in the queue.
            if number not in self._waiting:
                continue
            members = self._forest.together(number, self._waiting)
            size = self._forest.size_of(members)
            if self._fits(members, size):
                self._place(members, size)
                continue
            # From here on the block itself is looked at again.
            heapq.heappush(self._queue, number)
            divisible = self._divisible(number, members)
            if divisible is not None:
                self._split(divisible)
            elif not (self.may_skip_ahead and self._place_later_block(number)):
                name = self._forest.blocks[number].name
                refusal = Refusal(name, size, self._room_beside(members))
                self._refusals[self._tiers[self._current].device] = refusal
                self._current += 1
        first_level = self._tiers[0].level
        away = (layer for layer in self._forest.layers if self._levels[layer] != first_level)
        return Packing(
            tiers=tuple(self._tiers),
            devices=self._devices,
            held=self._held,
            refusals=self._refusals,
            is_complete=not self._waiting,
            largest_kept_away=self._forest.size_of(islice(away, 1)),
        )

    def _divisible(self, number: int, members: Sequence[int]) -> int | None:
        """What is to be split: a block tied to one that would fit alone, or the block itself."""
        children = self._forest.children
        if len(members) > 1 and self._fits([number], self._forest.blocks[number].size):
            for member in members[1:]:
                if children[member]:
                    return member
        # Accelerate leaves the tier where a block would fit without what is tied to it, and that
        # cannot be split. Here parts of the block that are not tied still get their chance.
        return number if children[number] else None

    def _fits(self, members: Sequence[int], size: float) -> bool:
        tier = self._tiers[self._current]
        if tier.budget is None:
            return True
        room = tier.budget - self._held[tier.device] - size
        return room >= 0 and room >= self._room_beside(members)

    def _room_beside(self, members: Sequence[int]) -> float:
        if not self._tiers[self._current].keeps_room:
            return 0
        if self.room_kept is not None and self._current == 0:
            return self.room_kept
        known_members = members if self.counts_members else members[:1]
        return self._largest_waiting(sorted(known_members))

    def _largest_waiting(self, members: list[int]) -> float:
        """Bytes of the largest layer without a place that is in none of these blocks."""
        layers = self._forest.layers
        while self._num_passed < len(layers) and self._levels[layers[self._num_passed]] is not None:
            self._num_passed += 1
        for layer in islice(layers, self._num_passed, None):
            before = bisect_right(members, layer) - 1
            is_inside = before >= 0 and layer < self._forest.ends[members[before]]
            if self._levels[layer] is None and not is_inside:
                return self._forest.blocks[layer].size
        return 0

    def _place(self, members: Sequence[int], size: float) -> None:
        tier = self._tiers[self._current]
        self._held[tier.device] += size
        for member in members:
            self._devices[self._forest.blocks[member].name] = tier.device
            self._waiting.remove(member)
            inner = slice(member, self._forest.ends[member])
            self._levels[inner] = [tier.level] * (inner.stop - inner.start)

    def _split(self, number: int) -> None:
        self._waiting.remove(number)
        self._waiting.update(self._forest.children[number])
        for child in self._forest.children[number]:
            heapq.heappush(self._queue, child)

    def _place_later_block(self, number: int) -> bool:
        if self._held[self._tiers[self._current].device] or self._current == len(self._tiers) - 1:
            return False
        forest = self._forest
        members = self._find_later(
            number,
            lambda found: bool(forest.children[found[0]] or forest.blocks[found[0]].is_layer),
        )
        # A buffer alone is taken only where no layer could be, and nothing is split for it.
        members = members or self._find_later(number, lambda found: found[0] in self._waiting)
        size = forest.size_of(members)
        for member in members:
            # Split what is around a block until the block itself is waiting.
            while member not in self._waiting:
                self._split(next(n for n in forest.around(member) if n in self._waiting))
        if members:
            self._place(members, size)
        return bool(members)

    def _find_later(self, number: int, is_wanted: Callable[[list[int]], bool]) -> list[int]:
        # It leaves room for the block whose turn it was, on any tier, as Accelerate's does.
        members = self._forest.together(number, self._waiting)
        beside = max(self._largest_waiting([number]), self._forest.size_of(members))
        limit = (self._tiers[self._current].budget or 0) - beside
        return find_block(
            self._forest,
            self._waiting,
            lambda found, size: size <= limit and self._fits(found, size) and is_wanted(found),
            skipped=number,
        )
