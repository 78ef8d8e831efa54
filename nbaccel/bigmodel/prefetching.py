"""Weights fetched before they are needed: which block runs next, and copies beside the computing.

`ExecutionOrder` keeps the order and a limit in bytes; reading files is the business of maps of
weights (`PrefetchingWeights`). Copies go from pinned memory on a stream beside; what cannot be
copied like that is left to the caller, who copies it when it is needed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from nbaccel.base.log import get_logger
from nbaccel.bigmodel.tensor_placing import is_accelerator
from nbaccel.plan import registry
from nbaccel.plan.inspecting import free_host_bytes

PREFETCH_WINDOW_BYTES = 256 * 1024**2
"""How many bytes of weights are asked for ahead of time."""

_FREE_PARTS = 8

# A pass that does not come back to where it began ends after so many times its blocks.
_LONGEST_PASS = 4

_copy_log = get_logger(__name__)


class PrefetchingWeights(Protocol):
    """A map of weights that reads ahead; a plain dictionary, which does not, is one, too."""

    def prefetch(self, names: Sequence[str]) -> None:
        """Begin to bring weights near; return at once."""

    def release(self, names: Sequence[str]) -> None:
        """Take note that weights are not used for now: their memory may be used for others."""


def prefetch_weights(weights_map: Any, names: Sequence[str]) -> None:
    """Pass a wish on to a map of weights that reads ahead; others do nothing."""
    # Not by isinstance, which takes long for a protocol, and this runs for every module.
    prefetch = getattr(weights_map, "prefetch", None)
    if names and prefetch is not None:
        prefetch(names)


def release_weights(weights_map: Any, names: Sequence[str]) -> None:
    """The same of :meth:`PrefetchingWeights.release`."""
    release = getattr(weights_map, "release", None)
    if names and release is not None:
        release(names)


# ------------------------------------------------------------------------------ which is next


class OffloadedBlock(Protocol):
    """A module whose weights are elsewhere while it does not run."""

    weight_bytes: int  # how large they are
    weights_map: Mapping[str, Any] | None  # where they are
    offloaded_names: Sequence[str]  # their names there

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
            release_weights(mistaken.weights_map, mistaken.offloaded_names)
        for near in (block, *coming_blocks):
            if near not in self._asked:
                prefetch_weights(near.weights_map, near.offloaded_names)
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


# ------------------------------------------------------------------------------ copies


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
    host_weights = {
        name: weight.detach() for name, weight in weights.items() if weight.device.type == "cpu"
    }
    stream = _side_stream(_with_index(device)) if _can_copy_beside(device) else None
    if stream is None or not host_weights:
        return None
    try:
        return _copy_on(stream, host_weights)
    # No room, in pinned memory or on the device: when the weight is needed there may be.
    except RuntimeError as error:
        _copy_log.debug("Weights are not copied to %s ahead of time: %s", device, error)
        return None


def _copy_on(stream: torch.Stream, host_weights: Mapping[str, torch.Tensor]) -> CopiesUnderWay:
    device = stream.device
    # Outside of the stream, because this is the host's work. Pinned memory that is dropped early
    # is not used again by torch before the copies that read it are through.
    pinned = {
        name: weight if weight.is_pinned() else weight.pin_memory()
        for name, weight in host_weights.items()
    }
    with _current_stream(stream):
        tensors = {name: weight.to(device, non_blocking=True) for name, weight in pinned.items()}
        end = torch.Event(device=device)
        end.record(stream)
    return CopiesUnderWay(tensors, device, end)


def _can_copy_beside(device: torch.device) -> bool:
    if not is_accelerator(device):
        return False
    runtime = registry.device_runtime(device.type)
    return runtime.pins_host_memory and runtime.copies_without_blocking


def _with_index(device: torch.device) -> torch.device:
    index: int | None = device.index
    if index is None:
        return torch.device(device.type, torch.accelerator.current_device_index())
    return device


@functools.lru_cache(maxsize=64)
def _side_stream(device: torch.device) -> torch.Stream | None:
    """The stream of a device that copies run on; None where its backend has no streams."""
    try:
        return torch.Stream(device=device)
    except (RuntimeError, NotImplementedError) as error:
        _copy_log.debug("%s has no streams, so nothing is copied beside: %s", device, error)
        return None


@contextlib.contextmanager
def _current_stream(stream: torch.Stream) -> Iterator[None]:
    """A block whose work goes to a stream; afterwards stream and device are as before."""
    index = torch.accelerator.current_device_index()
    previous_stream = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(previous_stream)
        # Setting a stream makes its device the current one.
        torch.accelerator.set_device_index(index)
