"""Tensors of which each process has a part: which part it is, and how it gets into the whole.

torch's DTensors say it themselves. Of libraries that cut parameters up in ways of their own, the
capability rows name a reader (:class:`~nbaccel.abc.shards.ShardReader`); it is asked only where the
library has been imported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from nbaccel import _catalog
from nbaccel.abc.shards import ShardReader
from nbaccel.capabilities import STRATEGIES

__all__ = [
    "Held",
    "assign",
    "fill",
    "forget_groups",
    "inner_module",
    "is_dtensor",
    "is_sharded",
    "leave",
    "pieces",
    "plain_state",
    "put",
    "unrounded",
    "whole_shape",
]

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


def unrounded(
    values: torch.Tensor, before: torch.Tensor, spot: Spot, dtype: torch.dtype
) -> torch.Tensor:
    """The notebook's own values, where a piece is nothing but these in a shorter format.

    Engines cast whole models: what is frozen, or was not trained yet, would come home with fewer
    digits than it has.

    Args:
        values: The piece.
        before: The whole, as the notebook has it.
        spot: Where the piece lies in it.
        dtype: The format that the model computes in.
    """
    if dtype == before.dtype or not (dtype.is_floating_point and before.is_floating_point()):
        return values
    own = _part(before, spot, values.numel())
    return own if torch.equal(own.to(dtype).to(values), values) else values


def _part(whole: torch.Tensor, spot: Spot, count: int) -> torch.Tensor:
    if not isinstance(spot, int):
        return whole[spot]
    if whole.is_contiguous():
        return whole.view(-1)[spot : spot + count]
    return whole[torch.unravel_index(torch.arange(spot, spot + count), whole.shape)]


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


def inner_module(module: nn.Module) -> nn.Module | None:
    """The user's module in an engine of a library that cuts parameters up; None for any other."""
    return next((m for r in _readers() if (m := r.inner_module(module)) is not None), None)


def plain_state(module: nn.Module) -> dict[str, Any] | None:
    """What a module consists of without what such a library put on it; None if it did not."""
    return next((s for r in _readers() if (s := r.plain_state(module)) is not None), None)


def forget_groups() -> None:
    """Torch's process groups are gone: no library may go on with groups made from them."""
    for reader in _readers():
        reader.forget_groups()


def leave() -> None:
    """Remove what libraries keep on disk for this process, which ends."""
    for reader in _readers():
        reader.leave()


class Held:
    """Keeps what is needed to read parts after their engine is gone."""

    def __init__(self) -> None:
        self._found: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._seen: WeakSet[torch.optim.Optimizer] = WeakSet()

    def hold_for(self, optimizer: torch.optim.Optimizer, modules: Iterable[nn.Module]) -> None:
        """Keep what is needed of modules as they are at an optimizer's first step.

        Args:
            optimizer: It steps now.
            modules: All that it may train.
        """
        if optimizer in self._seen:
            return
        self._seen.add(optimizer)
        for tensor in (parameter for module in modules for parameter in module.parameters()):
            reader = _reader_of(tensor)
            found = reader.hold(tensor) if reader is not None else None
            if found is not None:
                self._found[tensor] = found

    def of(self, tensor: torch.Tensor) -> object:
        """What was kept of a tensor; None if nothing was."""
        found: object = self._found.get(tensor)  # type: ignore[no-untyped-call]
        return found


def _reader_of(tensor: torch.Tensor) -> ShardReader | None:
    return next((reader for reader in _readers() if reader.is_cut(tensor)), None)


def _readers() -> Iterator[ShardReader]:
    """Those of the libraries that have been imported."""
    for row in STRATEGIES:
        if row.shards and row.library in sys.modules:
            yield _catalog.load(row.shards)
