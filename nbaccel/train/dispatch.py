"""``DispatchLoader``: process 0 reads, the others get their part from it.

For data that only one process can read, or that cannot be shared out by index. Each round, process
0 tells the others what comes (:class:`_Round`: the batch without its numbers, the end, or what went
wrong), then sends the tensors; every process keeps its rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterDataPipe

from nbaccel.errors import CollectiveMismatch, ConfigError
from nbaccel.train.gradient import GradientState
from nbaccel.train.loader import LoaderSettings, PreparedLoader
from nbaccel.train.position import Position
from nbaccel.train.trees import (
    concatenate,
    find_batch_size,
    leaves,
    map_leaves,
    map_tensors,
    send_to_device,
    slice_rows,
)

__all__ = ["DispatchLoader", "SliceFn"]

SliceFn = Callable[..., Any]
"""``slice_fn(batch, rows: slice, *, process_index: int, num_processes: int) -> batch``."""

_ADVICE = (
    "Process 0 joins one batch per process and sends each its rows. Give "
    "DataLoaderConfiguration(dispatch_batches=False), so that each process reads its own batches, "
    "or split_batches=True, so that each batch is cut by itself"
)


@dataclass(frozen=True)
class _Blank:
    """A tensor without its numbers."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class _Round:
    """What process 0 tells the others before it sends the tensors.

    An error travels as text: not every exception can be pickled.
    """

    batch: Any = None
    is_end: bool = False
    error: str = ""
    is_mistake: bool = False


class DispatchLoader(PreparedLoader):
    """A loader whose base only process 0 reads.

    The last round is completed with rows of the first one, so that all processes get equally many
    (unless `drop_last`).

    Args:
        base: The torch loader that process 0 reads.
        gradient_state: What is told which loader runs.
        settings: How it shares with the other processes.
        position: The epoch and batch it is at.
        drop: Rounds to read and throw away at the beginning of an epoch.
        slice_fn: How a process takes its rows of a batch; None takes them from every tensor.

    Attributes:
        slice_fn: As given.

    Raises:
        ConfigError: (While iterating) batches have different sizes, or hold what has no rows.
        CollectiveMismatch: (While iterating, on the others) process 0 could not read.
    """

    def __init__(
        self,
        base: DataLoader[Any],
        gradient_state: GradientState,
        settings: LoaderSettings,
        position: Position | None = None,
        *,
        drop: int = 0,
        slice_fn: SliceFn | None = None,
    ) -> None:
        super().__init__(base, gradient_state, settings, position, drop=drop)
        self.slice_fn = slice_fn
        self._rows = -1  # of the last round

    def __len__(self) -> int:
        total = len(self.base)
        if not self.settings.split_batches:
            rounds = total / self.settings.place.world_size
            total = math.floor(rounds) if self.settings.drop_last else math.ceil(rounds)
        return max(0, total - self._drop)

    def _expected_remainder(self) -> int:
        return -1

    def _settle_remainder(self) -> None:
        self.remainder = self._rows

    def _snapshot(self) -> dict[str, Any] | None:
        return super()._snapshot() if self.settings.place.is_main else None

    def _open(self, *, draws_now: bool) -> Iterator[Any]:
        if self.settings.place.is_main:
            return self._rounds(self._joined_batches(self._open_base(draws_now=draws_now)))
        # On the others nothing is read, but as much is drawn as process 0 draws to begin.
        if isinstance(self.dataset, IterDataPipe):
            iter(self.base)  # torch lets all processes agree on a seed here
        else:
            torch.empty((), dtype=torch.int64).random_(generator=self.base.generator)
        return self._rounds(iter(()))

    def _rounds(self, source: Iterator[Any]) -> Iterator[Any]:
        """This process's part of every round."""
        place = self.settings.place
        size = place.world_size
        beginning: Any = None
        short = 0
        while True:
            batch = self._exchange(source)
            if batch is None:
                return
            if short:
                raise _uneven(short, size)
            rows = find_batch_size(batch) or 0
            if beginning is None:
                beginning = self._slice(batch, slice(0, size))
            short = rows if rows % size else 0
            if short and self.settings.drop_last:
                continue
            self._rows = rows
            each = math.ceil(rows / size)
            batch = _filled(batch, beginning, each * size)
            yield self._slice(batch, slice(place.rank * each, (place.rank + 1) * each))

    def _slice(self, batch: Any, rows: slice) -> Any:
        if self.slice_fn is None:
            return slice_rows(batch, rows)
        place = self.settings.place
        return self.slice_fn(batch, rows, process_index=place.rank, num_processes=place.world_size)

    def _joined_batches(self, source: Iterator[Any]) -> Iterator[Any]:
        """On process 0: the batches of all processes together."""
        count = 1 if self.settings.split_batches else self.settings.place.world_size
        while group := list(itertools.islice(source, count)):
            if len(group) < count and self.settings.drop_last:
                return
            if self.slice_fn is None:
                _check_rows(group)
            yield _joined(group)

    def _exchange(self, source: Iterator[Any]) -> Any:
        """The next round's batch, on every process; None at the end."""
        settings = self.settings
        batch, told, error = _next_round(source)
        told = settings.collectives.broadcast_object(told)
        if told.error:
            raise error or _error_of_process_0(told)
        if told.is_end:
            return None
        device = settings.device or settings.place.device
        if settings.place.is_main:
            batch = send_to_device(batch, device, non_blocking=settings.non_blocking)
            batch = map_tensors(torch.Tensor.contiguous, batch)
        else:
            batch = map_leaves(lambda leaf: _allocated(leaf, device), told.batch)
        tensors = [leaf for leaf in leaves(batch) if isinstance(leaf, torch.Tensor)]
        settings.collectives.broadcast(tensors)
        return batch


