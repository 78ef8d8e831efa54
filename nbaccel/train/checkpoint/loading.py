"""``load_state``: restores what ``save_state`` wrote, if all of it exists and is unchanged.

    each process                                                exchanged by all
    ------------                                                ----------------
    sizes and checksums of files (shared out in a node)    ◄─►  damaged? nothing is loaded
    small states read, names and shapes compared           ◄─►  damaged or unfit? nothing is loaded
    load hooks; schedulers, registered objects, loaders    ◄─►  refused? put back as they were
    weights, optimizers, random numbers                    ◄─►  all through

A refusal is the same exception on all processes. A part that is small is read when it is compared,
and kept; of weights, optimizers and registered models only names and shapes are read before every
process has agreed to load.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from nbaccel.base.errors import CheckpointDamaged, ConfigError
from nbaccel.base.log import get_logger
from nbaccel.base.weight_files import file_problem
from nbaccel.config.given_values import shown
from nbaccel.plan.contracts.training import Place
from nbaccel.train import rng
from nbaccel.train.checkpoint import layout
from nbaccel.train.checkpoint.compatibility import (
    model_problem,
    named_as_in,
    optimizer_problem,
    pickled_shapes,
    read_weights,
    saved_shapes,
    state_problem,
    trained_problem,
)
from nbaccel.train.checkpoint.files import read_torch_file, read_torch_outline
from nbaccel.train.checkpoint.folder_writing import all_succeed, find_checkpoint, read_manifest
from nbaccel.train.checkpoint.own_disks import check_is_own_part, ranks_of_part
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


@dataclass(kw_only=True, eq=False)
class _SavedPart:
    """A file or folder of a checkpoint, on its way back."""

    path: Path
    check: Callable[[], Any]
    """Refuses what does not fit; nothing is changed."""
    load: Callable[[], Any]
    is_common: bool = True
    """Whether all processes read it; others are one process's own."""

    def files(self, recorded: Iterable[str]) -> Iterable[str]:
        """Names of its files below the checkpoint; `recorded` are those of the manifest."""
        if not self.path.is_dir():
            return [self.path.name]
        paths = (path for path in self.path.rglob("*") if path.is_file())
        inside = [name for name in recorded if name.startswith(f"{self.path.name}/")]
        return [*(path.relative_to(self.path.parent).as_posix() for path in paths), *inside]


class _SmallState(_SavedPart):
    """The state of an object with `state_dict` and `load_state_dict`; loading it can be undone."""

    def __init__(
        self,
        path: Path,
        target: Any,
        read: Callable[[Path], Any],
        compare: Callable[[Any], str] | None = None,
        *,
        can_change: bool = True,
        is_common: bool = True,
    ) -> None:
        super().__init__(path=path, check=self._check, load=self._load, is_common=is_common)
        self.target = target
        self._read = read
        self._compare = compare
        self._can_change = can_change
        self._state: Any = None

    def _check(self) -> None:
        self._state = self._read(self.path)
        if self._compare is not None:
            _refuse(self.path, self._compare(self._state))

    def _load(self) -> None:
        self.target.load_state_dict(self._state)

    def undo_step(self) -> Callable[[], Any] | None:
        """What makes the object what it is now; None where its state cannot be copied."""
        with contextlib.suppress(Exception):
            if self._can_change:
                state_before = copy.deepcopy(self.target.state_dict())
                return lambda: self.target.load_state_dict(state_before)
        return None


def _refuse(path: Path, problem: str) -> None:
    if problem:
        raise ConfigError(
            f"{path} {problem}. Nothing has been loaded. Prepare and register the same "
            "objects in the same order as when it was saved, or load another checkpoint."
        )


