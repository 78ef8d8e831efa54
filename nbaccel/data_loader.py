"""Data loaders shared among processes, under the names by which Accelerate's users import them.

``Accelerator.prepare`` makes loaders of other classes, which count as instances of these; the
constructors are for code that makes one by hand, with Accelerate's arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from nbaccel.base import optional_packages
from nbaccel.base.errors import ConfigError
from nbaccel.config.handlers import DataLoaderConfiguration
from nbaccel.plan.contracts.place import Place
from nbaccel.train import distributed, prepare_loader
from nbaccel.train.collectives import Collectives
from nbaccel.train.dispatch import DispatchLoader, SliceFn
from nbaccel.train.gradient import GradientState
from nbaccel.train.loader import LoaderSettings, PreparedLoader
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


class _PreparedLoaderType(type):
    """Lets what `prepare` returned be an instance of the class by whose name users know it."""

    def __instancecheck__(cls, instance: Any) -> bool:
        # A subclass of the user's has no such attribute itself: it means its own instances only.
        if "reads_for_all" not in vars(cls):
            return super().__instancecheck__(instance)
        reads_for_all: bool = vars(cls)["reads_for_all"]
        return isinstance(instance, PreparedLoader) and (
            instance.settings.dispatches is reads_for_all
        )


class DataLoaderShard(PreparedLoader, metaclass=_PreparedLoaderType):
    """A loader whose batches come on a device, and that knows its last one.

    It reads all that it is given: a ``batch_sampler=BatchSamplerShard(...)`` or an
    ``IterableDatasetShard`` chooses this process's share.

    Args:
        dataset: What is read.
        device: Where batches are put; None leaves them where they are.
        rng_types: Random generators that all processes take from process 0 at each epoch.
        synchronized_generator: What ``"generator"`` stands for in them.
        skip_batches: Batches that are read and left out at the beginning of an epoch.
        use_stateful_dataloader: Read with torchdata's loader, which has a state.
        _drop_last: Whether a last batch that is not full was dropped.
        _non_blocking: Whether copies to the device may still be under way.
        torch_device_mesh: None: batches are not shared out by a mesh here.
        iteration: Number of the first epoch.
        **kwargs: Arguments of ``torch.utils.data.DataLoader``.

    Raises:
        ConfigError: A mesh was given.
        MissingBackend: torchdata is asked for and not installed.
    """

    reads_for_all = False

    def __init__(
        self,
        dataset: Any,
        device: torch.device | str | None = None,
        rng_types: Sequence[Any] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        _refuse_mesh(type(self), torch_device_mesh)
        loader = _reading_class(use_stateful_dataloader)(dataset, **kwargs)
        loader_settings = LoaderSettings(
            **_place_settings(loader),
            device=None if device is None else torch.device(device),
            non_blocking=_non_blocking,
            rng_types=tuple(str(rng_type) for rng_type in rng_types or ()),
            synchronized=synchronized_generator,
            drop_last=_drop_last,
            skip_batches=skip_batches,
            stateful=use_stateful_dataloader,
        )
        super().__init__(loader, GradientState(), loader_settings, drop=skip_batches)
        self.iteration = iteration


class DataLoaderDispatcher(DispatchLoader, metaclass=_PreparedLoaderType):
    """A loader that process 0 reads for all; every process gets its part of each batch.

    Args:
        dataset: What is read.
        split_batches: Cut each batch into one slice per process; otherwise each process gets one
            whole batch per round.
        skip_batches: Rounds that are read and left out at the beginning of an epoch.
        use_stateful_dataloader: Read with torchdata's loader, which has a state.
        _drop_last: Whether a last round that is not full is dropped.
        _non_blocking: Whether copies to the device may still be under way.
        slice_fn: How a process takes its rows of a batch; None takes them from every tensor.
        torch_device_mesh: None: batches are not shared out by a mesh here.
        iteration: Number of the first epoch.
        **kwargs: Arguments of ``torch.utils.data.DataLoader``.

    Raises:
        ConfigError: A mesh was given.
        MissingBackend: torchdata is asked for and not installed.
    """

    reads_for_all = True

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
        _refuse_mesh(type(self), torch_device_mesh)
        loader = _reading_class(use_stateful_dataloader)(dataset, **kwargs)
        place_settings = _place_settings(loader, splits_batches=split_batches)
        loader_settings = LoaderSettings(
            **place_settings,
            device=place_settings["place"].device,
            non_blocking=_non_blocking,
            drop_last=_drop_last,
            split_batches=split_batches,
            skip_batches=skip_batches,
            stateful=use_stateful_dataloader,
            dispatches=True,
        )
        super().__init__(
            loader, GradientState(), loader_settings, drop=skip_batches, slice_fn=slice_fn
        )
        self.iteration = iteration


class SkipDataLoader(PreparedLoader):
    """A loader that leaves out the first batches of every epoch; `skip_first_batches` reads less.

    Args:
        dataset: What is read.
        skip_batches: How many.
        use_stateful_dataloader: Read with torchdata's loader, which has a state.
        **kwargs: Arguments of ``torch.utils.data.DataLoader``.

    Raises:
        MissingBackend: torchdata is asked for and not installed.
    """

    def __init__(
        self,
        dataset: Any,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        **kwargs: Any,
    ) -> None:
        loader = _reading_class(use_stateful_dataloader)(dataset, **kwargs)
        loader_settings = LoaderSettings(
            **_place_settings(loader),
            skip_batches=skip_batches,
            stateful=use_stateful_dataloader,
        )
        super().__init__(loader, GradientState(), loader_settings, drop=skip_batches)


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
    _refuse_mesh(prepare_data_loader, torch_device_mesh)
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


def _refuse_mesh(called_object: Any, device_mesh: Any) -> None:
    if device_mesh is not None:
        raise ConfigError(
            f"{called_object.__name__}(torch_device_mesh={device_mesh}) would share batches out "
            "by a mesh, which nbaccel does not: every process gets batches of its own. Leave "
            "torch_device_mesh out."
        )


def _reading_class(is_stateful: bool) -> Any:
    if not is_stateful:
        return DataLoader
    module = optional_packages.require(
        "torchdata.stateful_dataloader", extra="stateful", why="use_stateful_dataloader=True"
    )
    return module.StatefulDataLoader


def _place_settings(
    base_loader: DataLoader[Any], *, splits_batches: bool | None = None
) -> dict[str, Any]:
    """Settings of a loader: this process among the others, and the samples in a batch."""
    place = distributed.init_process()
    batch_sampler = base_loader.batch_sampler
    # A loader with a batch sampler has no batch size itself, and not every sampler has one.
    batch_size = base_loader.batch_size or getattr(batch_sampler, "batch_size", None) or 0
    if splits_batches is None:
        total_batch_size = batch_size * (
            # Behind a shard each process reads other batches, so a round has one per process.
            place.world_size if isinstance(batch_sampler, BatchSamplerShard) else 1
        )
    else:
        total_batch_size = batch_size if splits_batches else batch_size * place.world_size
    return {
        "place": place,
        "collectives": Collectives(place, distributed.timeout_s(None)),
        "batch_size": (batch_size // place.world_size if splits_batches else batch_size) or None,
        "total_batch_size": total_batch_size or None,
    }
