"""Weights fetched before they are needed: which block runs next, and copies beside the computing.

`ExecutionOrder` keeps the order and a limit in bytes; reading files is the business of maps of
weights (`tell_weights`). Copies go from pinned memory on a stream beside; what cannot be
copied like that is left to the caller, who copies it when it is needed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nbaccel.base.log import get_logger
from nbaccel.bigmodel.tensor_placing import is_accelerator
from nbaccel.plan import registry
from nbaccel.plan.inspecting import free_host_bytes

PREFETCH_WINDOW_BYTES = 256 * 1024**2  # of weights that are asked for ahead of time

_FREE_PARTS = 8

_copy_log = get_logger(__name__)


def tell_weights(weights_map: Any, wish: str, names: Sequence[str]) -> None:
    """Tell a map of weights, if it reads ahead, to begin to: ``prefetch``, which returns at once.

    Or that weights are not used for now, so that others may have their memory: ``release``.
    """
    method = getattr(weights_map, wish, None)
    if names and method is not None:
        method(names)


OffloadedBlock = Any
"""An `AlignDevicesHook`: of a module whose weights are elsewhere while it does not run."""


class ExecutionOrder:
    """Which block runs next, learnt while they run; at first, in the order they came in.

    What follows a block is kept with the block before it, because one may run at several places of
    a pass; where that pair is new, what followed the block last is expected.
    """

    def __init__(self, window_bytes: int = PREFETCH_WINDOW_BYTES, prefetch: bool = True) -> None:
        self.window_bytes = self._pass_window_bytes = window_bytes
        self.prefetch = prefetch
        self._registered: list[OffloadedBlock] = []
        self._after: dict[tuple[OffloadedBlock | None, OffloadedBlock], OffloadedBlock] = {}
        self._previous: OffloadedBlock | None = None
        self._running: OffloadedBlock | None = None
        self._asked: set[OffloadedBlock] = set()
        self._copied: OffloadedBlock | None = None

    def register(self, block: OffloadedBlock) -> None:
        """Add a block; it is expected after those that are there."""
        if block not in self._registered:
            if self._registered:
                self._after.setdefault((None, self._registered[-1]), block)
            self._registered.append(block)

    def forget(self, block: OffloadedBlock) -> None:
        """Remove a block, which will not run as one any more."""
        following = self._after.get((None, block))
        for pair, after in list(self._after.items()):
            if block in pair or after is block:
                del self._after[pair]
            if after is block and pair[0] is None and following not in (None, pair[1]):
                self._after[pair] = following
        self._registered = [other for other in self._registered if other is not block]
        self._asked.discard(block)
        self._previous = None
        self._running = None if self._running is block else self._running
        self._copied = None if self._copied is block else self._copied

    def enter(self, block: OffloadedBlock) -> None:
        """A block begins: its weights are asked for if they were not, then those of the next."""
        self.register(block)
        # One that runs several times in a row, as shared layers do, is one step.
        if self._running is not None and self._running is not block:
            self._after[None, self._running] = self._after[self._previous, self._running] = block
            self._previous = self._running
        self._running = block
        if not self.prefetch:
            return
        if self._copied is not None and self._copied not in (block, self._following()):
            self._copied.drop_copies()
            self._copied = None
        if self._copied is block:
            self._copied = None
        if block is self._registered[0]:
            self._pass_window_bytes = min(self.window_bytes, free_host_bytes() // _FREE_PARTS)
        coming_blocks = list(self._in_window(block))
        wanted = set(coming_blocks)
        for mistaken in self._asked - wanted - {block}:
            tell_weights(mistaken.weights_map, "release", mistaken.offloaded_names)
        for near in (block, *coming_blocks):
            if near not in self._asked:
                tell_weights(near.weights_map, "prefetch", near.offloaded_names)
        self._asked = wanted

    def end_block(self) -> None:
        """A block's work has been queued: the weights of the next one are copied beside it."""
        following = self._following()
        if self.prefetch and following is not None and following is not self._copied:
            self._copied = following
            following.copy_ahead()

    def _following(self) -> OffloadedBlock | None:
        """What is expected to begin next; None at the end of a pass."""
        if self._running is None:
            return None
        following = self._expected(self._previous, self._running)
        # Whether there is another pass is not known, and a copy would take memory until then.
        return None if following is self._registered[0] else following

    def _expected(
        self, previous: OffloadedBlock | None, block: OffloadedBlock
    ) -> OffloadedBlock | None:
        return self._after.get((previous, block)) or self._after.get((None, block))

    def _in_window(self, block: OffloadedBlock) -> Iterator[OffloadedBlock]:
        seen = {block}
        steps: set[tuple[OffloadedBlock, OffloadedBlock]] = set()
        num_bytes = 0
        previous, coming = block, self._expected(self._previous, block)
        while coming is not None and (previous, coming) not in steps:
            if num_bytes >= self._pass_window_bytes:
                return
            if coming not in seen:
                yield coming
                num_bytes += coming.weight_bytes
            seen.add(coming)
            steps.add((previous, coming))
            previous, coming = coming, self._expected(previous, coming)

    def __reduce__(self) -> tuple[type[ExecutionOrder], tuple[int, bool]]:
        # A copy is empty: the blocks of a copied model register themselves when they run.
        return ExecutionOrder, (self.window_bytes, self.prefetch)


