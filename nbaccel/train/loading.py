"""From a user's data loader to a prepared one: who reads what, and in which order.

Orders are those of Accelerate for the same ``torch.manual_seed``: as many numbers are drawn from
torch's generator, at the same moments. One when a loader with a generator-less sampler is prepared
for several processes; then one per epoch for its workers; one more where the sampler seeds itself.
"""

from __future__ import annotations

import copy
import importlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
)

from nbaccel import _optional
from nbaccel.abc.place import Place
from nbaccel.config.handlers import DataLoaderConfiguration
from nbaccel.errors import ConfigError
from nbaccel.train.collectives import Collectives
from nbaccel.train.dispatch import DispatchLoader, SliceFn
from nbaccel.train.gradient import GradientState
from nbaccel.train.loader import LoaderSettings, PreparedLoader, chain_of_samplers
from nbaccel.train.sampling import (
    BatchSamplerShard,
    IterableDatasetShard,
    SeedableRandomSampler,
    SkipBatchSampler,
    check_divisible,
)

__all__ = ["prepare_data_loader", "skip_first_batches"]

_Loader = TypeVar("_Loader", bound=PreparedLoader)

# What makes a loader, beside what says which samples are in a batch.
_OPTIONS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)


def prepare_data_loader(
    loader: DataLoader[Any],
    place: Place,
    gradient_state: GradientState,
    settings: DataLoaderConfiguration,
    collectives: Collectives,
    *,
    put_on_device: bool = True,
    rng_types: Sequence[str] | None = ("generator",),
    slice_fn: SliceFn | None = None,
) -> PreparedLoader:
    """Let every process of the run get its share of a loader's batches.

    Args:
        loader: A torch loader; a prepared one is returned as it is.
        place: This process among the others.
        gradient_state: What is told which loader runs.
        settings: How batches are shared.
        collectives: What the processes do together.
        put_on_device: Whether batches are moved to the place's device.
        rng_types: Random generators that all processes take from process 0 at each epoch; of
            ``torch``, ``cuda``, ``python``, ``numpy`` and ``generator``, which is the sampler's.
        slice_fn: How a process takes its rows of a dispatched batch.

    Returns:
        The prepared loader; the one given may still be used.

    Raises:
        ConfigError: Settings that this loader cannot be shared by.
        MissingBackend: torchdata is asked for and not installed.
    """
    if isinstance(loader, PreparedLoader):
        return loader
    return _Preparation(
        loader, place, gradient_state, settings, collectives, put_on_device, tuple(rng_types or ())
    ).run(slice_fn)


