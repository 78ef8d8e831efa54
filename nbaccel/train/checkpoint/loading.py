"""``load_state``: restores what ``save_state`` wrote, if all of it exists and is unchanged.

    each process                                                exchanged by all
    ------------                                                ----------------
    sizes and checksums of files (shared out in a node)    ◄─►  damaged? nothing is loaded
    small states read, names and shapes compared           ◄─►  damaged or unfit? nothing is loaded
    load hooks; schedulers, registered objects, loaders    ◄─►  refused? put back as they were
    weights, optimizers, random numbers                    ◄─►  all through

A refusal is the same exception on all processes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from nbaccel.base.errors import CheckpointDamaged, ConfigError
from nbaccel.base.log import get_logger
from nbaccel.base.weight_files import file_problem
from nbaccel.config.given_values import shown
from nbaccel.plan.contracts.training import Place, ShardedCheckpoints
from nbaccel.train.checkpoint import layout
from nbaccel.train.checkpoint.files import read_torch_file
from nbaccel.train.checkpoint.folder_writing import all_succeed, find_checkpoint, read_manifest
from nbaccel.train.checkpoint.left_out import read_left_out
from nbaccel.train.checkpoint.own_disks import check_is_own_part, ranks_of_part
from nbaccel.train.checkpoint.saved_parts import (
    LoaderState,
    OptimizerFile,
    PrecisionState,
    RandomStates,
    RegisteredLarge,
    RegisteredState,
    SavedPart,
    ShardFolder,
    SmallState,
    WaitingGradients,
    WeightsFile,
)
from nbaccel.train.checkpoint.saving import CheckpointParts, check_contents
from nbaccel.train.collectives import Collectives

LoadHook = Callable[[list[Any], str], None]
_log = get_logger(__name__)


def load_state(
    folder: str | Path,
    parts: CheckpointParts,
    place: Place,
    collectives: Collectives,
    *,
    map_location: str | None = None,
    load_kwargs: Mapping[str, Any] | None = None,
    hooks: Iterable[LoadHook] = (),
    **options: Any,
) -> int | None:
    """Put back what :func:`~nbaccel.train.checkpoint.save_state` wrote; a collective.

    Nothing in the files is run: states hold plain data, and those of registered objects also
    instances of classes that the object's own state has at the time. ``weights_only=False`` in
    `load_kwargs` lifts that, and lets a file run any code. Load such only if you trust who wrote
    it.
    """
    device = _read_device(map_location, place)
    text = f"load_state({str(folder)!r})"
    # Walked through several times below, which a generator does not allow.
    hooks = list(hooks)
    read_options = {"map_location": device, **(load_kwargs or {})}
    with all_succeed(collectives, text):
        source_folder = find_checkpoint(Path(folder))
        if parts.sharder is not None:
            check_is_own_part(source_folder, place)
        check_contents(source_folder, parts, with_models=not hooks)
        load = _CheckpointLoad(source_folder, parts, place, read_options, device, options)
        damaged = load.damaged_files()
    # Two exchanges, because a damaged file must not even be read for comparison.
    _judge_together(collectives, text, damaged, [])
    with all_succeed(collectives, text):
        damaged, unfit = load.check(with_models=not hooks)
    _judge_together(collectives, text, damaged, unfit)
    # Around `all_succeed`, which raises here if another process failed: this one undoes its part,
    # too.
    with load.undone_on_failure():
        with all_succeed(collectives, text):
            load.run_hooks(hooks)
            load.load_small_states()
    with all_succeed(collectives, text):
        load.load_large_parts()
    return load.step


def _judge_together(
    collectives: Collectives, call_text: str, damaged: list[str], unfit: list[str]
) -> None:
    """Raise the problems of all processes, the same on all."""
    answers = collectives.answers(f"{call_text}: all files read", [damaged, unfit])
    for position, error_class in enumerate((CheckpointDamaged, ConfigError)):
        # Several processes may find the same problem in a common file: it is reported once.
        if texts := dict.fromkeys(text for answer in answers for text in answer[position]):
            raise error_class(*texts)


def _read_device(map_location: str | None, place: Place) -> torch.device:
    if map_location not in {None, "cpu", "on_device"}:
        raise TypeError(
            f"load_state(map_location={shown(map_location)}) must be 'cpu' or 'on_device'. "
            "States go where their model is in any case. Leave it out."
        )
    return place.device if map_location == "on_device" else torch.device("cpu")


class _CheckpointLoad:
    """One process's share of a load.

    Attributes:
        step: The accumulation step; None where no file has it.
    """

    def __init__(
        self,
        folder: Path,
        parts: CheckpointParts,
        place: Place,
        read_options: Mapping[str, Any],
        device: torch.device,
        options: Mapping[str, Any],
    ) -> None:
        self._folder = folder
        self._parts = parts
        self._place = place
        self._read_options = read_options
        self._device = device
        self._options = options
        self.step: int | None = None
        self._undo_steps: list[Callable[[], Any]] = []
        self._damaged: list[str] = []
        self._recorded = {}
        try:
            self._recorded = dict(read_manifest(folder))
        except CheckpointDamaged as error:
            self._damaged += error.mistakes
        self._left_out = read_left_out(folder)
        self._models = self._find_models()
        self._optimizers = list(self._find_optimizers())
        self._small = [*self._find_small_states(), *self._find_loaders()]
        self._large = list(self._find_large())

    # --------------------------------------------------------------------- what is there

    def _existing_file(self, *file_names: str) -> Path | None:
        """The first that exists, or that the manifest has: a deleted file is told as missing."""
        for file_name in file_names:
            if file_name in self._recorded or (self._folder / file_name).exists():
                return self._folder / file_name
        return None

    def _find_models(self) -> dict[int, WeightsFile | ShardFolder]:
        """By number; a load hook's own files are not known."""
        found: dict[int, WeightsFile | ShardFolder] = {}
        sharder = self._parts.sharder
        for number, model in enumerate(self._parts.models):
            bases = (layout.SAFE_WEIGHTS, layout.PICKLED_WEIGHTS)
            path = self._existing_file(*(layout.numbered_name(base, number) for base in bases))
            if sharder and (shards := self._folder / sharder.shard_folder(number)).is_dir():
                optimizer = self._parts.optimizer_of(model)
                found[number] = self._shard_folder(sharder, shards, model, optimizer)
            elif path is not None:
                found[number] = WeightsFile(
                    path=path,
                    model=model,
                    strategy=self._parts.strategy,
                    left_out=self._left_out.get(number, frozenset()),
                    device=self._device,
                    options=self._options,
                )
        return found

    def _shard_folder(
        self,
        sharder: ShardedCheckpoints,
        path: Path,
        model: nn.Module,
        optimizer: Optimizer | None,
    ) -> ShardFolder:
        numbers = (number for number, each in enumerate(self._parts.models) if each is model)
        return ShardFolder(
            path=path,
            model=model,
            optimizer=optimizer,
            strategy=self._parts.strategy,
            sharder=sharder,
            left_out=self._left_out.get(next(numbers, -1), frozenset()),
            ranks_there=ranks_of_part(self._folder),
        )

    def _find_optimizers(self) -> Iterator[SavedPart]:
        """Those with a file or folder of their own; the first one's shards are the model's."""
        sharder = self._parts.sharder
        for number, (optimizer, model) in enumerate(self._parts.plain_optimizers()):
            shards = self._folder / layout.OPTIMIZER_SHARDS.format(number)
            name = layout.numbered_name(layout.OPTIMIZER_FILE, number)
            if model is not None and sharder is not None and shards.is_dir():
                yield self._shard_folder(sharder, shards, model, optimizer)
            # Without a model it cannot be in shards: its file is listed even if it is missing.
            elif model is None or self._existing_file(name) is not None:
                yield OptimizerFile(
                    path=self._folder / name,
                    optimizer=optimizer,
                    model=model,
                    strategy=self._parts.strategy,
                    read_options=self._read_options,
                )

    def _find_small_states(self) -> Iterator[SmallState]:
        parts = self._parts
        options = self._read_options
        for number, scheduler in enumerate(parts.schedulers):
            path = self._folder / layout.numbered_name(layout.SCHEDULER_FILE, number)
            yield SmallState(path=path, target=scheduler, read_options=options)
        if parts.scaler is not None:
            path = self._folder / layout.SCALER_FILE
            yield SmallState(path=path, target=parts.scaler, read_options={})
        # A precision without a file, or one saved under another, begins with no history.
        precision_path = self._existing_file(layout.PRECISION_FILE)
        precision = parts.precision_state
        if precision_path is not None and precision.state_dict():
            yield PrecisionState(path=precision_path, target=precision, read_options={})
        for path, custom_object in self._registered():
            if not isinstance(custom_object, (nn.Module, Optimizer)):
                yield RegisteredState(path=path, target=custom_object, read_options=options)

    def _registered(self) -> Iterator[tuple[Path, Any]]:
        for number, custom_object in enumerate(self._parts.custom):
            yield self._folder / layout.CUSTOM_OBJECT_FILE.format(number), custom_object

    def _find_loaders(self) -> Iterator[LoaderState]:
        for number, loader in self._parts.stateful_loaders():
            is_stateful = bool(getattr(loader, "use_stateful_dataloader", False))
            name = layout.loader_file(number, stateful=is_stateful, rank=self._place.rank)
            path = self._existing_file(name, layout.loader_file(number, stateful=is_stateful))
            if path is not None:
                yield LoaderState(
                    path=path, target=loader, read_options=self._read_options, is_common=False
                )

    def _find_large(self) -> Iterator[SavedPart]:
        for path, custom_object in self._registered():
            if isinstance(custom_object, (nn.Module, Optimizer)):
                yield RegisteredLarge(path=path, target=custom_object)
        # Sharded gradients are not saved; another strategy's may lie in the folder.
        gradients = self._existing_file(layout.gradients_file(self._place.rank))
        if gradients is not None and self._parts.sharder is None:
            put_back = self._parts.set_gradients
            yield WaitingGradients(
                path=gradients, put_back=put_back, read_options=self._read_options
            )
        # Last, because a `load_state_dict` or a hook of the user's may draw random numbers.
        generators = self._existing_file(layout.random_states_file(self._place.rank))
        if generators is not None:
            yield RandomStates(path=generators, place=self._place)

    @property
    def _all(self) -> list[SavedPart]:
        return [*self._models.values(), *self._optimizers, *self._small, *self._large]

    # --------------------------------------------------------------------- does it fit?

    def damaged_files(self) -> list[str]:
        """Problems of files; each file is read by one process of a node."""
        common = {layout.random_states_file(0)} & {path.name for path in self._folder.iterdir()}
        own: set[str] = set()
        for part in self._all:
            (common if part.is_common else own).update(part.files(self._recorded))
        # Shared out, because reading everything on every process would multiply the time; sorted,
        # because each process of a node takes its share of the same list.
        shared_out = sorted(common)[self._place.local_rank :: self._place.local_world_size]
        problems = (
            (name, file_problem(self._folder / name, self._recorded.get(name)))
            for name in sorted({*own, *shared_out})
        )
        return self._damaged + [
            f"{self._folder / name} {problem}. Nothing has been loaded. Load another checkpoint, "
            "or copy the file again from where it was saved."
            for name, problem in problems
            if problem
        ]

    def check(self, *, with_models: bool) -> tuple[list[str], list[str]]:
        """Compare everything with what it is read into; what is damaged, and what does not fit."""
        damaged: list[str] = []
        unfit: list[str] = []
        weights = [] if with_models else self._weights()
        checks = [part.check for part in self._all if part not in weights]
        for check in (*checks, self._read_step):
            try:
                check()
            except CheckpointDamaged as error:
                damaged += error.mistakes
            except ConfigError as error:
                unfit += error.mistakes
        return damaged, unfit

    def _weights(self) -> list[SavedPart]:
        return [model for model in self._models.values() if isinstance(model, WeightsFile)]

    def _read_step(self) -> None:
        # A run with more processes than the saved one has ranks without a file of their own.
        own = next((part for part in self._large if isinstance(part, RandomStates)), None)
        first = self._existing_file(layout.random_states_file(0))
        states = own.states if own is not None else None
        if states is None and first is not None:
            states = read_torch_file(first)
        self.step = (states or {}).get("step")

    # --------------------------------------------------------------------- loading

    def run_hooks(self, hooks: Sequence[LoadHook]) -> None:
        """Run the hooks, and check the models that they leave against their files."""
        if not hooks:  # all have been compared
            return
        models = list(self._parts.models)
        for load_hook in hooks:
            load_hook(models, str(self._folder))
        remaining: dict[int, WeightsFile | ShardFolder] = {}
        for number, model in enumerate(models):
            saved = self._models.get(number)
            if saved is None:
                raise ConfigError(_missing_weights(self._folder, number))
            saved.model = model
            if isinstance(saved, WeightsFile):
                saved.check()
            else:  # the same choice as in saving: this optimizer's shards are in the folder
                saved.optimizer = self._parts.optimizer_of(model)
            remaining[number] = saved
        self._models = remaining

    @contextlib.contextmanager
    def undone_on_failure(self) -> Iterator[None]:
        """Restore small states if the block fails, here or on another process."""
        try:
            yield
        except BaseException:  # an interrupt, too
            for put_back in reversed(self._undo_steps):
                # An object that refuses its own earlier state cannot be restored; others still can.
                with contextlib.suppress(Exception):
                    put_back()
            raise

    def load_small_states(self) -> None:
        """Schedulers, scaler, registered objects and loaders: any may refuse its state."""
        for part in self._small:
            if (undo_step := part.undo_step()) is not None:
                self._undo_steps.append(undo_step)
            part.load()
        known = {id(part.target) for part in self._small}
        for number, loader in self._parts.stateful_loaders():
            if id(loader) not in known:
                _log.warning(
                    "%s has no state of loader %d: it begins at its first epoch",
                    self._folder,
                    number,
                )

    def load_large_parts(self) -> None:
        """Weights, optimizers, registered models, gradients and random numbers; not undone."""
        for part in (*self._models.values(), *self._optimizers, *self._large):
            part.load()
        if not any(isinstance(part, RandomStates) for part in self._large):
            name = layout.random_states_file(self._place.rank)
            _log.warning("%s has no %s: random numbers begin anew", self._folder, name)


def _missing_weights(folder: Path, number: int) -> str:
    safe_name, pickle_name = (
        layout.numbered_name(base_name, number)
        for base_name in (layout.SAFE_WEIGHTS, layout.PICKLED_WEIGHTS)
    )
    return (
        f"The checkpoint {str(folder)!r} has neither {safe_name} nor {pickle_name}, but model "
        f"{number} is to be loaded, and no load hook took it. Prepare the models that were "
        "saved, or register the hook that loads this one."
    )
