"""``PreparedLoader``: a data loader that knows its last batch, its place and its position.

It is a real ``torch.utils.data.DataLoader`` around another one, the `base`, which reads. An
iteration of it is one generator: whoever leaves early, by ``break``, by an exception or by
dropping the iterator, closes the generator, and nothing stays behind.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from nbaccel.abc.place import Place
from nbaccel.train import rng
from nbaccel.train.collectives import Collectives
from nbaccel.train.gradient import GradientState
from nbaccel.train.position import Position
from nbaccel.train.sampling import (
    BatchSamplerShard,
    IterableDatasetShard,
    SeedableRandomSampler,
    SkipBatchSampler,
)
from nbaccel.train.trees import leaves, map_tensors, send_to_device

__all__ = ["LoaderSettings", "PreparedLoader", "chain_of_samplers"]

_END: Any = object()


@dataclass(frozen=True, kw_only=True)
class LoaderSettings:
    """What a prepared loader was told.

    Attributes:
        place: This process among the others.
        collectives: What the processes do together.
        device: Where batches are put; None leaves them where they are.
        non_blocking: Whether copies to the device may still be under way.
        rng_types: Random generators that all processes take from process 0 at each epoch.
        synchronized: What ``generator`` stands for in them.
        batch_size: Samples of one batch of this process; None where it is not known.
        total_batch_size: The same of all processes together.
        drop_last: Whether a last batch that is not full is dropped.
        split_batches: Whether batches of the base are split over the processes.
        skip_batches: Batches that are left out at the beginning of an epoch.
        stateful: Whether the base can tell its state (torchdata's).
        dispatches: Whether process 0 reads for all, where there are others.
    """

    place: Place
    collectives: Collectives
    device: torch.device | None = None
    non_blocking: bool = False
    rng_types: tuple[str, ...] = ()
    synchronized: torch.Generator | None = None
    batch_size: int | None = None
    total_batch_size: int | None = None
    drop_last: bool = False
    split_batches: bool = False
    skip_batches: int = 0
    stateful: bool = False
    dispatches: bool = False

    def skipping(self, more: int) -> LoaderSettings:
        """The same with so many more batches left out."""
        return replace(self, skip_batches=self.skip_batches + more)


class PreparedLoader(DataLoader[Any]):
    """A loader that gives this process its share, on its device.

    What it does not have itself is read from the base: `dataset`, `sampler`, `num_workers`, ….

    Args:
        base: The torch loader that reads this process's share.
        gradient_state: What is told which loader runs.
        settings: How it shares with the other processes.
        position: The epoch and batch it is at; shared with loaders that skip some of its batches.
        drop: Batches of the base to read and throw away at the beginning of an epoch, where
            nothing less can be done to skip them.

    Attributes:
        base: As given.
        gradient_state: As given.
        settings: As given.
        position: As given.
        end_of_dataloader: True while the last batch is in the loop's body.
        remainder: Samples of the last total batch that are no copies; 0 where it was full, -1
            where that is not known (yet).
    """

    def __init__(
        self,
        base: DataLoader[Any],
        gradient_state: GradientState,
        settings: LoaderSettings,
        position: Position | None = None,
        *,
        drop: int = 0,
    ) -> None:
        # No super().__init__(): it would make samplers of its own, and everything is the base's.
        self.base = base
        self.gradient_state = gradient_state
        self.settings = settings
        self.position = position or Position(_generators(base))
        self.end_of_dataloader = False
        self.remainder = -1
        self._drop = drop
        self._base_state: dict[str, Any] | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "base" or name.startswith("__"):  # while being unpickled, the base comes later
            raise AttributeError(f"{type(self).__name__} has no {name} yet")
        return getattr(self.base, name)

    @property  # type: ignore[misc]
    def multiprocessing_context(self) -> Any:
        """As the base's: how worker processes are started."""
        return self.base.multiprocessing_context

    @property
    def sampler(self) -> Any:  # type: ignore[override]
        """What draws the indices; torch forgets it where it is given a batch sampler."""
        *_, last = chain_of_samplers(self.base)
        return self.base.sampler if isinstance(last, BatchSampler) else last

    @property
    def batch_size(self) -> int | None:  # type: ignore[override]
        """Samples of one batch of this process; None where it is not known."""
        return self.settings.batch_size

    @property
    def drop_last(self) -> bool:  # type: ignore[override]
        """Whether a last batch that is not full is dropped."""
        return self.settings.drop_last

    @property
    def device(self) -> torch.device | None:
        """Where batches are put; None where they stay as they were read."""
        return self.settings.device

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether it goes on in the middle of an epoch by itself, after `load_state_dict`."""
        return self.settings.stateful

    @property
    def total_batch_size(self) -> int | None:
        """Samples of one batch of all processes together; None where it is not known."""
        return self.settings.total_batch_size

    @property
    def total_dataset_length(self) -> int:
        """Samples of the dataset, whatever this process's share is."""
        dataset: Any = self.dataset
        if isinstance(dataset, IterableDatasetShard):
            dataset = dataset.dataset
        return int(dataset.total_length if hasattr(dataset, "total_length") else len(dataset))

    @property
    def iteration(self) -> int:
        """Epochs that were iterated to their end; also the number of the running one, from 0."""
        return self.position.epoch

    @iteration.setter
    def iteration(self, epoch: int) -> None:
        self.position.move_to(epoch)

    @property
    def batches_seen(self) -> int:
        """Batches of the running epoch that were given out; of a restored one, until it goes on."""
        return self.position.batches_seen

    @property
    def even_batches(self) -> bool:
        """Whether the last round is completed from the beginning; may be changed for a while."""
        return all(shard.even_batches for shard in self._shards())

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        for shard in self._shards():
            shard.even_batches = even

    def _shards(self) -> list[BatchSamplerShard]:
        return [s for s in chain_of_samplers(self.base) if isinstance(s, BatchSamplerShard)]

    def __len__(self) -> int:
        return max(0, len(self.base) - self._drop)

    def set_epoch(self, epoch: int) -> None:
        """Tell samplers and dataset which epoch is read next.

        Args:
            epoch: Its number, from 0. It is counted on from there.
        """
        self.position.move_to(epoch)
        for owner in (*chain_of_samplers(self.base), self.dataset):
            if hasattr(owner, "set_epoch"):
                owner.set_epoch(epoch)

    # ------------------------------------------------------------------------- iteration

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        before = self.end_of_dataloader
        self.gradient_state.enter(self)
        try:
            yield from self._epoch()
        finally:
            self.gradient_state.leave(self)
            self.end_of_dataloader = before

    def _epoch(self) -> Iterator[Any]:
        position, settings = self.position, self.settings
        source, current = self._begin()
        seen = position.batches_seen
        must_move = self._must_move(current)
        while current is not _END:
            if must_move:
                current = send_to_device(
                    current, settings.device or "cpu", non_blocking=settings.non_blocking
                )
            if settings.stateful:
                self._base_state = self._snapshot()
            position.ahead = torch.get_rng_state()
            upcoming = next(source, _END)
            if upcoming is _END:
                self.end_of_dataloader = True
                self._settle_remainder()
            seen += 1
            position.batches_seen = seen
            yield current
            current = upcoming
        position.advance()
        self._base_state = None

    def _begin(self) -> tuple[Iterator[Any], Any]:
        """Make the epoch's iterator and read its first batch. See [Note: the same order again]."""
        self.end_of_dataloader = False
        self.remainder = self._expected_remainder()
        position, settings = self.position, self.settings
        resumes = position.restored is not None
        with rng.preserved() if resumes else contextlib.nullcontext():
            self._match_workers()
            restored = position.put_back() or {"base": None, "ahead": None}
            self._synchronize_generators()
            self.set_epoch(position.epoch)
            goes_on = settings.stateful and not settings.skip_batches and resumes
            skipped = restored["batches_seen"] if goes_on else settings.skip_batches
            position.begin(skipped)
            if goes_on and restored["base"] is not None:
                self.base.load_state_dict(restored["base"])  # type: ignore[attr-defined]
            source = self._open(draws_now=resumes)
            for _ in range(self._drop):
                if next(source, _END) is _END:
                    return source, _END
            if restored["ahead"] is not None:
                torch.set_rng_state(restored["ahead"])
            return source, next(source, _END)

    def _match_workers(self) -> None:
        """Let persistent workers wait exactly if they would in the unbroken run.

        Torch draws a seed for new ones, from what the order is drawn from.
        """
        if not self.base.persistent_workers:
            return
        if not self.position.has_begun:
            self.base._iterator = None
        elif self.base._iterator is None:
            with self.position.undisturbed():
                iter(self.base)

    def _snapshot(self) -> dict[str, Any] | None:
        return self.base.state_dict()  # type: ignore[attr-defined,no-any-return]

    def _open(self, *, draws_now: bool) -> Iterator[Any]:
        """Begin to read.

        Args:
            draws_now: Whether the sampler must draw the epoch's order before anything is read.
        """
        return self._open_base(draws_now=draws_now)

    def _open_base(self, *, draws_now: bool) -> Iterator[Any]:
        source: Any = iter(self.base)
        # A sampler draws when it is first asked. Torch's iterator keeps it in a private attribute;
        # with worker processes it has asked already, and torchdata's samplers draw at once.
        indices: Any = getattr(source, "_sampler_iter", None)
        if draws_now and not self.num_workers and not hasattr(indices, "state_dict"):
            source._sampler_iter = itertools.chain(list(itertools.islice(indices, 1)), indices)
        return source  # type: ignore[no-any-return]

    def _synchronize_generators(self) -> None:
        settings = self.settings
        if settings.rng_types and not settings.place.is_alone:
            rng.synchronize_rng_states(
                settings.rng_types, settings.synchronized, settings.collectives
            )

    def _must_move(self, batch: Any) -> bool:
        """Whether batches come from elsewhere; one is looked at, they are all made alike."""
        device = self.settings.device
        if device is None or batch is _END:
            return False
        if device.type != "cpu":
            return True
        return any(isinstance(x, torch.Tensor) and x.device.type != "cpu" for x in leaves(batch))

    def _expected_remainder(self) -> int:
        """What is known before the epoch is through."""
        total = self.settings.total_batch_size
        *_, sampler = [None, *chain_of_samplers(self.base)]
        is_shared = self.settings.place.is_alone or bool(self._shards())
        if self.settings.drop_last or not total or not is_shared or not hasattr(sampler, "__len__"):
            return -1
        return len(sampler) % total if _has_plain_batches(self.base) else -1

    def _settle_remainder(self) -> None:
        """The last batch is at hand, so what was counted on the way is complete."""
        if self.remainder >= 0 or self.settings.drop_last:
            return
        counters: list[Any] = list(self._shards())
        # Worker processes read copies of the dataset, whose counts stay there.
        if isinstance(self.dataset, IterableDatasetShard) and not self.num_workers:
            counters += [self.dataset] if self.settings.batch_size else []
        for counter in counters:
            self.remainder = counter.remainder

    # ------------------------------------------------------------------------- position

    def state_dict(self) -> dict[str, Any]:
        """Where it is: epoch, batches seen, and what the epoch's order was drawn from.

        Returns:
            Numbers, text and tensors in plain containers.
        """
        stateful = self.settings.stateful
        state = self.position.state_dict(is_through=stateful and self.end_of_dataloader)
        state["seeds"] = [sampler.initial_seed for sampler in self._seeded()]
        state["base"] = self._base_state if state["start"] is not None else None
        return state

    def check_state_dict(self, state: Any) -> None:
        """Refuse a state that :meth:`load_state_dict` would refuse; nothing is changed.

        Raises:
            ConfigError: It is something else.
        """
        self.position.check(state)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go back to where another run was.

        The next iteration repeats the interrupted epoch's order: from its beginning, so that
        `skip_first_batches` leaves out what was done, or with torchdata's loader from the middle.

        Args:
            state_dict: What :meth:`state_dict` gave.

        Raises:
            ConfigError: It is something else.
        """
        # Random states live on the host, wherever the checkpoint was read to.
        state = map_tensors(torch.Tensor.cpu, dict(state_dict))
        self.position.load_state_dict(state)
        self._base_state = state.get("base")
        for sampler, seed in zip(self._seeded(), state.get("seeds", ()), strict=False):
            sampler.initial_seed = seed

    def _seeded(self) -> list[SeedableRandomSampler]:
        return [s for s in chain_of_samplers(self.base) if isinstance(s, SeedableRandomSampler)]


def chain_of_samplers(loader: DataLoader[Any]) -> list[Any]:
    """What draws a loader's indices: its batch sampler, and what that one draws from in turn."""
    found: list[Any] = []
    current: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    while current is not None and not any(current is known for known in found):
        found.append(current)
        inner = getattr(current, "batch_sampler", None)
        current = getattr(current, "sampler", None) if inner is None else inner
    return found


def _has_plain_batches(loader: DataLoader[Any]) -> bool:
    """Whether every sample drawn is in one batch; a batch sampler of the user's own may differ."""
    ours = (BatchSamplerShard, SkipBatchSampler)
    makers = [s for s in chain_of_samplers(loader) if isinstance(s, BatchSampler)]
    own = [type(maker) for maker in makers if not isinstance(maker, ours)]
    return all(c is BatchSampler or c.__module__.startswith("torchdata.") for c in own)


def _generators(loader: DataLoader[Any]) -> dict[str, torch.Generator]:
    """What draws a loader's order, by who has it."""
    dataset: Any = loader.dataset
    owners = {
        "loader": loader,
        "sampler": [None, *chain_of_samplers(loader)][-1],
        "dataset": dataset.dataset if isinstance(dataset, IterableDatasetShard) else dataset,
    }
    found = {name: getattr(owner, "generator", None) for name, owner in owners.items()}
    return {name: g for name, g in found.items() if isinstance(g, torch.Generator)}