def _next_round(source: Iterator[Any]) -> tuple[Any, _Round, Exception | None]:
    """A batch of all processes, what to tell of it, and what went wrong if anything."""
    try:
        batch = next(source, None)
    except Exception as error:  # whatever it is, the others wait to hear of it
        text = f"{type(error).__name__}: {error}"
        return None, _Round(error=text, is_mistake=isinstance(error, ConfigError)), error
    if batch is None:
        return None, _Round(is_end=True), None
    blank = map_tensors(lambda tensor: _Blank(tuple(tensor.shape), tensor.dtype), batch)
    return batch, _Round(batch=blank), None


def _allocated(leaf: Any, device: torch.device) -> Any:
    if not isinstance(leaf, _Blank):
        return leaf
    return torch.empty(leaf.shape, dtype=leaf.dtype, device=device)


def _error_of_process_0(told: _Round) -> Exception:
    if told.is_mistake:
        return ConfigError(told.error.partition(": ")[2])
    return CollectiveMismatch(
        f"Process 0, which reads for all, could not read the next batch: {told.error}\n"
        "This process gets its batches from there. See what process 0 raised."
    )


def _joined(group: list[Any]) -> Any:
    if len(group) == 1:
        return group[0]
    try:
        return concatenate(group)
    except (RuntimeError, ValueError, KeyError) as error:
        raise ConfigError(
            f"Batches of one round do not fit together: {error}. {_ADVICE}."
        ) from error


def _filled(batch: Any, beginning: Any, rows: int) -> Any:
    """The batch with rows of the first round added until it has so many."""
    while (find_batch_size(batch) or rows) < rows:
        batch = concatenate([batch, beginning])
    return batch


def _uneven(rows: int, num_processes: int) -> ConfigError:
    return ConfigError(
        f"A batch of {rows} samples does not divide equally between {num_processes} processes, "
        "and it was not the last. Samples would be lost, or come twice. Make all batches but the "
        f"last divisible by {num_processes}, or give "
        "DataLoaderConfiguration(dispatch_batches=False)."
    )


def _check_rows(group: list[Any]) -> None:
    """Refuse what cannot be cut into rows: it would go whole to every process."""
    first, *others = [list(leaves(batch)) for batch in group]
    plain = (bool, int, float, type(None))
    odd = [
        leaf
        for number, leaf in enumerate(first)
        if not isinstance(leaf, torch.Tensor)
        and not (isinstance(leaf, plain) and all(leaf == other[number] for other in others))
    ]
    if odd:
        raise ConfigError(
            f"A batch holds {odd[0]!r} ({type(odd[0]).__name__}), which cannot be cut into rows. "
            "Every process would get all of it. Leave it out in collate_fn, make it a tensor, or "
            "give DataLoaderConfiguration(dispatch_batches=False)."
        )
