"""Tensors of which each process has a part: which part it is, and how it is put into the whole.

torch's DTensors describe it themselves. For a library that partitions parameters in another way,
the capability rows name a reader (:class:`~nbaccel.abc.ShardReader`), which is used only
where the library has been imported.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from nbaccel.base import torch_private
from nbaccel.config.capabilities import STRATEGIES
from nbaccel.plan import registry
from nbaccel.plan.contracts.training import ShardReader
from nbaccel.transfer import memfd

PieceSpot = tuple[slice, ...] | int  # slices of the whole, or its first element's number, flattened


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor: this process has a piece of it, or a copy among several."""
    return hasattr(tensor, "placements")


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether every process writes its own part of it back."""
    return is_dtensor(tensor) or _reader_of(tensor) is not None


def full_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Its shape, all processes' parts together."""
    reader = _reader_of(tensor)
    whole_shape = reader.whole_shape(tensor) if reader is not None else None
    return tuple(tensor.shape) if whole_shape is None else whole_shape


def odd_placements(tensor: Any) -> list[Any]:
    """Those of a DTensor that do not say which slice of the whole this rank has."""
    if not is_dtensor(tensor):
        return []
    # Imported only where a DTensor exists, because the import is slow.
    from torch.distributed.tensor import Replicate, Shard

    return [
        placement
        for placement in tensor.placements
        # By exact type: a subclass such as _StridedShard splits a dimension in another order.
        if type(placement) not in (Replicate, Shard)
    ]


def pieces(tensor: Any, held: object = None) -> Iterator[tuple[PieceSpot, torch.Tensor]]:
    """What this rank has of a tensor: where it lies in the whole, and its values."""
    reader = _reader_of(tensor)
    if reader is not None:
        yield from reader.local_pieces(tensor, held)
        return
    if not is_dtensor(tensor):
        yield (), tensor
        return
    shape, offset = torch_private.local_shape_and_offset(tensor)
    spot = (slice(first, first + count) for first, count in zip(offset, shape, strict=True))
    local = tensor.to_local()
    # A dimension that does not divide evenly leaves some ranks with nothing.
    if local.numel():
        yield tuple(spot), local


def put_piece(whole: torch.Tensor, spot: PieceSpot, values: torch.Tensor) -> list[memfd.ByteRange]:
    """Copy a piece into the whole, with cast; returns which bytes of the whole's storage it is."""
    count = values.numel()
    target, index = _located(whole, spot, count)
    item = whole.element_size()
    if isinstance(spot, int) and not whole.is_contiguous():
        # Neither a run nor slices of the whole: element by element.
        target[index] = values.to(whole)
        firsts = np.full(count, whole.storage_offset())
        for indices, step in zip(index, whole.stride(), strict=True):
            firsts += indices.numpy() * int(step)
        run = 1
    else:
        _copy_with_cast(target[index], values)
        if count * item == whole.untyped_storage().nbytes():
            # All of it, which of a transposed tensor would be as many runs as elements.
            return [(0, count * item)]
        firsts, run = _runs_of(target[index])
    return memfd.merge_ranges((int(first) * item, (int(first) + run) * item) for first in firsts)


def _located(whole: torch.Tensor, spot: PieceSpot, count: int) -> tuple[torch.Tensor, Any]:
    """A view of the whole, and the index of a piece in it."""
    if not isinstance(spot, int):
        return whole, spot
    if whole.is_contiguous():
        return whole.view(-1), slice(spot, spot + count)
    # view(-1) fails for such a tensor, and reshape(-1) would write into a copy.
    return whole, torch.unravel_index(torch.arange(spot, spot + count), whole.shape)


def _runs_of(view: torch.Tensor) -> tuple[Any, int]:
    """Where in its storage the runs of a view's elements begin, and how long each is."""
    run = 1
    dims = list(zip(view.shape, view.stride(), strict=True))
    # Dimensions whose elements lie one behind the other make one run.
    while dims and dims[-1][1] == run:
        run *= dims.pop()[0]
    firsts = np.array([view.storage_offset()])
    for size, step in dims:
        firsts = (firsts[:, None] + int(step) * np.arange(size)).ravel()
    return firsts, run


def unrounded_values(
    values: torch.Tensor, theirs: torch.Tensor, spot: PieceSpot, dtype: torch.dtype
) -> torch.Tensor:
    """The notebook's values where a piece is these in a shorter format: engines cast all."""
    if dtype == theirs.dtype or not (dtype.is_floating_point and theirs.is_floating_point()):
        return values
    target, index = _located(theirs, spot, values.numel())
    part = target[index]
    return part if torch.equal(part.to(dtype).to(values), values) else values


def _copy_with_cast(whole: torch.Tensor, values: torch.Tensor) -> None:
    """Copy, with cast; an expanded tensor's repeated dims are written once."""
    # torch refuses to copy into a tensor whose elements share memory.
    for number, step in enumerate(whole.stride()):
        if step == 0 and whole.shape[number] > 1:
            whole = whole.narrow(number, 0, 1)
            values = values.narrow(number, 0, 1)
    whole.copy_(values)


def fill_local_part(tensor: torch.Tensor, whole: torch.Tensor) -> None:
    """Let this rank's part have the values of the whole."""
    reader = _reader_of(tensor)
    if reader is not None:
        reader.assign(tensor, whole)
        return
    for spot, values in pieces(tensor.detach()):
        # A DTensor's pieces have slices; only readers, which are handled above, give numbers.
        if not isinstance(spot, int):
            values.copy_(whole[spot])


def module_inside(module: nn.Module) -> nn.Module | None:
    """The user's module in an engine of a library that partitions parameters; else None."""
    return next(
        (inner for reader in shard_readers() if (inner := reader.inner_module(module)) is not None),
        None,
    )


def forget_process_groups() -> None:
    """Let libraries drop groups that they made from torch's process groups, which are gone."""
    for reader in shard_readers():
        reader.forget_groups()


def remove_process_files() -> None:
    """Remove what libraries keep on disk for this process, which ends."""
    for path in _reader_paths():
        # One that was never imported keeps nothing, and its import takes longer than all else.
        if path.partition(":")[0] in sys.modules:
            registry.load_object(path).leave()


def load_readers() -> None:
    """Import the readers of libraries that have been imported, for all forks of this process."""
    for path in _reader_paths():
        # What is wrong with another package's reader, the worker that needs it says.
        with contextlib.suppress(Exception):
            registry.load_object(path)


def held_part(tensor: torch.Tensor) -> object:
    """What must be kept so that pieces can be read when their engine is gone; or None."""
    reader = _reader_of(tensor)
    return reader.hold(tensor) if reader is not None else None


def _reader_of(tensor: torch.Tensor) -> ShardReader | None:
    return next((reader for reader in shard_readers() if reader.is_cut(tensor)), None)


def shard_readers(*, loaded_only: bool = True) -> Iterator[ShardReader]:
    """The readers of libraries that shard models."""
    for path in _reader_paths(loaded_only=loaded_only):
        yield registry.load_object(path)


def _reader_paths(*, loaded_only: bool = True) -> Iterator[str]:
    for row in STRATEGIES:
        # Reading the shards of a library imports it, which takes seconds.
        if row.shards and (row.library in sys.modules or not loaded_only):
            yield row.shards
