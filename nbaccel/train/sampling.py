"""Which process gets which samples: samplers that cut an epoch into equal shares.

Ten samples in batches of three, on two processes::

    whole batches in turn         rank 0: 012 678    rank 1: 345 9+01
    batches of four, each split   rank 0: 01 45 89   rank 1: 23 67 +01

What follows the ``+`` is taken from the beginning again, so that all processes get equally many
batches of equal size. Everything here counts what was real in the last round (`remainder`), so
that metrics can leave the copies out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler

from nbaccel.base.errors import ConfigError


def check_divisible(batch_size: int | None, num_processes: int, owner_name: str) -> None:
    """Refuse to split batches that do not fall into equal slices."""
    if batch_size is None or batch_size % num_processes:
        fitting_size = math.ceil((batch_size or 1) / num_processes) * num_processes
        raise ConfigError(
            f"{owner_name} cannot use split_batches=True with batch_size={batch_size}: it does "
            f"not divide into equal slices for {num_processes} processes. Give "
            f"batch_size={fitting_size}, or leave split_batches out."
        )


class SeedableRandomSampler(RandomSampler):
    """Shuffles by seed and epoch alone, so that the order of any epoch can be repeated.

    Args:
        data_source: The dataset; only its length is used.
        replacement: Whether a sample may come twice.
        num_samples: How many are drawn in an epoch; None draws as many as there are.
        generator: Draws the order; it is seeded anew for each epoch.
        data_seed: The seed; None takes torch's initial seed.

    Attributes:
        initial_seed: The seed; epoch `e` is drawn with `initial_seed + e`.
        epoch: The epoch that is drawn next.
    """

    def __init__(
        self,
        data_source: Sized,
        replacement: bool = False,
        num_samples: int | None = None,
        generator: torch.Generator | None = None,
        *,
        data_seed: int | None = None,
    ) -> None:
        super().__init__(data_source, replacement, num_samples, generator)
        self.initial_seed = torch.initial_seed() if data_seed is None else data_seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            # Its own, because seeding torch's global one would repeat all other random numbers.
            self.generator = torch.Generator()
        self.generator.manual_seed(self.initial_seed + self.epoch)
        yield from super().__iter__()
        # Reached only at the end: an epoch that is left early is drawn in the same order again.
        self.epoch += 1

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that is drawn next."""
        self.epoch = epoch


@dataclass(eq=False, repr=False)
class BatchSamplerShard(BatchSampler):
    """One process's share of the batches of another batch sampler.

    Args:
        batch_sampler: What yields the batches: lists of indices, the same on all processes.
        num_processes: How many processes share them.
        process_index: Which of them this is.
        split_batches: Cut each batch into slices, instead of giving whole ones in turn.
        even_batches: Complete the last round from the beginning.

    Attributes:
        remainder: After an iteration: samples of the last round that are no copies; 0
            where the round was full, -1 where that is not known.

    Raises:
        ConfigError: The batches cannot be split into equal slices.
    """

    batch_sampler: Any
    num_processes: int = 1
    process_index: int = 0
    split_batches: bool = False
    even_batches: bool = True

    def __post_init__(self) -> None:
        self.batch_size: int | None = getattr(  # type: ignore[assignment]
            self.batch_sampler, "batch_size", None
        )
        self.drop_last = bool(getattr(self.batch_sampler, "drop_last", False))
        self.remainder = -1
        if self.split_batches:
            check_divisible(self.batch_size, self.num_processes, type(self.batch_sampler).__name__)

    @property
    def total_length(self) -> int:
        """Batches of all processes together."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        num_batches = self.total_length
        if self.split_batches:
            return num_batches
        full_rounds, extra_batches = divmod(num_batches, self.num_processes)
        if self.drop_last or not extra_batches:
            return full_rounds
        return full_rounds + (1 if self.even_batches else int(self.process_index < extra_batches))

    def __iter__(self) -> Iterator[list[int]]:
        self.remainder = -1
        return self._slice_batches() if self.split_batches else self._take_turns()

    def _slice_batches(self) -> Iterator[list[int]]:
        batch_size = self.batch_size or 1
        slice_size = batch_size // self.num_processes
        own_slice = slice(slice_size * self.process_index, slice_size * (self.process_index + 1))
        first_batch: list[int] = []
        remainder = 0
        for batch in self.batch_sampler:
            first_batch = first_batch or list(batch)
            if len(batch) == batch_size:
                remainder = 0
                yield batch[own_slice]
            # A batch sampler of the user's may yield short batches before the last one, too.
            elif not self.drop_last:
                remainder = len(batch)
                filled_batch = itertools.chain(batch, itertools.cycle(first_batch))
                share = list(
                    itertools.islice(filled_batch, batch_size) if self.even_batches else batch
                )[own_slice]
                if share:
                    yield share
        self.remainder = remainder

    def _take_turns(self) -> Iterator[list[int]]:
        first_round: list[list[int]] = []
        current_round: list[list[int]] = []
        for batch in self.batch_sampler:
            # A full round is still here if its last batch was short but was not the epoch's last.
            if len(current_round) == self.num_processes:
                yield current_round[self.process_index]
                current_round = []
            current_round.append(batch)
            if len(first_round) < self.num_processes:
                first_round.append(batch)
            is_whole = self.batch_size is None or len(batch) == self.batch_size
            if len(current_round) == self.num_processes and is_whole:
                yield current_round[self.process_index]
                current_round = []
        # Single indices, with batch_size=None, stand for batches of unknown length.
        has_lengths = all(isinstance(batch, Sized) for batch in current_round)
        self.remainder = sum(map(len, current_round)) if has_lengths else -1
        share = self._last_share(current_round, first_round)
        if share is not None:
            yield share

    def _last_share(self, last_round: list[list[int]], first_round: list[list[int]]) -> Any:
        if not last_round or (self.drop_last and len(last_round) < self.num_processes):
            return None
        if self.drop_last or not self.even_batches:
            return last_round[self.process_index] if self.process_index < len(last_round) else None
        if self.batch_size is None:
            batches = itertools.chain(last_round, itertools.cycle(first_round))
            return next(itertools.islice(batches, self.process_index, None))
        # `cycle`, because the whole epoch may be shorter than what is missing in its only round.
        indices = itertools.chain(*last_round, itertools.cycle(list(itertools.chain(*first_round))))
        first_sample = self.process_index * self.batch_size
        return list(itertools.islice(indices, first_sample, first_sample + self.batch_size))


class SkipBatchSampler(BatchSampler):
    """Leaves out the first batches of another batch sampler; their data is never read."""

    def __init__(self, batch_sampler: Any, skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches

    def __getattr__(self, name: str) -> Any:
        # Size, split and remainder of the inner sampler hold for the batches that remain, too.
        if name == "batch_sampler":  # not there yet, while being unpickled
            raise AttributeError(f"{type(self).__name__} has no {name} yet")
        return getattr(self.batch_sampler, name)

    @property
    def total_length(self) -> int:
        """Batches before any are left out."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        return max(0, self.total_length - self.skip_batches)

    def __iter__(self) -> Iterator[list[int]]:
        return itertools.islice(iter(self.batch_sampler), self.skip_batches, None)