@dataclass(frozen=True)
class CopiesUnderWay:
    """Weights that a device is receiving."""

    tensors: Mapping[str, torch.Tensor]  # where they will be, by name
    device: torch.device  # the device
    end: torch.Event  # reached when all are there

    def finish(self) -> Mapping[str, torch.Tensor]:
        """Let what is computed from now on wait for the copies; the host does not wait."""
        stream = torch.accelerator.current_stream(self.device)
        stream.wait_event(self.end)
        for tensor in self.tensors.values():
            # Their memory belongs to the other stream: without this it could be given to the next
            # copies when the tensors are dropped, which is before the kernels have read them.
            tensor.record_stream(stream)
        return self.tensors


def start_copies(
    weights: Mapping[str, torch.Tensor], device: torch.device
) -> CopiesUnderWay | None:
    """Begin to copy weights to a device, beside what it computes."""
    host_weights = {n: it.detach() for n, it in weights.items() if it.device.type == "cpu"}
    runtime = registry.device_runtime(device.type) if is_accelerator(device) else None
    copies_beside = runtime and runtime.pins_host_memory and runtime.copies_without_blocking
    if not (host_weights and copies_beside):
        return None
    index: int | None = device.index
    if index is None:
        device = torch.device(device.type, torch.accelerator.current_device_index())
    try:
        return _copy_on(_side_stream(device), host_weights)
    # No room, in pinned memory or on the device: when the weight is needed there may be.
    except RuntimeError as error:
        _copy_log.debug("Weights are not copied to %s ahead of time: %s", device, error)
        return None


def _copy_on(stream: torch.Stream, host_weights: Mapping[str, torch.Tensor]) -> CopiesUnderWay:
    device = stream.device
    # Outside of the stream, because this is the host's work. Pinned memory that is dropped early
    # is not used again by torch before the copies that read it are through.
    pinned = {n: it if it.is_pinned() else it.pin_memory() for n, it in host_weights.items()}
    index = torch.accelerator.current_device_index()
    previous_stream = torch.accelerator.current_stream(device)
    torch.accelerator.set_stream(stream)
    try:
        tensors = {name: weight.to(device, non_blocking=True) for name, weight in pinned.items()}
        end = torch.Event(device=device)
        end.record(stream)
    finally:
        torch.accelerator.set_stream(previous_stream)
        # Setting a stream makes its device the current one.
        torch.accelerator.set_device_index(index)
    return CopiesUnderWay(tensors, device, end)


# The stream of a device that copies run on.
_side_stream = functools.lru_cache(maxsize=64)(torch.Stream)
