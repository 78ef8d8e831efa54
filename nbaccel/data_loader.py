"""From a user's data loader to a prepared one: who reads what, and in which order.

Orders are those of Accelerate for the same ``torch.manual_seed``: as many numbers are drawn from
torch's generator, at the same moments. One when a loader with a generator-less sampler is prepared
for several processes; then one per epoch for its workers; one more where the sampler seeds itself.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler

from nbaccel.base import torch_private
from nbaccel.base.errors import ConfigError
from nbaccel.config.handlers import DataLoaderConfiguration
from nbaccel.plan import registry
from nbaccel.plan.contracts.training import Place
from nbaccel.train import distributed
from nbaccel.train.collectives import Collectives
from nbaccel.train.dispatch import DataLoaderDispatcher, SliceFn, loader_class
from nbaccel.train.gradient import GradientState
from nbaccel.train.loader import (
    DataLoaderShard,
    LoaderSettings,
    PreparedLoader,
    SkipDataLoader,
    chain_of_samplers,
    reading_class,
    refuse_mesh,
)
from nbaccel.train.sampling import (
    BatchSamplerShard,
    IterableDatasetShard,
    SeedableRandomSampler,
    SkipBatchSampler,
    check_divisible,
)

__all__ = [
    "BatchSamplerShard",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "IterableDatasetShard",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "SkipDataLoader",
    "prepare_data_loader",
    "skip_first_batches",
]


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Sequence[Any] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: SliceFn | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
) -> PreparedLoader:
    """Give this process its share of a loader, without an `Accelerator`.

    Args:
        dataloader: A torch loader; a prepared one is returned as it is.
        device: Where batches are put; None for this process's device.
        num_processes: Among how many it is shared; None for those of the run.
        process_index: Whose share; None for this process's.
        split_batches: Cut each batch into one slice per process.
        put_on_device: Whether batches are moved to the device.
        rng_types: Random generators that all processes take from process 0 at each epoch.
        dispatch_batches: Whether process 0 reads for all; None: iterable datasets put on a device.
        even_batches: Complete the last round from the beginning.
        slice_fn_for_dispatch: How a process takes its rows of a dispatched batch.
        use_seedable_sampler: Shuffle by seed and epoch alone.
        data_seed: That seed.
        non_blocking: Whether copies to the device may still be under way.
        use_stateful_dataloader: Read with torchdata's loader.
        torch_device_mesh: None: batches are not shared out by a mesh here.

    Returns:
        The prepared loader; the one given may still be used.

    Raises:
        ConfigError: Settings that this loader cannot be shared by, or a mesh.
        MissingBackend: torchdata is asked for and not installed.
    """
    given = locals()
    refuse_mesh(prepare_data_loader, torch_device_mesh)
    process_place = distributed.init_process()
    sharing_place = replace(
        process_place,
        rank=process_place.rank if process_index is None else process_index,
        world_size=process_place.world_size if num_processes is None else num_processes,
        device=process_place.device if device is None else torch.device(device),
        device_row="",
    )
    return share_data_loader(
        dataloader,
        sharing_place,
        GradientState(),
        DataLoaderConfiguration(**{f.name: given[f.name] for f in fields(DataLoaderConfiguration)}),
        Collectives(process_place, distributed.timeout_s(None)),
        put_on_device=put_on_device,
        rng_types=[str(rng_type) for rng_type in rng_types or ()],
        slice_fn=slice_fn_for_dispatch,
    )


# A loader's arguments, without those that say which samples are in a batch.
_LOADER_OPTIONS = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn"),
    *("multiprocessing_context", "generator", "prefetch_factor", "persistent_workers"),
    *("pin_memory_device", "in_order"),
)


def share_data_loader(
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
    """Let every process of the run get its share of a loader's batches."""
    if isinstance(loader, PreparedLoader):
        if loader.is_for(place) or loader.prepared_from is None:
            return loader
        # Prepared in the notebook, and now read by the ranks of a launch.
        loader = loader.prepared_from
    prepared_loader = _LoaderPreparation(
        loader, place, gradient_state, settings, collectives, put_on_device, tuple(rng_types or ())
    ).run(slice_fn)
    prepared_loader.prepared_from = loader
    return prepared_loader


