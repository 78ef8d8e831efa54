"""Tensors of which each process has a part: which part it is, and how it gets into the whole.

torch's DTensors say it themselves. Of libraries that cut parameters up in ways of their own, the
capability rows name a reader (:class:`~nbaccel.abc.shards.ShardReader`); it is asked only where the
library has been imported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from nbaccel import _catalog
from nbaccel.abc.shards import ShardReader
from nbaccel.capabilities import STRATEGIES

__all__ = ["Held", "assign", "fill", "is_dtensor", "is_sharded", "pieces", "put", "whole_shape"]

Spot = tuple[slice, ...] | int
"""Where a piece lies in the whole: slices, or the number of its first element, flattened."""

_CHUNK = 1 << 20  # elements placed at a time where each needs an index of its own


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor: this process has a piece of it, or a copy among several."""
    return hasattr(tensor, "placements")


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether every process brings its own part of it home."""
    return is_dtensor(tensor) or _reader_of(tensor) is not None


def whole_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Its shape, all processes' parts together."""
    reader = _reader_of(tensor)
    found = reader.whole_shape(tensor) if reader is not None else None
    return tuple(tensor.shape) if found is None else found


def odd_placements(tensor: Any) -> list[Any]:
    """Those of a DTensor that do not say which slice of the whole this rank has."""
    if not is_dtensor(tensor):
        return []
    from torch.distributed.tensor import Replicate, Shard

    return [p for p in tensor.placements if type(p) not in (Replicate, Shard)]


def pieces(tensor: Any, held: object = None) -> Iterator[tuple[Spot, torch.Tensor]]:
    """What this rank has of a tensor: where it lies in the whole, and its values.

    Args:
        tensor: Any tensor.
        held: What :class:`Held` kept of it.
    """
    reader = _reader_of(tensor)
    if reader is not None:
        yield from reader.local_pieces(tensor, held)
        return
    if not is_dtensor(tensor):
        yield (), tensor
        return
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    local = tensor.to_local()
    if local.numel():
        yield tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True)), local


def put(into: torch.Tensor, spot: Spot, values: torch.Tensor) -> None:
    """Copy a piece into the whole, with cast.

    Args:
        into: The whole.
        spot: Where.
        values: The piece.
    """
    if not isinstance(spot, int):
        assign(into[spot], values)
    elif into.is_contiguous():
        into.view(-1)[spot : spot + values.numel()].copy_(values)
    else:
        for begin in range(0, values.numel(), _CHUNK):
            part = values[begin : begin + _CHUNK]
            numbers = torch.arange(spot + begin, spot + begin + part.numel())
            into[torch.unravel_index(numbers, into.shape)] = part.to(into)


def assign(into: torch.Tensor, values: torch.Tensor) -> None:
    """Copy, with cast; an expanded tensor's repeated dims are written once."""
    for dim, step in enumerate(into.stride()):
        if step == 0 and into.shape[dim] > 1:
            into, values = into.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    into.copy_(values)


def fill(tensor: torch.Tensor, whole: torch.Tensor) -> None:
    """Let this rank's part have the values of the whole.

    Args:
        tensor: Whole or sharded.
        whole: All of it.
    """
    reader = _reader_of(tensor)
    if reader is not None:
        reader.assign(tensor, whole)
        return
    for spot, values in pieces(tensor.detach()):
        if not isinstance(spot, int):
            values.copy_(whole[spot])


class Held:
    """Keeps what is needed to read parts after their engine is gone."""

    def __init__(self) -> None:
        self._found: dict[int, object] = {}

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Keep what is needed of these, as it is now."""
        for tensor in tensors:
            reader = _reader_of(tensor)
            found = reader.hold(tensor) if reader is not None else None
            if found is not None:
                self._found[id(tensor)] = found

    def of(self, tensor: torch.Tensor) -> object:
        """What was kept of a tensor; None if nothing was."""
        return self._found.get(id(tensor))


def _reader_of(tensor: torch.Tensor) -> ShardReader | None:
    for row in STRATEGIES:
        if row.shards and row.library in sys.modules:
            reader: ShardReader = _catalog.load(row.shards)
            if reader.is_cut(tensor):
                return reader
    return None
