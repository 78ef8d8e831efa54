"""``DataLoaderDispatcher``: process 0 reads, the others get their part from it.

For data that only one process can read, or that cannot be shared out by index. Each round, process
0 tells the others what comes (the batch without its values, nothing at the end, or what went
wrong), then sends the tensors; every process keeps its rows.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import IterDataPipe

from nbaccel.base import trees
from nbaccel.base.errors import CollectiveMismatch, ConfigError
from nbaccel.train import distributed
from nbaccel.train.loader import DataLoaderShard, PreparedLoader, reading_class, refuse_mesh

SliceFn = Callable[..., Any]
"""``slice_fn(batch, rows: slice, *, process_index: int, num_processes: int) -> batch``."""

_DISPATCH_ADVICE = (
    "Process 0 joins one batch per process and sends each its rows. Give "
    "DataLoaderConfiguration(dispatch_batches=False), so that each process reads its own "
    "batches, or split_batches=True, so that each batch is cut by itself"
)


class DataLoaderDispatcher(PreparedLoader):
    """A loader that process 0 reads for all; every process gets its part of each batch.

    The last round is completed with rows of the first one, so that all processes get equally many
    (unless a last round that is not full is dropped). With `split_batches` each batch is cut into
    one slice per process; otherwise each gets one whole batch per round. `slice_fn` says how a
    process takes its rows of a batch; by default it takes them from every tensor.

    Raises:
        ConfigError: A mesh was given; or, while read, batches differ in size, or lack rows.
        CollectiveMismatch: While it is read, on the others: process 0 could not read.
        MissingBackend: torchdata is asked for and not installed.
    """

    slice_fn: SliceFn | None = None
    _last_rows = -1  # of the last round

    def __init__(
        self,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: SliceFn | None = None,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        refuse_mesh(type(self), torch_device_mesh)
        self.make_by_hand(
            reading_class(use_stateful_dataloader)(dataset, **kwargs),
            is_shared=True,
            device=distributed.init_process().device,
            non_blocking=_non_blocking,
            drop_last=_drop_last,
            split_batches=split_batches,
            skip_batches=skip_batches,
            stateful=use_stateful_dataloader,
        )
        self.slice_fn = slice_fn
        self.iteration = iteration

    def __len__(self) -> int:
        num_batches = len(self.base)
        if not self.settings.split_batches:
            rounded = math.floor if self.settings.drop_last else math.ceil
            num_batches = rounded(num_batches / self.settings.place.world_size)
        return max(0, num_batches - self.batches_to_drop)

    def _count_remainder(self, last_batch: Any) -> int:
        alone = self.settings.place.is_alone
        return super()._count_remainder(last_batch) if alone else self._last_rows

    def _base_snapshot(self) -> dict[str, Any] | None:
        return super()._base_snapshot() if self.settings.place.is_main else None

    def _open_source(self, *, draws_now: bool) -> Iterator[Any]:
        if self.settings.place.is_alone:
            return super()._open_source(draws_now=draws_now)
        if self.settings.place.is_main:
            source = super()._open_source(draws_now=draws_now)
            return self._round_parts(self._joined_batches(source))
        # On the others nothing is read, but as much is drawn as process 0 draws to begin.
        if isinstance(self.dataset, IterDataPipe):
            iter(self.base)  # torch lets all processes agree on a seed here
        else:
            torch.empty((), dtype=torch.int64).random_(generator=self.base.generator)
        # Their batches come by broadcast, so the source is never read.
        return self._round_parts(iter(()))

    def _round_parts(self, batch_source: Iterator[Any]) -> Iterator[Any]:
        place = self.settings.place
        world_size = place.world_size
        first_rows: Any = None
        short_rows = 0
        while True:
            batch = self._exchange_round(batch_source)
            if batch is None:
                return
            # Only the last round may be short, and that is known when another one follows.
            if short_rows:
                raise ConfigError(
                    f"A batch of {short_rows} samples does not divide equally between {world_size} "
                    "processes, and it was not the last. Samples would be lost, or come twice. "
                    f"Make all batches but the last divisible by {world_size}, or give "
                    "DataLoaderConfiguration(dispatch_batches=False)."
                )
            num_rows = trees.find_batch_size(batch) or 0
            if first_rows is None:
                # Enough to fill any round: fewer than `world_size` rows can be missing.
                first_rows = self._slice_batch(batch, slice(0, world_size))
            short_rows = num_rows if num_rows % world_size else 0
            if short_rows and self.settings.drop_last:
                continue  # dropped, but if another round follows, this one was a mistake
            self._last_rows = num_rows
            rows_each = math.ceil(num_rows / world_size)
            while 0 < (trees.find_batch_size(batch) or 0) < rows_each * world_size:
                batch = trees.concatenate([batch, first_rows])
            first_row = place.rank * rows_each
            yield self._slice_batch(batch, slice(first_row, first_row + rows_each))

    def _slice_batch(self, batch: Any, rows: slice) -> Any:
        if self.slice_fn is None:
            return trees.slice_rows(batch, rows)
        place = self.settings.place
        return self.slice_fn(batch, rows, process_index=place.rank, num_processes=place.world_size)

    def _joined_batches(self, source: Iterator[Any]) -> Iterator[Any]:
        per_round = 1 if self.settings.split_batches else self.settings.place.world_size
        while round_batches := list(itertools.islice(source, per_round)):
            if len(round_batches) < per_round and self.settings.drop_last:
                return
            if self.slice_fn is None:
                _check_divisible_leaves(round_batches)
            try:
                is_one = len(round_batches) == 1
                joined = round_batches[0] if is_one else trees.concatenate(round_batches)
            except (RuntimeError, ValueError, KeyError) as error:
                raise ConfigError(
                    f"Batches of one round do not fit together: {error}. {_DISPATCH_ADVICE}."
                ) from error
            yield joined

    def _exchange_round(self, source: Iterator[Any]) -> Any:
        """The next round's batch, on every process; None at the end."""
        settings = self.settings
        batch, read_error, text = None, None, ""
        try:
            batch = next(source, None)
        except Exception as error:  # of any kind: the others wait for an announcement
            read_error, text = error, f"{type(error).__name__}: {error}"
        blank_batch = trees.map_tensors(lambda tensor: tensor.detach().to("meta"), batch)
        announcement = (blank_batch, text, isinstance(read_error, ConfigError))
        blank_batch, text, is_mistake = settings.collectives.broadcast_object(announcement)
        if text:
            # Not every exception can be pickled: the others have only its text.
            if read_error is None and not is_mistake:
                raise CollectiveMismatch(
                    f"Process 0, which reads for all, could not read the next batch: {text}\nThis "
                    "process gets its batches from there. See what process 0 raised."
                )
            raise read_error or ConfigError(text.partition(": ")[2])
        if blank_batch is None:
            return None
        device = settings.device or settings.place.device
        if settings.place.is_main:
            batch = trees.send_to_device(batch, device, non_blocking=settings.non_blocking)
            # `broadcast` refuses tensors that are not contiguous, such as transposed ones.
            batch = trees.map_tensors(torch.Tensor.contiguous, batch)
        else:
            # Not `empty_like`, which would keep strides.
            batch = trees.map_tensors(
                lambda blank: torch.empty(blank.shape, dtype=blank.dtype, device=device),
                blank_batch,
            )
        tensors = [leaf for leaf in trees.leaves(batch) if isinstance(leaf, torch.Tensor)]
        settings.collectives.broadcast(tensors)
        return batch