def _classes_in(state_dict: Any) -> set[type]:
    """Classes of the user's own in a state: instances of them may be read back."""
    classes: set[type] = set()
    pending = [state_dict]
    seen_ids = set()
    while pending:
        value = pending.pop()
        # By id, because values need not be hashable, and a state may contain itself.
        if id(value) in seen_ids:
            continue
        seen_ids.add(id(value))
        value_class = value if isinstance(value, type) else type(value)
        if value_class.__module__ != "builtins":
            classes.add(value_class)
        if isinstance(value, Mapping):
            pending += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple, set, frozenset)):
            pending += value
        elif value is not value_class and not value_class.__module__.startswith(("torch", "numpy")):
            pending += getattr(value, "__dict__", {}).values()
    return classes


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
        self._read: Callable[[Path], Any] = partial(read_torch_file, **read_options)
        self._read_outline: Callable[[Path], Any] = partial(read_torch_outline, **read_options)
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
        self._left_out = layout.read_left_out(folder)
        self._rng_states: dict[str, Any] | None = None
        models = enumerate(parts.models)
        found = {number: self._find_model(number, model) for number, model in models}
        # A load hook's own files are not known.
        self._models = {number: part for number, part in found.items() if part is not None}
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

    def _find_model(self, number: int, model: nn.Module) -> _SavedPart | None:
        sharder = self._parts.sharder
        if sharder and (shards := self._folder / sharder.shard_folder(number)).is_dir():
            return self._shard_folder(shards, number, model, self._parts.optimizer_of(model))
        bases = (layout.SAFE_WEIGHTS, layout.PICKLED_WEIGHTS)
        path = self._existing_file(*(layout.numbered_name(base, number) for base in bases))
        return None if path is None else self._weights_file(path, number, model)

    def _weights_file(self, path: Path, number: int, model: nn.Module) -> _SavedPart:
        strategy = self._parts.strategy
        left_out = self._left_out.get(number, frozenset())

        def check() -> None:
            inner = strategy.unwrap(model)
            is_strict = bool(self._options.get("strict", True))
            if is_strict:
                _refuse(path, trained_problem(inner, left_out))
            shapes = saved_shapes(path, inner)
            _refuse(path, model_problem(inner, shapes, strict=is_strict, left_out=left_out))

        def load() -> None:
            inner = strategy.unwrap(model)
            weights = named_as_in(inner, read_weights(path, inner, self._device))
            # Names have been compared: what is missing is frozen and stays as it is.
            missing = {"strict": False} if left_out else {}
            strategy.load_model_state(model, weights, **{**self._options, **missing})

        return _SavedPart(path=path, check=check, load=load)

    def _shard_folder(
        self, path: Path, number: int, model: nn.Module, optimizer: Optimizer | None
    ) -> _SavedPart:
        """A folder of which every process reads a part: a model, with an optimizer or without."""
        sharder: Any = self._parts.sharder
        left_out = self._left_out.get(number, frozenset())
        ranks_there = ranks_of_part(self._folder)

        def check() -> None:
            _refuse(path, trained_problem(self._parts.strategy.unwrap(model), left_out))
            sharder.check_sharded(
                model, optimizer, path, left_out=left_out, ranks_there=ranks_there
            )

        load = partial(sharder.load_sharded, model, optimizer, path, left_out=left_out)
        return _SavedPart(path=path, check=check, load=load)

    def _find_optimizers(self) -> Iterator[_SavedPart]:
        """Those with a file or folder of their own; the first one's shards are the model's."""
        for number, (optimizer, model) in enumerate(self._parts.plain_optimizers()):
            shards = self._folder / layout.OPTIMIZER_SHARDS.format(number)
            name = layout.numbered_name(layout.OPTIMIZER_FILE, number)
            if model is not None and self._parts.sharder is not None and shards.is_dir():
                models = self._parts.models
                model_number = next(n for n, other in enumerate(models) if other is model)
                yield self._shard_folder(shards, model_number, model, optimizer)
            # Without a model it cannot be in shards: its file is listed even if it is missing.
            elif model is None or self._existing_file(name) is not None:
                yield self._optimizer_file(self._folder / name, optimizer, model)

    def _optimizer_file(
        self, path: Path, optimizer: Optimizer, model: nn.Module | None
    ) -> _SavedPart:
        def check() -> None:
            _refuse(path, optimizer_problem(optimizer, self._read_outline(path)))

        def load() -> None:
            state = self._read(path)
            if model is None:
                optimizer.load_state_dict(state)
            else:
                self._parts.strategy.load_optimizer_state(model, optimizer, state)

        return _SavedPart(path=path, check=check, load=load)

    def _find_small_states(self) -> Iterator[_SmallState]:
        parts = self._parts
        for number, scheduler in enumerate(parts.schedulers):
            path = self._folder / layout.numbered_name(layout.SCHEDULER_FILE, number)
            yield _SmallState(path, scheduler, self._read, partial(state_problem, scheduler))
        if parts.scaler is not None:
            path = self._folder / layout.SCALER_FILE
            compare = partial(state_problem, parts.scaler)
            yield _SmallState(path, parts.scaler, read_torch_file, compare)
        # A precision without a file, or one saved under another, begins with no history; a state
        # of another model is left to the precision.
        precision_path = self._existing_file(layout.PRECISION_FILE)
        precision = parts.precision_state
        if precision_path is not None and precision.state_dict():
            yield _SmallState(precision_path, precision, read_torch_file)
        options = {n: value for n, value in self._read_options.items() if n == "weights_only"}
        for path, custom_object in self._registered():
            if not isinstance(custom_object, (nn.Module, Optimizer)):
                # Plain data, and classes that its state has now.
                classes = _classes_in(custom_object.state_dict())
                read = partial(read_torch_file, allowed=classes, **options)
                yield _SmallState(path, custom_object, read)

    def _registered(self) -> Iterator[tuple[Path, Any]]:
        for number, custom_object in enumerate(self._parts.custom):
            yield self._folder / layout.CUSTOM_OBJECT_FILE.format(number), custom_object

    def _find_loaders(self) -> Iterator[_SmallState]:
        for number, loader in self._parts.stateful_loaders():
            is_stateful = bool(getattr(loader, "use_stateful_dataloader", False))
            name = layout.loader_file(number, stateful=is_stateful, rank=self._place.rank)
            path = self._existing_file(name, layout.loader_file(number, stateful=is_stateful))
            if path is not None:
                compare = partial(_loader_problem, loader)
                # A loader that refuses its state has not changed.
                yield _SmallState(
                    path, loader, self._read, compare, can_change=False, is_common=False
                )

    def _find_large(self) -> Iterator[_SavedPart]:
        for path, custom_object in self._registered():
            if isinstance(custom_object, (nn.Module, Optimizer)):
                yield _registered_large(path, custom_object)
        # Sharded gradients are not saved; another strategy's may lie in the folder.
        gradients = self._existing_file(layout.gradients_file(self._place.rank))
        if gradients is not None and self._parts.sharder is None:
            yield _SavedPart(
                path=gradients,
                check=lambda: self._read_outline(gradients),
                load=lambda: self._parts.set_gradients(self._read(gradients)),
                is_common=False,
            )
        # Last, because a `load_state_dict` or a hook of the user's may draw random numbers.
        generators = self._existing_file(layout.random_states_file(self._place.rank))
        if generators is not None:
            yield _SavedPart(
                path=generators,
                check=lambda: self._check_generators(generators),
                load=lambda: rng.restore_rng_states(self._place, self._rng_states or {}),
                is_common=False,
            )

    def _check_generators(self, path: Path) -> None:
        """Set and undone: only setting a state shows whether a generator accepts it."""
        states = read_torch_file(path)
        try:
            with rng.preserve_rng_states():
                rng.restore_rng_states(self._place, states)
        except Exception as error:  # each generator has its own exceptions for a wrong state
            raise CheckpointDamaged(
                f"{path} holds no states of random number generators "
                f"({type(error).__name__}: {error}). Load another checkpoint."
            ) from error
        self._rng_states = states

    @property
    def _all(self) -> list[_SavedPart]:
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
        # Weights are compared with the models that load hooks leave.
        checked = self._all if with_models else [p for p in self._all if not self._is_weights(p)]
        for check in (*(part.check for part in checked), self._read_step):
            try:
                check()
            except CheckpointDamaged as error:
                damaged += error.mistakes
            except ConfigError as error:
                unfit += error.mistakes
        return damaged, unfit

    def _is_weights(self, part: _SavedPart) -> bool:
        return part in self._models.values() and not part.path.is_dir()

    def _read_step(self) -> None:
        # A run with more processes than the saved one has ranks without a file of their own.
        first = self._existing_file(layout.random_states_file(0))
        states = self._rng_states
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
        remaining: dict[int, _SavedPart] = {}
        for number, model in enumerate(models):
            saved = self._find_model(number, model) if number in self._models else None
            if saved is None:
                raise ConfigError(_missing_weights(self._folder, number))
            remaining[number] = saved
            if not saved.path.is_dir():
                saved.check()
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
        name = layout.random_states_file(self._place.rank)
        if self._existing_file(name) is None:
            _log.warning("%s has no %s: random numbers begin anew", self._folder, name)


def _registered_large(path: Path, target: nn.Module | Optimizer) -> _SavedPart:
    """A registered model or optimizer, of which no second copy is kept."""

    def check() -> None:
        if isinstance(target, nn.Module):
            _refuse(path, model_problem(target, pickled_shapes(path)))
        else:
            _refuse(path, optimizer_problem(target, read_torch_outline(path)))

    return _SavedPart(
        path=path, check=check, load=lambda: target.load_state_dict(read_torch_file(path))
    )


def _loader_problem(loader: Any, state: Any) -> str:
    """Loaders of nbaccel compare it themselves, and torchdata's cannot."""
    compare = getattr(loader, "check_state_dict", None)
    if compare is not None:
        compare(state)
        return ""
    return "" if getattr(loader, "use_stateful_dataloader", False) else state_problem(loader, state)


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
