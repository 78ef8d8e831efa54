"""``PreparedLoader``: a data loader that knows its last batch, its place and its position.

[Note: the same order again] An epoch's order is drawn at its beginning: by the sampler's generator
where it has one, else from the process's random state. So the states at the beginning are kept. A
resumed epoch puts them back, makes its iterator, skips, reads the first batch, and then returns
the process's random state to what it was before: the unbroken run, too, had drawn all this long
ago. The batch that was read ahead when the checkpoint was written is read once more; torch's state
just before is kept for it, so that a dataset which draws (a random crop) draws the same.

Users know it as `DataLoaderShard` here, and as `DataLoaderDispatcher` in `train.dispatch`. It is a
real ``torch.utils.data.DataLoader`` around another one, the `base`, which reads. An
iteration of it is one generator: a loop that is left early, by ``break``, by an exception or by
dropping the iterator, closes the generator, and nothing stays behind.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from nbaccel.base import optional_packages, spent_time, torch_private
from nbaccel.base.errors import ConfigError
from nbaccel.base.trees import find_batch_size, leaves, map_tensors, send_to_device
from nbaccel.loops import loop_watch
from nbaccel.plan import registry
from nbaccel.plan.contracts.training import Place
from nbaccel.train import distributed, rng
from nbaccel.train.collectives import Collectives
from nbaccel.train.gradient import GradientState
from nbaccel.train.sampling import BatchSamplerShard, IterableDatasetShard, SeedableRandomSampler

_Kind = TypeVar("_Kind")
_HOST_PLACE = Place(device=torch.device("cpu"))  # orders are drawn on the host, also for GPUs


class LoaderPosition:
    """The epoch and batch that a loader, and the loaders that skip some of its batches, are at."""

    def __init__(self, generators: Mapping[str, torch.Generator]) -> None:
        self.epoch = 0  # epochs that were iterated to their end
        # Batches of the running epoch that were given out, skipped ones included.
        self.batches_seen = 0
        # Torch's random state before the batch after the current one was read.
        self.ahead: torch.Tensor | None = None
        # What the next iteration starts from; None draws a new order.
        self.restored_state: dict[str, Any] | None = None
        self.has_begun = False  # whether any epoch was begun before the next one
        self._owned_generators = dict(generators)
        self._epoch_start: dict[str, Any] | None = None  # of the running epoch; None between two

    @property
    def is_within_epoch(self) -> bool:
        """Whether an epoch was begun and not ended."""
        return self._epoch_start is not None or self.restored_state is not None

    def begin_epoch(self, skipped_batches: int) -> None:
        """Begin an epoch, and keep the states that its order is drawn from."""
        self.batches_seen = skipped_batches
        self.ahead = None
        self._epoch_start = self._states_now()
        self.has_begun = True

    def end_epoch(self) -> None:
        """An epoch has ended."""
        self.epoch += 1
        self.batches_seen = 0
        self._epoch_start = None

    def move_to(self, epoch: int) -> None:
        """Move to another epoch, and forget the position in the present one."""
        # `set_epoch` with the current number, as each epoch begins, must keep a position.
        if epoch != self.epoch:
            self.epoch = epoch
            self.leave_epoch()

    def leave_epoch(self) -> None:
        """Begin anew with the next iteration, in a new order."""
        self.batches_seen = 0
        self.restored_state = self._epoch_start = None

    def put_back(self) -> dict[str, Any] | None:
        """Go back to the beginning of the restored epoch, once."""
        state, self.restored_state = self.restored_state, None
        if state is not None:
            rng.restore_rng_states(_HOST_PLACE, state["start"]["process"])
            self._set_draw_states(state["start"]["generators"])
        return state

    def state_dict(self, *, is_through: bool = False) -> dict[str, Any]:
        """The position: epoch, batches seen, and the states that the order was drawn from."""
        if self.restored_state is not None:
            # Saved again before the next iteration, which will start from what was loaded.
            return dict(self.restored_state)
        start = None if is_through else self._epoch_start
        return {
            "epoch": self.epoch + is_through,
            "batches_seen": self.batches_seen if start else 0,
            "start": start,
            "ahead": self.ahead if start else None,
            "has_begun": start["has_begun"] if start else self.has_begun,
            "generators": self._draw_states(),
        }

    @staticmethod
    def check(state: Any) -> None:
        """Refuse anything that is not a position."""
        if not isinstance(state, Mapping):
            raise ConfigError(
                f"This is a {type(state).__name__}, not the state of a prepared loader: the loader "
                "would begin at the wrong batch. Give what its state_dict() returned."
            )
        if not {"epoch", "batches_seen", "start", "generators", "has_begun"} <= state.keys():
            raise ConfigError(
                "This is not the state of a prepared loader: it has "
                f"{', '.join(map(repr, sorted(state)))}. The loader would begin at the wrong "
                "batch. Give what its state_dict() returned; of another library's checkpoint, load "
                "model and optimizer only."
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a position from :meth:`state_dict`."""
        self.check(state)
        self.epoch = int(state["epoch"])
        self.batches_seen = int(state["batches_seen"])
        self.has_begun = bool(state["has_begun"])
        self._epoch_start = None
        self.restored_state = dict(state) if state["start"] is not None else None
        self._set_draw_states(state["generators"])

    def continue_with(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Take over the state of torchdata's loader, which knows its samplers but no epoch."""
        snapshot = state.get("_snapshot") or {}
        self.batches_seen = int(state.get("_num_yielded") or 0) or (
            int(snapshot.get("_snapshot_step") or 0) + int(state.get("_steps_since_snapshot") or 0)
        )
        self._epoch_start = self._states_now()
        self.restored_state = {**self.state_dict(), "base": dict(state), "ahead": None}
        self._epoch_start = None
        return dict(state)

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Restore all generators that draw the order after the block."""
        # A sampler's or dataset's generator is not among the global ones that `rng` preserves.
        states = self._draw_states()
        with rng.preserve_rng_states():
            yield
        self._set_draw_states(states)

    def _states_now(self) -> dict[str, Any]:
        return {
            "process": rng.capture_rng_states(_HOST_PLACE),
            "generators": self._draw_states(),
            "has_begun": self.has_begun,
        }

    def _draw_states(self) -> dict[str, torch.Tensor]:
        return {name: generator.get_state() for name, generator in self._owned_generators.items()}

    def _set_draw_states(self, states: Mapping[str, torch.Tensor]) -> None:
        for name in states.keys() & self._owned_generators.keys():
            self._owned_generators[name].set_state(states[name])


_END_OF_EPOCH: Any = object()
# Of the state of torchdata's loader, without and with workers.
_TORCHDATA_KEYS = frozenset({"_num_yielded", "_snapshot"})


@dataclass(frozen=True, kw_only=True)
class LoaderSettings:
    """Settings of a prepared loader."""

    place: Place  # this process among the others
    collectives: Collectives  # collectives of all processes
    device: torch.device | None = None  # where batches are put; None leaves them where they are
    non_blocking: bool = False  # whether copies to the device may still be under way
    # Random generators that all processes take from process 0 at each epoch.
    rng_types: tuple[str, ...] = ()
    synchronized: torch.Generator | None = None  # what ``generator`` stands for in them
    # Samples of one batch of the base; None where it is not known.
    base_batch_size: int | None = None
    num_sharing: int = 1  # processes that the batches are shared out among
    drop_last: bool = False  # whether a last batch that is not full is dropped
    split_batches: bool = False  # whether batches of the base are split over the processes
    skip_batches: int = 0  # batches that are left out at the beginning of an epoch
    stateful: bool = False  # whether the base can tell its state (torchdata's)


class PreparedLoader(DataLoader[Any]):
    """What loaders of all kinds have that give this process its share, on its device.

    Other attributes are read from the base: `dataset`, `sampler`, `num_workers`, ….

    Attributes:
        base: The torch loader that reads this process's share.
        gradient_state: Records which loader is being iterated over.
        settings: How it shares with the other processes.
        position: The epoch and batch it is at; shared with loaders that skip some of its batches.
        batches_to_drop: Batches of the base to read and throw away at the beginning of an epoch,
            where they cannot be skipped without being read.
        end_of_dataloader: True while the last batch is in the loop's body.
        prepared_from: The loader that it was made of; None where it was made by hand.
        remainder: Samples of the last total batch that are no copies, counted over all processes
            at the last batch, before foretold by the dataset's length; 0: full, -1: not known.
    """

    @classmethod
    def around(cls, *args: Any, **options: Any) -> PreparedLoader:
        """A loader by the arguments below; the constructors of its classes have Accelerate's."""
        loader = cls.__new__(cls)
        PreparedLoader.__init__(loader, *args, **options)
        return loader

    def __init__(
        self,
        base: DataLoader[Any],
        gradient_state: GradientState,
        settings: LoaderSettings,
        position: LoaderPosition | None = None,
        *,
        drop: int = 0,
    ) -> None:
        # No super().__init__(): it would make samplers of its own, and everything is the base's.
        self.base = base
        self.gradient_state = gradient_state
        self.settings = settings
        self.position = position or LoaderPosition(_order_generators(base))
        self.end_of_dataloader = False
        self.remainder = -1
        self.batches_to_drop = drop
        self.prepared_from: DataLoader[Any] | None = None
        self._prepared_among = distributed.world_size()
        self._base_state: dict[str, Any] | None = None

    def make_by_hand(
        self, base: DataLoader[Any], *, skip_batches: int, is_shared: bool = False, **settings: Any
    ) -> None:
        """Be a loader that is made without `prepare`: for this process among the others."""
        place = distributed.init_process()
        sampler = base.batch_sampler
        # Behind a shard each process reads other batches, so a round has one per process.
        shares = is_shared or isinstance(sampler, BatchSamplerShard)
        loader_settings = LoaderSettings(
            place=place,
            collectives=Collectives(place, distributed.timeout_s(None)),
            # A loader with a batch sampler has no batch size itself, and not every sampler has one.
            base_batch_size=base.batch_size or getattr(sampler, "batch_size", None),
            num_sharing=place.world_size if shares else 1,
            skip_batches=skip_batches,
            **settings,
        )
        PreparedLoader.__init__(self, base, GradientState(), loader_settings, drop=skip_batches)

    def __getattr__(self, name: str) -> Any:
        if name == "base" or name.startswith("__"):  # while being unpickled, the base comes later
            raise AttributeError(f"{type(self).__name__} has no {name} yet")
        return getattr(self.base, name)

    @property  # type: ignore[misc]
    def multiprocessing_context(self) -> Any:
        """As the base's: how worker processes are started."""
        # DataLoader has a property of this name, which `__getattr__` would not replace.
        return self.base.multiprocessing_context

    @property
    def sampler(self) -> Any:  # type: ignore[override]
        """The sampler that draws indices; torch does not keep it beside a batch sampler."""
        *_, last_sampler = chain_of_samplers(self.base)
        return self.base.sampler if isinstance(last_sampler, BatchSampler) else last_sampler

    @property
    def batch_size(self) -> int | None:  # type: ignore[override]
        """Samples of one batch of this process; None where it is not known."""
        divisor = self.settings.num_sharing if self.settings.split_batches else 1
        return self.settings.base_batch_size and self.settings.base_batch_size // divisor

    drop_last: Any = property(attrgetter("settings.drop_last"))
    """Whether a last batch that is not full is dropped."""
    device: Any = property(attrgetter("settings.device"))
    """Where batches are put; None where they stay as they were read."""
    use_stateful_dataloader: Any = property(attrgetter("settings.stateful"))
    """Whether it continues within an epoch by itself, after `load_state_dict`."""
    batches_seen: Any = property(attrgetter("position.batches_seen"))
    """Batches given out in the running epoch; in a restored one, until it continues."""

    @property
    def total_batch_size(self) -> int | None:
        """Samples of one batch of all processes together; None where it is not known."""
        factor = 1 if self.settings.split_batches else self.settings.num_sharing
        return self.settings.base_batch_size and self.settings.base_batch_size * factor

    @property
    def total_dataset_length(self) -> int:
        """Samples of the dataset, whatever this process's share is."""
        dataset: Any = self.dataset
        if isinstance(dataset, IterableDatasetShard):
            dataset = dataset.dataset  # the shard's length is this process's share
        return int(dataset.total_length if hasattr(dataset, "total_length") else len(dataset))

    @property
    def iteration(self) -> int:
        """Epochs that were iterated to their end; also the number of the running one, from 0."""
        return self.position.epoch

    @iteration.setter
    def iteration(self, epoch: int) -> None:
        self.position.move_to(epoch)

    @property
    def even_batches(self) -> bool:
        """Whether the last round is completed from the beginning; may be changed for a while."""
        return all(shard.even_batches for shard in self._samplers(BatchSamplerShard))

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        for shard in self._samplers(BatchSamplerShard):
            shard.even_batches = even

    def _samplers(self, kind: type[_Kind]) -> list[_Kind]:
        return [sampler for sampler in chain_of_samplers(self.base) if isinstance(sampler, kind)]

    def __len__(self) -> int:
        return max(0, len(self.base) - self.batches_to_drop)

    def set_epoch(self, epoch: int) -> None:
        """Tell samplers and dataset which epoch is read next; it is counted on from there."""
        self.position.move_to(epoch)
        for epoch_user in (*chain_of_samplers(self.base), self.dataset):
            if hasattr(epoch_user, "set_epoch"):
                epoch_user.set_epoch(epoch)

    def is_for(self, place: Place) -> bool:
        """Whether it was prepared for this process among as many others."""
        own_place = self.settings.place
        return (own_place.rank, own_place.world_size) == (place.rank, place.world_size)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        world_size = distributed.world_size()
        if self._prepared_among == 1 and world_size > 1:
            raise ConfigError(
                f"This {type(self).__name__} was prepared in one process and is read by "
                f"{world_size}: each would read all of it, and gathered results would have every "
                "sample several times. Give it to prepare() in the function or cell that reads it."
            )
        resuming = self.gradient_state.resuming
        # Within another loop the step's body is not over.
        if not self.gradient_state.in_dataloader:
            loop_watch.end_step()
        left = self if resuming is None else resuming.batches_left(self)
        if left is None:
            return
        with contextlib.nullcontext() if resuming is None else resuming.looping(self):
            yield from self._batches() if left is self else left

    def _batches(self) -> Iterator[Any]:
        # The same loader may be iterated inside its own loop; the outer loop gets its flag back.
        was_at_end = self.end_of_dataloader
        self.gradient_state.enter_loader(self)
        spent_time.begin_account()
        loop = loop_watch.begin_loop(self, self.dataset)
        try:
            for batch in self._iterate_epoch():
                yield batch
                if loop is not None:
                    loop.note_done(find_batch_size(batch) or 0)
        finally:
            if loop is not None:
                loop.end()
            self.gradient_state.end_loader(self)
            self.end_of_dataloader = was_at_end

    def _iterate_epoch(self) -> Iterator[Any]:
        position = self.position
        settings = self.settings
        with spent_time.reading_data, loop_watch.telling():
            batch_source, current_batch = self._begin_epoch()
        batches_seen = position.batches_seen
        must_move = self._must_move(current_batch)
        device = registry.device_runtime(settings.place.device_name)
        watch = self.gradient_state.compile_watch(device)
        is_outer = self.gradient_state.is_outermost(self)
        while current_batch is not _END_OF_EPOCH:
            if is_outer:
                loop_watch.end_step()
            with spent_time.reading_data, loop_watch.telling():
                if must_move:
                    current_batch = self._moved(current_batch)
                # Taken before the next batch is read: a state saved in the loop's body must
                # continue with the batch after the one that is in the body.
                if settings.stateful:
                    self._base_state = self._base_snapshot()
                position.ahead = torch.get_rng_state()
                # Read ahead, because only its absence shows that the current one is the last.
                next_batch = next(batch_source, _END_OF_EPOCH)
            if next_batch is _END_OF_EPOCH:
                self.end_of_dataloader = True
                self.remainder = self._count_remainder(current_batch)
            batches_seen += 1
            position.batches_seen = batches_seen
            with watch.step(current_batch) if watch else contextlib.nullcontext():
                yield current_batch
                # In evaluation, too, where no optimizer ends the step.
                device.mark_step()
            spent_time.end_step()
            current_batch = next_batch
        position.end_epoch()
        self._base_state = None

    def _moved(self, batch: Any) -> Any:
        settings = self.settings
        # Where operations are queued, the device still computes the step before.
        return send_to_device(batch, settings.device or "cpu", non_blocking=settings.non_blocking)

    def _begin_epoch(self) -> tuple[Iterator[Any], Any]:
        """Make the epoch's iterator and read its first batch. See [Note: the same order again]."""
        self.end_of_dataloader = False
        self.remainder = self._foretold_remainder()
        position = self.position
        settings = self.settings
        is_resumed = position.restored_state is not None
        with rng.preserve_rng_states() if is_resumed else contextlib.nullcontext():
            self._match_workers()
            restored_state = position.put_back() or {"base": None, "ahead": None}
            if settings.rng_types and not settings.place.is_alone:
                rng.synchronize_rng_states(
                    settings.rng_types, settings.synchronized, settings.collectives
                )
            self.set_epoch(position.epoch)
            continues_epoch = settings.stateful and not settings.skip_batches and is_resumed
            skipped = restored_state["batches_seen"] if continues_epoch else settings.skip_batches
            # After they are synchronised: the order is drawn from the states that are kept.
            position.begin_epoch(skipped)
            # Before its next iterator is made, when torchdata applies a loaded state.
            if continues_epoch and restored_state["base"] is not None:
                self.base.load_state_dict(restored_state["base"])  # type: ignore[attr-defined]
            batch_source = self._open_source(draws_now=is_resumed)
            for _ in range(self.batches_to_drop):
                if next(batch_source, _END_OF_EPOCH) is _END_OF_EPOCH:
                    return batch_source, _END_OF_EPOCH
            # Only after the sampler has drawn the order, which belongs to the epoch's first state.
            if restored_state["ahead"] is not None:
                torch.set_rng_state(restored_state["ahead"])
            return batch_source, next(batch_source, _END_OF_EPOCH)

    def _match_workers(self) -> None:
        """Let persistent workers wait exactly if they would in the unbroken run."""
        # Torch draws a seed for new ones, from what the order is drawn from.
        if not self.base.persistent_workers:
            return
        if not self.position.has_begun:
            torch_private.drop_loader_iterator(self.base)
        elif not torch_private.has_loader_iterator(self.base):
            with self.position.undisturbed():
                iter(self.base)

    def _base_snapshot(self) -> dict[str, Any] | None:
        return self.base.state_dict()  # type: ignore[attr-defined,no-any-return]

    def _open_source(self, *, draws_now: bool) -> Iterator[Any]:
        iterator: Any = iter(self.base)
        # A sampler draws when its first index is read, which torch has done if there are workers.
        if draws_now and not self.num_workers:
            torch_private.draw_order_now(iterator)
        return iterator  # type: ignore[no-any-return]

    def _must_move(self, batch: Any) -> bool:
        """Whether batches come from elsewhere; one is looked at, they are all made alike."""
        device = self.settings.device
        if device is None or batch is _END_OF_EPOCH:
            return False
        tensors = (leaf for leaf in leaves(batch) if isinstance(leaf, torch.Tensor))
        return device.type != "cpu" or any(tensor.device.type != "cpu" for tensor in tensors)

    def _foretold_remainder(self) -> int:
        """The remainder as Accelerate tells it from the first batch on: by the dataset's length."""
        if self.settings.drop_last or not self.total_batch_size:
            return -1
        try:
            return len(self.dataset) % self.total_batch_size  # type: ignore[arg-type]
        except TypeError:  # a stream has no length
            return -1

    def _count_remainder(self, last_batch: Any) -> int:
        settings = self.settings
        if settings.drop_last:
            return -1
        if settings.place.is_alone:
            rows = find_batch_size(last_batch)
            full_rows = self.total_batch_size
            if rows is None or not full_rows or isinstance(self.dataset, IterableDataset):
                return -1
            return rows % full_rows
        counters: list[Any] = list(self._samplers(BatchSamplerShard))
        # Worker processes read copies of the dataset, whose counts stay there.
        if isinstance(self.dataset, IterableDatasetShard) and not self.num_workers:
            counters += [self.dataset] if self.batch_size else []
        return int(counters[-1].remainder) if counters else -1

    def state_dict(self) -> dict[str, Any]:
        """The position: epoch, batches seen, and the states that the order was drawn from.

        Returns:
            Numbers, text and tensors in plain containers; with torchdata's loader, also all that
            its own state has, under the same names.
        """
        is_stateful = self.settings.stateful
        state = self.position.state_dict(is_through=is_stateful and self.end_of_dataloader)
        state["seeds"] = [one.initial_seed for one in self._samplers(SeedableRandomSampler)]
        state["base"] = self._base_state if state["start"] is not None else None
        return {**(state["base"] or {}), **state}

    def check_state_dict(self, state: Any) -> None:
        """Refuse a state that :meth:`load_state_dict` would refuse; nothing is changed."""
        if not self._is_of_torchdata(state):
            self.position.check(state)

    def _is_of_torchdata(self, state: Any) -> bool:
        is_foreign = isinstance(state, Mapping) and "batches_seen" not in state
        return self.settings.stateful and is_foreign and bool(_TORCHDATA_KEYS & state.keys())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go back to where another run was.

        The next iteration repeats the interrupted epoch's order: from its beginning, so that
        `skip_first_batches` leaves out what was done, or with torchdata's loader, whose own
        states will do as well, from the middle.

        Raises:
            ConfigError: It is something else.
        """
        # Random states live on the host, wherever the checkpoint was read to.
        state = map_tensors(torch.Tensor.cpu, dict(state_dict))
        if self._is_of_torchdata(state):
            self._base_state = self.position.continue_with(state)
            return
        self.position.load_state_dict(state)
        self._base_state = state.get("base")
        samplers = self._samplers(SeedableRandomSampler)
        for sampler, seed in zip(samplers, state.get("seeds", ()), strict=False):
            sampler.initial_seed = seed


class DataLoaderShard(PreparedLoader):
    """A loader whose batches come on a device, and that knows its last one.

    Made by hand, it reads all that it is given: a ``batch_sampler=BatchSamplerShard(...)`` or an
    ``IterableDatasetShard`` chooses this process's share. Batches to skip are read and left out;
    what `DataLoader` takes follows as keywords.
    """

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
        refuse_mesh(type(self), torch_device_mesh)
        self.make_by_hand(
            reading_class(use_stateful_dataloader)(dataset, **kwargs),
            device=None if device is None else torch.device(device),
            non_blocking=_non_blocking,
            rng_types=tuple(str(rng_type) for rng_type in rng_types or ()),
            synchronized=synchronized_generator,
            drop_last=_drop_last,
            skip_batches=skip_batches,
            stateful=use_stateful_dataloader,
        )
        self.iteration = iteration


class SkipDataLoader(PreparedLoader):
    """A loader that leaves out the first batches of each epoch; `skip_first_batches` reads less."""

    def __init__(
        self,
        dataset: Any,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        **kwargs: Any,
    ) -> None:
        loader = reading_class(use_stateful_dataloader)(dataset, **kwargs)
        self.make_by_hand(loader, skip_batches=skip_batches, stateful=use_stateful_dataloader)


def refuse_mesh(called_object: Any, device_mesh: Any) -> None:
    """Refuse to share batches out by a mesh."""
    if device_mesh is not None:
        raise ConfigError(
            f"{called_object.__name__}(torch_device_mesh={device_mesh}) would share batches out "
            "by a mesh: here every process gets batches of its own. Leave torch_device_mesh out."
        )


def reading_class(is_stateful: bool) -> Any:
    """Torch's class of loaders, or torchdata's, which has a state."""
    if not is_stateful:
        return DataLoader
    module = optional_packages.require(
        "torchdata.stateful_dataloader", extra="stateful", why="use_stateful_dataloader=True"
    )
    return module.StatefulDataLoader


def chain_of_samplers(loader: DataLoader[Any]) -> list[Any]:
    """The samplers of a loader: its batch sampler, and the samplers inside it, outermost first."""
    samplers: list[Any] = []
    sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    # A sampler may refer back to itself, which would make this loop endless.
    while sampler is not None and not any(sampler is earlier for earlier in samplers):
        samplers.append(sampler)
        inner_sampler = getattr(sampler, "batch_sampler", None)
        sampler = getattr(sampler, "sampler", None) if inner_sampler is None else inner_sampler
    return samplers


def _order_generators(loader: DataLoader[Any]) -> dict[str, torch.Generator]:
    dataset: Any = loader.dataset
    owners = {
        "loader": loader,
        "sampler": [None, *chain_of_samplers(loader)][-1],
        "dataset": dataset.dataset if isinstance(dataset, IterableDatasetShard) else dataset,
    }
    found = {name: getattr(owner, "generator", None) for name, owner in owners.items()}
    return {name: it for name, it in found.items() if isinstance(it, torch.Generator)}
