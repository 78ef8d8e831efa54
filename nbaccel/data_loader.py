"""Data loaders shared among processes, under the names by which Accelerate's users import them.

``Accelerator.prepare`` makes them; the constructors, with Accelerate's arguments, are for code that
makes one by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from nbaccel.config.handlers import DataLoaderConfiguration
from nbaccel.plan.contracts.training import Place
from nbaccel.train import distributed, prepare_loader
from nbaccel.train.collectives import Collectives
from nbaccel.train.dispatch import DataLoaderDispatcher, SliceFn
from nbaccel.train.gradient import GradientState
from nbaccel.train.loader import DataLoaderShard, PreparedLoader, SkipDataLoader, refuse_mesh
from nbaccel.train.prepare_loader import skip_first_batches
from nbaccel.train.sampling import (
    BatchSamplerShard,
    IterableDatasetShard,
    SeedableRandomSampler,
    SkipBatchSampler,
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
        dispatch_batches: Whether process 0 reads for all; None: iterable datasets, if batches are
            put on the device.
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
    refuse_mesh(prepare_data_loader, torch_device_mesh)
    process_place = distributed.init_process()
    sharing_place = Place(
        rank=process_place.rank if process_index is None else process_index,
        local_rank=process_place.local_rank,
        world_size=process_place.world_size if num_processes is None else num_processes,
        local_world_size=process_place.local_world_size,
        device=process_place.device if device is None else torch.device(device),
        backend=process_place.backend,
    )
    loader_config = DataLoaderConfiguration(
        split_batches=split_batches,
        dispatch_batches=dispatch_batches,
        even_batches=even_batches,
        use_seedable_sampler=use_seedable_sampler,
        data_seed=data_seed,
        non_blocking=non_blocking,
        use_stateful_dataloader=use_stateful_dataloader,
    )
    return prepare_loader.prepare_data_loader(
        dataloader,
        sharing_place,
        GradientState(),
        loader_config,
        Collectives(process_place, distributed.timeout_s(None)),
        put_on_device=put_on_device,
        rng_types=[str(rng_type) for rng_type in rng_types or ()],
        slice_fn=slice_fn_for_dispatch,
    )
