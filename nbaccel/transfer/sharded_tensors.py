"""Tensors of which each process has a part: which part it is, and how it is put into the whole.

torch's DTensors describe it themselves. For a library that partitions parameters in another way,
the capability rows name a reader (:class:`~nbaccel.abc.ShardReader`), which is used only
where the library has been imported.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from nbaccel.base import torch_private
from nbaccel.config.capabilities import FP8_BACKENDS, STRATEGIES
from nbaccel.plan import registry
from nbaccel.plan.contracts.shards import ShardReader
from nbaccel.transfer import memfd

PieceSpot = tuple[slice, ...] | int
"""Where a piece lies in the whole: slices, or the number of its first element, flattened."""


def is_dtensor(sharded_tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor: this process has a piece of it, or a copy among several."""
    return hasattr(sharded_tensor, "placements")


def is_sharded(sharded_tensor: torch.Tensor) -> bool:
    """Whether every process writes its own part of it back."""
    return is_dtensor(sharded_tensor) or _reader_of(sharded_tensor) is not None


def full_shape(sharded_tensor: torch.Tensor) -> tuple[int, ...]:
    """Its shape, all processes' parts together."""
    shard_reader = _reader_of(sharded_tensor)
    whole_shape = shard_reader.whole_shape(sharded_tensor) if shard_reader is not None else None
    return tuple(sharded_tensor.shape) if whole_shape is None else whole_shape


def odd_placements(sharded_tensor: Any) -> list[Any]:
    """Those of a DTensor that do not say which slice of the whole this rank has."""
    if not is_dtensor(sharded_tensor):
        return []
    # Imported only where a DTensor exists, because the import is slow.
    from torch.distributed.tensor import Replicate, Shard

    return [
        placement
        for placement in sharded_tensor.placements
        # By exact type: a subclass such as _StridedShard splits a dimension in another order.
        if type(placement) not in (Replicate, Shard)
    ]


def pieces(
    sharded_tensor: Any, held_part: object = None
) -> Iterator[tuple[PieceSpot, torch.Tensor]]:
    """What this rank has of a tensor: where it lies in the whole, and its values."""
    shard_reader = _reader_of(sharded_tensor)
    if shard_reader is not None:
        yield from shard_reader.local_pieces(sharded_tensor, held_part)
        return
    if not is_dtensor(sharded_tensor):
        yield (), sharded_tensor
        return
    local_shape, local_offset = torch_private.local_shape_and_offset(sharded_tensor)
    local_tensor = sharded_tensor.to_local()
    # A dimension that does not divide evenly leaves some ranks with nothing.
    if local_tensor.numel():
        yield (
            tuple(
                slice(first_index, first_index + num_elements)
                for first_index, num_elements in zip(local_offset, local_shape, strict=True)
            ),
            local_tensor,
        )


def put_piece(
    whole_tensor: torch.Tensor, piece_spot: PieceSpot, piece_values: torch.Tensor
) -> None:
    """Copy a piece into the whole, with cast."""
    num_elements = piece_values.numel()
    if isinstance(piece_spot, int) and not whole_tensor.is_contiguous():
        # view(-1) fails for such a tensor, and reshape(-1) would write into a copy.
        indices = _indices_of(whole_tensor, piece_spot, num_elements)
        whole_tensor[indices] = piece_values.to(whole_tensor)
    else:
        copy_with_cast(_part_of_whole(whole_tensor, piece_spot, num_elements), piece_values)


def piece_ranges(
    whole_tensor: torch.Tensor, piece_spot: PieceSpot, num_elements: int
) -> list[memfd.ByteRange]:
    """The bytes that :func:`put_piece` writes, counted from the start of the whole's storage."""
    if isinstance(piece_spot, int) and not whole_tensor.is_contiguous():
        # Neither a run nor slices: element by element.
        indices_by_dim = _indices_of(whole_tensor, piece_spot, num_elements)
        first_elements = np.full(num_elements, whole_tensor.storage_offset())
        for dim_indices, stride_step in zip(indices_by_dim, whole_tensor.stride(), strict=True):
            first_elements += dim_indices.numpy() * int(stride_step)
        run_elements = 1
    elif isinstance(piece_spot, int):
        first_elements = np.array([whole_tensor.storage_offset() + piece_spot])
        run_elements = num_elements
    else:
        first_elements, run_elements = _runs_of(whole_tensor[piece_spot])
    item_bytes = whole_tensor.element_size()
    return memfd.merge_ranges(
        (int(first_element) * item_bytes, (int(first_element) + run_elements) * item_bytes)
        for first_element in first_elements
    )


def _runs_of(piece_view: torch.Tensor) -> tuple[Any, int]:
    """Where in its storage the runs of a view's elements begin, and how long each is."""
    run_elements = 1
    outer_dims = list(zip(piece_view.shape, piece_view.stride(), strict=True))
    # Dimensions whose elements lie one behind the other make one run.
    while outer_dims and outer_dims[-1][1] == run_elements:
        run_elements *= outer_dims.pop()[0]
    first_elements = np.array([piece_view.storage_offset()])
    for size, stride_step in outer_dims:
        dim_steps = int(stride_step) * np.arange(size)
        first_elements = (first_elements[:, None] + dim_steps).ravel()
    return first_elements, run_elements