@dataclass
class _LoaderPreparation:
    """One call of `share_data_loader`."""

    loader: DataLoader[Any]
    place: Place
    gradient_state: GradientState
    settings: DataLoaderConfiguration
    collectives: Collectives
    put_on_device: bool
    rng_types: tuple[str, ...]
    synchronized: torch.Generator | None = None

    def __post_init__(self) -> None:
        self.is_iterable = isinstance(self.loader.dataset, IterableDataset)
        self.stateful = self.settings.use_stateful_dataloader or hasattr(self.loader, "state_dict")
        wants_dispatch = self.settings.dispatch_batches
        if wants_dispatch and not self.put_on_device:
            raise ConfigError(
                f"DataLoaderConfiguration(dispatch_batches={wants_dispatch!r}) needs device "
                "placement, which is off for this loader. Process 0 sends batches from device "
                "to device. Leave device_placement on, or give dispatch_batches=False."
            )
        self.dispatches = self.is_iterable and self.put_on_device
        if wants_dispatch is not None:
            self.dispatches = wants_dispatch

    def run(self, slice_fn: SliceFn | None) -> PreparedLoader:
        self._check_loader()
        self._use_seedable_sampler()
        if not self.place.is_alone and self.dispatches:
            # Accelerate's dispatcher drops it, too; the order of later epochs depends on it.
            base_loader = _rebuild_loader(self.loader, stateful=self.stateful, generator=None)
            self.rng_types = ()  # process 0 alone draws
        else:
            base_loader = self._whole_loader() if self.place.is_alone else self._own_share()
        # Without a sampler's generator there is none of that name, which `rng` would refuse.
        rng_types = [name for name in self.rng_types if name != "generator" or self.synchronized]
        copies_ahead = registry.device_runtime(self.place.device_name).copies_without_blocking
        settings = LoaderSettings(
            place=self.place,
            collectives=self.collectives,
            device=self.place.device if self.put_on_device else None,
            non_blocking=self.settings.non_blocking and copies_ahead,
            rng_types=tuple(rng_types),
            synchronized=self.synchronized,
            base_batch_size=_loader_batch_size(self.loader),
            num_sharing=self.place.world_size,
            drop_last=bool(getattr(_index_batches(self.loader), "drop_last", False)),
            split_batches=self.settings.split_batches,
            stateful=self.stateful,
        )
        own_class = loader_class(dispatches=self.dispatches, stateful=self.stateful)
        prepared_loader = own_class.around(base_loader, self.gradient_state, settings)
        if isinstance(prepared_loader, DataLoaderDispatcher):
            prepared_loader.slice_fn = slice_fn
        return prepared_loader

    def _check_loader(self) -> None:
        name = type(self.loader).__name__
        if self.settings.split_batches:
            check_divisible(_loader_batch_size(self.loader), self.place.world_size, name)
        if self._must_rebuild() and _overrides_iteration(self.loader):
            raise ConfigError(
                f"{type(self.loader).__qualname__} reads its dataset in its own way (it overrides "
                "__iter__), which would be lost when it is rebuilt to share out batches between "
                f"{self.place.world_size} processes. Give a torch DataLoader with the sampler and "
                "collate_fn you need, or share out the samples yourself and do not prepare it."
            )
        if self.stateful:
            # Called for its MissingBackend, before anything of the loader is rebuilt.
            reading_class(True)

    def _must_rebuild(self) -> bool:
        becomes_stateful = self.stateful and not hasattr(self.loader, "state_dict")
        return not self.place.is_alone or becomes_stateful or self._must_reseed()

    def _must_reseed(self) -> bool:
        *_, sampler = [None, *chain_of_samplers(self.loader)]
        return self.settings.use_seedable_sampler and isinstance(sampler, RandomSampler)

    def _whole_loader(self) -> DataLoader[Any]:
        """All of it. The user's own loader reads, unless something about it must change."""
        # Accelerate's dispatcher drops the generator; the order of later epochs depends on it.
        loses_generator = self.dispatches and self.loader.generator is not None
        if self._must_rebuild() or (loses_generator and not _overrides_iteration(self.loader)):
            options = {"generator": None} if loses_generator else {}
            return _rebuild_loader(self.loader, stateful=self.stateful, **options)
        return self.loader

    def _own_share(self) -> DataLoader[Any]:
        if self.is_iterable:
            return self._iterable_share()
        sampler = chain_of_samplers(self.loader)[-1]
        if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
            # Its indices are already this process's share; cutting them again would lose samples.
            return _rebuild_loader(self.loader, stateful=self.stateful)
        if hasattr(sampler, "generator") and not isinstance(sampler, SeedableRandomSampler):
            # Of its own, which can be kept equal everywhere.
            if sampler.generator is None:
                # The same draw from the same generator as in Accelerate, so that orders stay equal.
                seed = int(torch.empty((), dtype=torch.int64).random_().item())
                sampler.generator = torch.Generator().manual_seed(seed)
            self.synchronized = sampler.generator
        batches = _index_batches(self.loader)
        place, settings = self.place, self.settings
        shard = BatchSamplerShard(
            batches, place.world_size, place.rank, settings.split_batches, settings.even_batches
        )
        return _rebuild_loader(self.loader, stateful=self.stateful, index_batches=shard)

    def _iterable_share(self) -> DataLoader[Any]:
        dataset: Any = self.loader.dataset
        world_size, rank = self.place.world_size, self.place.rank
        split_batches = self.settings.split_batches
        batch_size = self.loader.batch_size
        num_shards = getattr(dataset, "num_shards", None) or getattr(dataset, "n_shards", None)
        if (
            hasattr(dataset, "shard")
            and isinstance(num_shards, int)
            # With fewer, some would have no batches, and the others would wait for them for ever.
            and num_shards >= world_size
            and not split_batches
        ):
            dataset = dataset.shard(num_shards=world_size, index=rank)
        else:
            self.synchronized = getattr(dataset, "generator", None)
            dataset = IterableDatasetShard(
                dataset, batch_size, self.loader.drop_last, world_size, rank, split_batches
            )
        options = {"batch_size": batch_size // world_size} if batch_size and split_batches else {}
        return _rebuild_loader(self.loader, stateful=self.stateful, dataset=dataset, **options)

    def _use_seedable_sampler(self) -> None:
        if not self._must_reseed():
            return
        *batch_samplers, old_sampler = chain_of_samplers(self.loader)
        # Differently seeded processes would draw overlapping samples: process 0 decides.
        seed = torch.initial_seed() if self.settings.data_seed is None else self.settings.data_seed
        new_sampler: Any = SeedableRandomSampler(
            old_sampler.data_source,
            old_sampler.replacement,
            torch_private.requested_samples(old_sampler),
            old_sampler.generator,
            data_seed=self.collectives.broadcast_object(seed),
        )
        # From the innermost outwards, because each copy is given the new sampler inside it.
        for outer_sampler in reversed(batch_samplers):
            attribute = "batch_sampler" if hasattr(outer_sampler, "batch_sampler") else "sampler"
            # Copies, because the user's loader keeps its samplers.
            outer_copy = copy.copy(outer_sampler)
            setattr(outer_copy, attribute, new_sampler)
            new_sampler = outer_copy
        self.loader = _rebuild_loader(
            self.loader, stateful=hasattr(self.loader, "state_dict"), index_batches=new_sampler
        )


def skip_first_batches(
    dataloader: DataLoader[Any], num_batches: int | None = None
) -> DataLoader[Any]:
    """A loader that leaves out the first batches of an epoch; the one given stays as it is.

    Samples that are chosen by index are not read. The two loaders of a prepared one count epochs
    together: when the skipping one is done, the other continues with the next epoch.

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
            "not say how many to leave out: training would begin at the wrong batch. Give a "
            "number from 0 on; only a prepared loader knows it by itself."
        )
    if isinstance(dataloader, PreparedLoader):
        return _skip_prepared_batches(dataloader, num_batches)
    if isinstance(dataloader.dataset, IterableDataset):
        options = {**_size_options(dataloader), **_loader_options(dataloader)}
        return SkipDataLoader(dataloader.dataset, num_batches, **options)
    remaining = SkipBatchSampler(_index_batches(dataloader), num_batches)
    stateful = hasattr(dataloader, "state_dict")
    return _rebuild_loader(dataloader, stateful=stateful, index_batches=remaining)


def _skip_prepared_batches(loader: PreparedLoader, num_batches: int) -> PreparedLoader:
    skipped = loader.settings.skip_batches + num_batches
    loader_settings = replace(loader.settings, skip_batches=skipped)
    base = loader.base
    num_dropped = loader.batches_to_drop
    dispatches = isinstance(loader, DataLoaderDispatcher)
    if isinstance(loader.dataset, IterableDataset) or _overrides_iteration(base):
        num_dropped += num_batches
    else:
        # Process 0 reads one batch per process in a round, so skipping a round skips that many.
        reads_whole_rounds = dispatches and not loader_settings.split_batches
        batches_each = loader_settings.place.world_size if reads_whole_rounds else 1
        remaining = SkipBatchSampler(_index_batches(base), num_batches * batches_each)
        base = _rebuild_loader(base, stateful=loader_settings.stateful, index_batches=remaining)
    own_class = loader_class(dispatches=dispatches, stateful=loader_settings.stateful)
    skipping_loader = own_class.around(
        base, loader.gradient_state, loader_settings, loader.position, drop=num_dropped
    )
    if isinstance(loader, DataLoaderDispatcher):
        vars(skipping_loader)["slice_fn"] = loader.slice_fn
    return skipping_loader


def _index_batches(loader: DataLoader[Any]) -> Any:
    # With batch_size=None torch makes no batch sampler.
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def _loader_batch_size(loader: DataLoader[Any]) -> int | None:
    if isinstance(loader.dataset, IterableDataset):
        return loader.batch_size
    sampler_size = getattr(_index_batches(loader), "batch_size", None)
    return sampler_size if isinstance(sampler_size, int) else loader.batch_size


def _overrides_iteration(loader: DataLoader[Any]) -> bool:
    """Whether the loader's class changes how a torch loader iterates."""
    # torchdata's class has an __iter__ for its states, but reads as torch's does.
    defining_class = next(base for base in type(loader).__mro__ if "__iter__" in vars(base))
    return defining_class is not DataLoader and not defining_class.__module__.startswith(
        "torchdata."
    )


def _rebuild_loader(
    loader: DataLoader[Any],
    *,
    stateful: bool,
    dataset: Any = None,
    index_batches: Any = None,
    **changed_options: Any,
) -> DataLoader[Any]:
    # A new one, because torch forbids changing the sampler or dataset of a loader.
    dataset = loader.dataset if dataset is None else dataset
    options = _loader_options(loader)
    if hasattr(loader, "snapshot_every_n_steps") and stateful:
        options["snapshot_every_n_steps"] = loader.snapshot_every_n_steps
    index_batches = _index_batches(loader) if index_batches is None else index_batches
    if isinstance(dataset, IterableDataset):
        options |= _size_options(loader)
    elif loader.batch_sampler is None:
        # Without automatic batching the dataset gets each index (or list of them) as it is.
        options |= {"sampler": index_batches, "batch_size": None}
    else:
        options["batch_sampler"] = index_batches
    rebuilt: DataLoader[Any] = reading_class(stateful)(dataset, **{**options, **changed_options})
    return rebuilt


def _loader_options(loader: DataLoader[Any]) -> dict[str, Any]:
    return {name: getattr(loader, name) for name in _LOADER_OPTIONS if hasattr(loader, name)}


def _size_options(loader: DataLoader[Any]) -> dict[str, Any]:
    return {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