@dataclass(eq=False, repr=False)
class IterableDatasetShard(IterableDataset[Any]):
    """One process's share of a dataset that can only be read from its beginning.

    Every process reads all of it and keeps its part.

    Args:
        dataset: What yields the samples, the same on all processes. It may have `set_epoch`, or a
            `generator`, which is then seeded with the epoch.
        batch_size: Samples of a batch: of one process's, or (`split_batches`) of the total one.
            None where the dataset yields whole batches: they go to the processes in turn.
        drop_last: Drop a last round that is not full instead of completing it.
        num_processes: How many processes share the dataset.
        process_index: Which of them this is.
        split_batches: Whether `batch_size` is the total one.

    Attributes:
        remainder: After an iteration here: samples of the last round that are no copies; 0: full.

    Raises:
        ConfigError: The batches cannot be split into equal slices.
    """

    dataset: Iterable[Any]
    batch_size: int | None = 1
    drop_last: bool = False
    num_processes: int = 1
    process_index: int = 0
    split_batches: bool = False

    def __post_init__(self) -> None:
        if self.split_batches:
            check_divisible(self.batch_size, self.num_processes, type(self.dataset).__name__)
        self.epoch = 0
        self.remainder = -1

    @property
    def _samples_each(self) -> int:
        batch_size = self.batch_size or 1
        return batch_size // self.num_processes if self.split_batches else batch_size

    def set_epoch(self, epoch: int) -> None:
        """Tell the dataset which epoch is read next."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        num_rounds = len(cast("Sized", self.dataset)) / (self._samples_each * self.num_processes)
        whole_rounds = math.floor(num_rounds) if self.drop_last else math.ceil(num_rounds)
        return whole_rounds * self._samples_each

    def __iter__(self) -> Iterator[Any]:
        self.remainder = -1
        generator = getattr(self.dataset, "generator", None)
        # Every process must read the same samples in the same order, or shares would overlap.
        if isinstance(generator, torch.Generator) and not hasattr(self.dataset, "set_epoch"):
            generator.manual_seed(self.epoch)
        round_size = self._samples_each * self.num_processes
        first_own = self.process_index * self._samples_each
        own_slice = slice(first_own, first_own + self._samples_each)
        first_round: list[Any] = []
        current_round: list[Any] = []
        for sample in self.dataset:
            current_round.append(sample)
            if len(current_round) == round_size:
                yield from current_round[own_slice]
                first_round = first_round or current_round
                current_round = []
        self.remainder = len(current_round)
        if current_round and not self.drop_last:
            # An epoch shorter than one round is completed from itself.
            endless = itertools.cycle(first_round or current_round)
            filled_round = itertools.chain(current_round, endless)
            yield from list(itertools.islice(filled_round, round_size))[own_slice]