def unrounded_values(
    piece_values: torch.Tensor,
    notebook_values: torch.Tensor,
    piece_spot: PieceSpot,
    model_dtype: torch.dtype,
) -> torch.Tensor:
    """The notebook's own values, where a piece is nothing but these in a shorter format.

    Engines cast whole models: what is frozen, or was not trained yet, would be written back with
    fewer digits than it has.
    """
    if model_dtype == notebook_values.dtype or not (
        model_dtype.is_floating_point and notebook_values.is_floating_point()
    ):
        return piece_values
    notebook_part = _part_of_whole(notebook_values, piece_spot, piece_values.numel())
    return (
        notebook_part
        if torch.equal(notebook_part.to(model_dtype).to(piece_values), piece_values)
        else piece_values
    )


def _part_of_whole(
    whole_tensor: torch.Tensor, piece_spot: PieceSpot, num_elements: int
) -> torch.Tensor:
    if not isinstance(piece_spot, int):
        return whole_tensor[piece_spot]
    if whole_tensor.is_contiguous():
        return whole_tensor.view(-1)[piece_spot : piece_spot + num_elements]
    return whole_tensor[_indices_of(whole_tensor, piece_spot, num_elements)]


def _indices_of(
    whole_tensor: torch.Tensor, first_element: int, num_elements: int
) -> tuple[torch.Tensor, ...]:
    """Where elements lie, of a tensor that is no one run of memory."""
    flat_indices = torch.arange(first_element, first_element + num_elements)
    return torch.unravel_index(flat_indices, whole_tensor.shape)


def copy_with_cast(whole_tensor: torch.Tensor, piece_values: torch.Tensor) -> None:
    """Copy, with cast; an expanded tensor's repeated dims are written once."""
    # torch refuses to copy into a tensor whose elements share memory.
    for number, step in enumerate(whole_tensor.stride()):
        if step == 0 and whole_tensor.shape[number] > 1:
            whole_tensor = whole_tensor.narrow(number, 0, 1)
            piece_values = piece_values.narrow(number, 0, 1)
    whole_tensor.copy_(piece_values)


def fill_local_part(sharded_tensor: torch.Tensor, whole_tensor: torch.Tensor) -> None:
    """Let this rank's part have the values of the whole."""
    shard_reader = _reader_of(sharded_tensor)
    if shard_reader is not None:
        shard_reader.assign(sharded_tensor, whole_tensor)
        return
    for piece_spot, values in pieces(sharded_tensor.detach()):
        # A DTensor's pieces have slices; only readers, which are handled above, give numbers.
        if not isinstance(piece_spot, int):
            values.copy_(whole_tensor[piece_spot])


def module_inside(wrapped_module: nn.Module) -> nn.Module | None:
    """The user's module in an engine of a library that partitions parameters; else None."""
    return next(
        (
            inner
            for shard_reader in shard_readers()
            if (inner := shard_reader.inner_module(wrapped_module)) is not None
        ),
        None,
    )


def state_without_engine(wrapped_module: nn.Module) -> dict[str, Any] | None:
    """A module's state without what such a library added to it; None if it added nothing."""
    return next(
        (
            state
            for shard_reader in shard_readers()
            if (state := shard_reader.plain_state(wrapped_module)) is not None
        ),
        None,
    )


def forget_process_groups() -> None:
    """Let libraries drop groups that they made from torch's process groups, which are gone."""
    for shard_reader in shard_readers():
        shard_reader.forget_groups()


def remove_process_files() -> None:
    """Remove what libraries keep on disk for this process, which ends."""
    for reader_path in _reader_paths():
        # Nothing is kept for a reader that was never imported, and its import takes longer than
        # all else that a process does at its end.
        if reader_path.partition(":")[0] in sys.modules:
            registry.load_object(reader_path).leave()


def load_readers() -> None:
    """Import the readers of libraries that have been imported, for all forks of this process."""
    for reader_path in _reader_paths():
        # What is wrong with another package's reader, the worker that needs it says.
        with contextlib.suppress(Exception):
            registry.load_object(reader_path)


class HeldParts:
    """Keeps what is needed to read parts after their engine is gone."""

    def __init__(self) -> None:
        # By identity, because == on tensors compares elements.
        self._found: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._seen: WeakSet[torch.optim.Optimizer] = WeakSet()

    def hold_for(
        self, optimizer: torch.optim.Optimizer, trained_modules: Iterable[nn.Module]
    ) -> None:
        """Keep what is needed of modules as they are at an optimizer's first step."""
        if optimizer in self._seen:
            return
        self._seen.add(optimizer)
        for tensor in (
            parameter
            for wrapped_module in trained_modules
            for parameter in wrapped_module.parameters()
        ):
            shard_reader = _reader_of(tensor)
            part = shard_reader.hold(tensor) if shard_reader is not None else None
            if part is not None:
                self._found[tensor] = part

    def of(self, sharded_tensor: torch.Tensor) -> object:
        """What was kept of a tensor; None if nothing was."""
        part: object = self._found.get(sharded_tensor)  # type: ignore[no-untyped-call]
        return part


def _reader_of(tensor: torch.Tensor) -> ShardReader | None:
    return next(
        (shard_reader for shard_reader in shard_readers() if shard_reader.is_cut(tensor)),
        None,
    )


def shard_readers(*, loaded_only: bool = True) -> Iterator[ShardReader]:
    """The readers of libraries that shard models."""
    for reader_path in _reader_paths(loaded_only=loaded_only):
        yield registry.load_object(reader_path)


def _reader_paths(*, loaded_only: bool = True) -> Iterator[str]:
    readers = [(row.library, row.shards) for row in STRATEGIES]
    readers += [(row.library, row.shards) for row in FP8_BACKENDS]
    for library, reader_path in readers:
        # Reading the shards of a library imports it, which takes seconds.
        if reader_path and (library in sys.modules or not loaded_only):
            yield reader_path
