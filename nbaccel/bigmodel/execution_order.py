"""Which block of a model runs after which, so that weights are fetched before they are needed.

It keeps the order and a limit in bytes; reading files and copying tensors are the blocks' own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from nbaccel.plan.inspecting import free_host_bytes

PREFETCH_WINDOW_BYTES = 256 * 1024**2
"""How many bytes of weights are asked for ahead of time."""

_FREE_PARTS = 8

# A pass that does not come back to where it began ends after so many times its blocks.
_LONGEST_PASS = 4


class OffloadedBlock(Protocol):
    """A module whose weights are elsewhere while it does not run.

    Attributes:
        weight_bytes: How large they are.
    """

    weight_bytes: int

    def ask_for_weights(self) -> None:
        """Let whoever has the weights bring them near."""

    def give_weights_back(self) -> None:
        """Say that weights that were asked for are not needed now."""

    def copy_ahead(self) -> None:
        """Begin to copy the weights to where the block computes, if that can be done beside."""

    def drop_copies(self) -> None:
        """Forget copies that were begun."""


class ExecutionOrder:
    """The order in which the blocks of a model run, learnt from its last pass.

    Before the first pass has ended, it is the order in which the blocks were registered. A pass
    ends where its first block begins again.
    """

    def __init__(self, window_bytes: int = PREFETCH_WINDOW_BYTES, prefetch: bool = True) -> None:
        self.window_bytes = window_bytes
        self._pass_window_bytes = window_bytes
        self.prefetch = prefetch
        self._registered: dict[OffloadedBlock, None] = {}
        self._last_pass: list[OffloadedBlock] = []
        self._this_pass: list[OffloadedBlock] = []
        self._order: Sequence[OffloadedBlock] = ()
        self._position = 0
        self._asked: set[OffloadedBlock] = set()
        self._copied: OffloadedBlock | None = None

    def register(self, block: OffloadedBlock) -> None:
        """Add a block; it comes after those that are there."""
        self._registered.setdefault(block)

    def forget(self, block: OffloadedBlock) -> None:
        """Remove a block, which will not run as one any more."""
        self._registered.pop(block, None)
        self._last_pass = [other for other in self._last_pass if other is not block]
        self._this_pass = [other for other in self._this_pass if other is not block]
        self._order = ()
        self._asked.discard(block)
        if self._copied is block:
            self._copied = None

    def enter(self, block: OffloadedBlock) -> None:
        """A block begins: its weights are asked for if they were not, then those of the next."""
        self.register(block)
        self._record(block)
        if not self.prefetch:
            return
        if self._copied is block:
            self._copied = None
        elif self._copied is not None and self._copied is not self._following():
            self._copied.drop_copies()
            self._copied = None
        coming_blocks = list(self._in_window())
        wanted = set(coming_blocks)
        for mistaken in self._asked - wanted - {block}:
            mistaken.give_weights_back()
        for near in (block, *coming_blocks):
            if near not in self._asked:
                near.ask_for_weights()
        self._asked = wanted

    def end_block(self) -> None:
        """A block's work has been queued: the weights of the next one are copied beside it."""
        following = self._following()
        if self.prefetch and following is not None and following is not self._copied:
            self._copied = following
            following.copy_ahead()

    def _following(self) -> OffloadedBlock | None:
        """What is expected to begin next.

        None at the end of a pass: whether there is another one is not known, and a copy would take
        the device's memory until then.
        """
        after = self._order[self._position + 1 : self._position + 2]
        return after[0] if after else None

    def _record(self, block: OffloadedBlock) -> None:
        current = self._this_pass
        is_back = bool(current) and current[0] is block and current[-1] is not block
        if is_back or len(current) > _LONGEST_PASS * len(self._registered):
            self._last_pass = current
            self._this_pass = []
            self._position = 0
            self._pass_window_bytes = min(self.window_bytes, free_host_bytes() // _FREE_PARTS)
        # One that runs several times in a row, as shared layers do, is one step.
        if not self._this_pass or self._this_pass[-1] is not block:
            self._this_pass.append(block)
        is_known = block in self._last_pass
        self._order = self._last_pass if is_known else list(self._registered)
        self._position = _next_index(self._order, block, self._position)

    def _in_window(self) -> Iterator[OffloadedBlock]:
        """The blocks that are expected next, until the window is full."""
        blocks = list(self._order[self._position + 1 :])
        if self._order is self._last_pass:
            # There was more than one pass, so another one is likely.
            blocks += self._order[: self._position]
        num_bytes = 0
        for coming in dict.fromkeys(blocks):
            if coming is self._order[self._position] or num_bytes >= self._pass_window_bytes:
                return
            num_bytes += coming.weight_bytes
            yield coming

    def __deepcopy__(self, memo: dict[int, Any]) -> ExecutionOrder:
        """An empty one: the blocks of a copied model register themselves when they run."""
        copied = ExecutionOrder(self.window_bytes, self.prefetch)
        memo[id(self)] = copied
        return copied

    def __reduce__(self) -> tuple[type[ExecutionOrder], tuple[int, bool]]:
        return ExecutionOrder, (self.window_bytes, self.prefetch)


def _next_index(order: Sequence[OffloadedBlock], block: OffloadedBlock, start: int) -> int:
    """Where a block is, from a position on, else from the beginning."""
    for index in range(start, len(order)):
        if order[index] is block:
            return index
    return order.index(block)