def _check_divisible_leaves(batches: list[Any]) -> None:
    first_leaves, *other_leaves = [trees.leaves(batch) for batch in batches]
    constant_types = (bool, int, float, type(None))
    indivisible = [
        leaf
        for index, leaf in enumerate(first_leaves)
        if not isinstance(leaf, torch.Tensor)
        # A value that is equal in all batches belongs to no sample: every process may have it.
        and not (
            isinstance(leaf, constant_types)
            and all(leaf == batch_leaves[index] for batch_leaves in other_leaves)
        )
    ]
    if indivisible:
        raise ConfigError(
            f"A batch holds {indivisible[0]!r} ({type(indivisible[0]).__name__}), which cannot "
            "be cut into rows. Every process would get all of it. Leave it out in collate_fn, "
            "make it a tensor, or give DataLoaderConfiguration(dispatch_batches=False)."
        )


def loader_class(*, dispatches: bool, stateful: bool) -> type[PreparedLoader]:
    """The class of a prepared loader."""
    plain_class = DataLoaderDispatcher if dispatches else DataLoaderShard
    return stateful_class(plain_class) if stateful else plain_class


@functools.cache
def stateful_class(plain_class: type[PreparedLoader]) -> type[PreparedLoader]:
    """The class of prepared loaders that are torchdata's, too: code asks what they are."""
    # Ours comes first, so that its methods win over torchdata's.
    bases = (plain_class, reading_class(True))
    name = f"Stateful{plain_class.__name__}"
    return type(name, bases, {"__module__": __name__, "__doc__": plain_class.__doc__})


def __getattr__(name: str) -> Any:
    """The same classes, for who unpickles a loader: torchdata is imported where it is used."""
    for plain_class in (DataLoaderShard, DataLoaderDispatcher):
        if name == f"Stateful{plain_class.__name__}":
            return stateful_class(plain_class)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