class _Preparation:
    """One call of `prepare_data_loader`."""

    def __init__(
        self,
        loader: DataLoader[Any],
        place: Place,
        gradient_state: GradientState,
        settings: DataLoaderConfiguration,
        collectives: Collectives,
        put_on_device: bool,
        rng_types: tuple[str, ...],
    ) -> None:
        self.loader = loader
        self.place = place
        self.gradient_state = gradient_state
        self.settings = settings
        self.collectives = collectives
        self.put_on_device = put_on_device
        self.rng_types = rng_types
        self.is_iterable = isinstance(loader.dataset, IterableDataset)
        self.stateful = settings.use_stateful_dataloader or hasattr(loader, "state_dict")
        self.dispatches = self._dispatches()
        self.synchronized: torch.Generator | None = None

    def run(self, slice_fn: SliceFn | None) -> PreparedLoader:
        self._check()
        self._use_seedable_sampler()
        if not self.place.is_alone and self.dispatches:
            base = _rebuilt(self.loader, stateful=self.stateful, generator=None)
            told = self._told(rng_types=())
            dispatching: type[DispatchLoader] = _kind(DispatchLoader, self.stateful)
            return dispatching(base, self.gradient_state, told, slice_fn=slice_fn)
        base = self._alone() if self.place.is_alone else self._share()
        wanted = [kind for kind in self.rng_types if kind != "generator" or self.synchronized]
        kind = _kind(PreparedLoader, self.stateful)
        return kind(base, self.gradient_state, self._told(rng_types=tuple(wanted)))

    def _dispatches(self) -> bool:
        asked = self.settings.dispatch_batches
        if asked and not self.put_on_device:
            raise ConfigError(
                f"DataLoaderConfiguration(dispatch_batches={asked!r}) needs device placement, "
                "which is off for this loader. Process 0 sends batches from device to device. "
                "Leave device_placement on, or give dispatch_batches=False."
            )
        return self.is_iterable and self.put_on_device if asked is None else asked

    def _check(self) -> None:
        name, size = type(self.loader).__name__, _batch_size(self.loader)
        if self.settings.split_batches:
            check_divisible(size, self.place.world_size, name)
        if self._must_rebuild() and _reads_its_own_way(self.loader):
            raise ConfigError(
                f"{type(self.loader).__qualname__} reads its dataset in its own way (it overrides "
                "__iter__), which would be lost when it is rebuilt to share out batches between "
                f"{self.place.world_size} processes. Give a torch DataLoader with the sampler and "
                "collate_fn you need, or share out the samples yourself and do not prepare it."
            )
        if self.stateful:
            _stateful_class()

    def _must_rebuild(self) -> bool:
        becomes_stateful = self.stateful and not hasattr(self.loader, "state_dict")
        return not self.place.is_alone or becomes_stateful or self._must_reseed()

    def _must_reseed(self) -> bool:
        *_, sampler = [None, *chain_of_samplers(self.loader)]
        return self.settings.use_seedable_sampler and isinstance(sampler, RandomSampler)

    def _told(self, *, rng_types: tuple[str, ...]) -> LoaderSettings:
        size, split = _batch_size(self.loader), self.settings.split_batches
        world = self.place.world_size
        return LoaderSettings(
            place=self.place,
            collectives=self.collectives,
            device=self.place.device if self.put_on_device else None,
            non_blocking=self.settings.non_blocking,
            rng_types=rng_types,
            synchronized=self.synchronized,
            batch_size=size // world if size and split else size,
            total_batch_size=size * world if size and not split else size,
            drop_last=bool(getattr(_batches(self.loader), "drop_last", False)),
            split_batches=split,
            stateful=self.stateful,
            dispatches=self.dispatches,
        )

    # --------------------------------------------------------------------- who reads what

    def _alone(self) -> DataLoader[Any]:
        """All of it. The user's own loader reads, unless something about it must change."""
        # Accelerate's dispatcher drops the generator; the order of later epochs depends on it.
        loses_generator = self.dispatches and self.loader.generator is not None
        if self._must_rebuild() or (loses_generator and not _reads_its_own_way(self.loader)):
            options = {"generator": None} if loses_generator else {}
            return _rebuilt(self.loader, stateful=self.stateful, **options)
        return self.loader

    def _share(self) -> DataLoader[Any]:
        """This process's share, which it reads itself."""
        if self.is_iterable:
            return self._iterable_share()
        sampler = chain_of_samplers(self.loader)[-1]
        if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
            return _rebuilt(self.loader, stateful=self.stateful)  # its indices are a share already
        self._give_generator(sampler)
        shard = BatchSamplerShard(
            _batches(self.loader),
            self.place.world_size,
            self.place.rank,
            self.settings.split_batches,
            self.settings.even_batches,
        )
        return _rebuilt(self.loader, stateful=self.stateful, batches=shard)

    def _give_generator(self, sampler: Any) -> None:
        """Let the sampler draw from a generator of its own, which can be kept equal everywhere."""
        if isinstance(sampler, SeedableRandomSampler) or not hasattr(sampler, "generator"):
            return
        if sampler.generator is None:
            seed = int(torch.empty((), dtype=torch.int64).random_().item())
            sampler.generator = torch.Generator().manual_seed(seed)
        self.synchronized = sampler.generator

    def _iterable_share(self) -> DataLoader[Any]:
        dataset: Any = self.loader.dataset
        world, rank, split = self.place.world_size, self.place.rank, self.settings.split_batches
        pieces = getattr(dataset, "num_shards", None) or getattr(dataset, "n_shards", None)
        if hasattr(dataset, "shard") and isinstance(pieces, int) and pieces >= world and not split:
            dataset = dataset.shard(num_shards=world, index=rank)
        else:
            self.synchronized = getattr(dataset, "generator", None)
            size, drop = self.loader.batch_size, self.loader.drop_last
            dataset = IterableDatasetShard(dataset, size, drop, world, rank, split)
        size = self.loader.batch_size
        options = {"batch_size": size // world} if size and split else {}
        return _rebuilt(self.loader, stateful=self.stateful, dataset=dataset, **options)

    def _use_seedable_sampler(self) -> None:
        """Replace a shuffling sampler by one that depends on seed and epoch alone."""
        if not self._must_reseed():
            return
        *batch_samplers, old = chain_of_samplers(self.loader)
        # Differently seeded processes would draw overlapping samples: process 0 decides.
        seed = torch.initial_seed() if self.settings.data_seed is None else self.settings.data_seed
        batches: Any = SeedableRandomSampler(
            old.data_source,
            old.replacement,
            old._num_samples,  # the number asked for; `num_samples` fills in the length
            old.generator,
            data_seed=self.collectives.broadcast_object(seed),
        )
        for outer in reversed(batch_samplers):
            name = "batch_sampler" if hasattr(outer, "batch_sampler") else "sampler"
            inner, batches = batches, copy.copy(outer)  # the user's loader keeps its own
            setattr(batches, name, inner)
        self.loader = _rebuilt(
            self.loader, stateful=hasattr(self.loader, "state_dict"), batches=batches
        )


# ------------------------------------------------------------------------- skipping


def skip_first_batches(
    dataloader: DataLoader[Any], num_batches: int | None = None
) -> DataLoader[Any]:
    """A loader that leaves out the first batches of an epoch; the one given stays as it is.

    Samples that are chosen by index are not read. The two loaders of a prepared one count epochs
    together: when the skipping one is through, the other goes on with the next epoch.

    Args:
        dataloader: A prepared loader, or any torch loader.
        num_batches: How many batches of this process to leave out; None, for a prepared loader,
            as many as it had seen when its state was saved.

    Returns:
        The skipping loader, of the same kind.

    Raises:
        ConfigError: The number is negative, or missing for a loader that keeps no position.
    """
    if num_batches is None and isinstance(dataloader, PreparedLoader):
        num_batches = dataloader.batches_seen if dataloader.position.is_within_epoch else 0
    if num_batches is None or num_batches < 0:
        raise ConfigError(
            f"skip_first_batches({type(dataloader).__name__}, num_batches={num_batches!r}) does "
            "not say how many to leave out: training would begin at the wrong batch. Give a number "
            "from 0 on; only a prepared loader knows it by itself."
        )
    if isinstance(dataloader, PreparedLoader):
        return _skipping(dataloader, num_batches)
    if isinstance(dataloader.dataset, IterableDataset):
        return _Dropping(dataloader, num_batches)
    batches = SkipBatchSampler(_batches(dataloader), num_batches)
    return _rebuilt(dataloader, stateful=hasattr(dataloader, "state_dict"), batches=batches)


def _skipping(loader: PreparedLoader, num_batches: int) -> PreparedLoader:
    settings = loader.settings.skipping(num_batches)
    base, drop = loader.base, loader._drop
    if isinstance(loader.dataset, IterableDataset) or _reads_its_own_way(base):
        drop += num_batches
    else:
        whole = isinstance(loader, DispatchLoader) and not settings.split_batches
        each = settings.place.world_size if whole else 1
        batches = SkipBatchSampler(_batches(base), num_batches * each)
        base = _rebuilt(base, stateful=settings.stateful, batches=batches)
    given = (base, loader.gradient_state, settings, loader.position)
    if isinstance(loader, DispatchLoader):
        dispatching: type[DispatchLoader] = _kind(DispatchLoader, settings.stateful)
        return dispatching(*given, drop=drop, slice_fn=loader.slice_fn)
    return _kind(PreparedLoader, settings.stateful)(*given, drop=drop)


class _Dropping(DataLoader[Any]):
    """A torch loader of an iterable dataset whose first batches are read and thrown away."""

    def __init__(self, loader: DataLoader[Any], num_batches: int) -> None:
        super().__init__(loader.dataset, **_sizes(loader), **_options(loader))
        self._num_batches = num_batches

    def __len__(self) -> int:
        return max(0, super().__len__() - self._num_batches)

    def __iter__(self) -> Any:
        return itertools.islice(super().__iter__(), self._num_batches, None)


# ------------------------------------------------------------------------- parts of a loader


def _batches(loader: DataLoader[Any]) -> Any:
    """What yields the indices of each batch, whichever argument it was given by."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def _batch_size(loader: DataLoader[Any]) -> int | None:
    if isinstance(loader.dataset, IterableDataset):
        return loader.batch_size
    size = getattr(_batches(loader), "batch_size", None)
    return size if isinstance(size, int) else loader.batch_size


def _reads_its_own_way(loader: DataLoader[Any]) -> bool:
    """Whether the loader's class changes how a torch loader iterates."""
    home = next(c for c in type(loader).__mro__ if "__iter__" in vars(c))
    return home is not DataLoader and not home.__module__.startswith("torchdata.")


def _rebuilt(
    loader: DataLoader[Any],
    *,
    stateful: bool,
    dataset: Any = None,
    batches: Any = None,
    **changes: Any,
) -> DataLoader[Any]:
    """A new torch loader like another one, but for what is given."""
    make: Callable[..., DataLoader[Any]] = _stateful_class() if stateful else DataLoader
    dataset = loader.dataset if dataset is None else dataset
    options = _options(loader)
    if hasattr(loader, "snapshot_every_n_steps") and stateful:
        options["snapshot_every_n_steps"] = loader.snapshot_every_n_steps
    if isinstance(dataset, IterableDataset):
        return make(dataset, **{**_sizes(loader), **options, **changes})
    batches = _batches(loader) if batches is None else batches
    if loader.batch_sampler is None:
        # Without automatic batching: each index (or list of them) is asked of the dataset at once.
        return make(dataset, sampler=batches, batch_size=None, **{**options, **changes})
    return make(dataset, batch_sampler=batches, **{**options, **changes})


def _options(loader: DataLoader[Any]) -> dict[str, Any]:
    return {name: getattr(loader, name) for name in _OPTIONS if hasattr(loader, name)}


def _sizes(loader: DataLoader[Any]) -> dict[str, Any]:
    return {"batch_size": loader.batch_size, "drop_last": loader.drop_last}


def _kind(plain: type[_Loader], stateful: bool) -> type[_Loader]:
    """A class of prepared loaders; one that is also torchdata's where the base is."""
    if not stateful:
        return plain
    module = importlib.import_module("nbaccel.train.stateful")  # it imports torchdata
    return cast("type[_Loader]", module.KINDS[plain])


def _stateful_class() -> Any:
    module = _optional.require(
        "torchdata.stateful_dataloader",
        extra="stateful",
        why="DataLoaderConfiguration(use_stateful_dataloader=True)",
    )
    return module.StatefulDataLoader
