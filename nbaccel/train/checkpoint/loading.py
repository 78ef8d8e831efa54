"""``load_state``: restores what ``save_state`` wrote, if all of it exists and is unchanged.

Small states are read first and kept; of weights, optimizers and gradients only names and shapes.

    each process                                                exchanged by all
    ------------                                                ----------------
    sizes and checksums of files (shared out in a node)    ◄─►  damaged? nothing is loaded
    states read, names and shapes compared                 ◄─►  damaged or unfit? nothing is loaded
    load hooks; schedulers, registered objects, loaders    ◄─►  refused? put back as they were
    weights, optimizers, random numbers                    ◄─►  all through

A refusal is the same exception on all processes.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.optim import Optimizer

from nbaccel.base.errors import CheckpointDamaged, ConfigError
from nbaccel.base.intact import Recorded
from nbaccel.base.log import get_logger
from nbaccel.config.mistakes import shown
from nbaccel.plan.contracts.place import Place
from nbaccel.plan.contracts.strategy import ShardedCheckpoints
from nbaccel.train import rng
from nbaccel.train.checkpoint import folder_writing, layout
from nbaccel.train.checkpoint.compatibility import (
    CheckpointSources,
    SourceShards,
    find_sources,
    model_problem,
    named_as_in,
    optimizer_problem,
    state_problem,
)
from nbaccel.train.checkpoint.files import read_torch_file, read_torch_outline
from nbaccel.train.checkpoint.folder_writing import all_succeed, find_checkpoint
from nbaccel.train.checkpoint.left_out import trained_problem
from nbaccel.train.checkpoint.own_disks import check_is_own_part, ranks_of_part
from nbaccel.train.checkpoint.saving import CheckpointParts, check_contents
from nbaccel.train.collectives import Collectives


@dataclass(slots=True)
class LoadVerdict:
    """The problems of a checkpoint.

    Attributes:
        damaged: Files that are not as they were saved.
        unfit: Files that do not fit what is to be loaded.
    """

    damaged: list[str] = field(default_factory=list)
    unfit: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Raise the problems, if there are any."""
        if self.damaged:
            raise CheckpointDamaged(*self.damaged)
        if self.unfit:
            raise ConfigError(*self.unfit)


class LoadTrial:
    """Reads and checks the files of one process; small states are kept.

    Attributes:
        schedulers: States by number.
        scaler: Its state, if there is one.
        precision: The state of the precision; None where it has none.
        custom: States of registered objects by number; models and optimizers among them are read
            when they are loaded.
        loaders: States by number.
        generators: Random states of this process; None where it has none.
        step: The accumulation step; None where no file has it.
        verdict: The problems that were found.
    """

    def __init__(
        self, sources: CheckpointSources, parts: CheckpointParts, options: Mapping[str, Any]
    ) -> None:
        self._sources = sources
        self._parts = parts
        self._options = dict(options)
        self.schedulers: dict[int, Any] = {}
        self.scaler: Any = None
        self.precision: Any = None
        self.custom: dict[int, Any] = {}
        self.loaders: dict[int, Any] = {}
        self.generators: Any = None
        self.step: int | None = None
        self.verdict = LoadVerdict()

    def run(self, place: Place, *, strict: bool, with_models: bool) -> LoadVerdict:
        """Read everything."""
        if with_models:
            for object_number, path in self._sources.weights.items():
                self._attempt_step(
                    partial(
                        self.check_weights,
                        path,
                        self._parts.models[object_number],
                        strict,
                        self._sources.left_out.get(object_number, frozenset()),
                    )
                )
        for object_number, path in self._sources.optimizers.items():
            self._attempt_step(partial(self._check_optimizer, path, object_number))
        for check in self._shard_checks():
            self._attempt_step(check)
        for read_step in (self._read_schedulers, self._read_loaders, self._read_custom):
            self._attempt_step(read_step)
        if self._sources.gradients is not None:
            self._attempt_step(
                partial(read_torch_outline, self._sources.gradients, **self._options)
            )
        self._attempt_step(partial(self._read_generators, place))
        return self.verdict

    def _attempt_step(self, step: Callable[[], Any]) -> None:
        try:
            step()
        except CheckpointDamaged as error:
            self.verdict.damaged += error.mistakes
        except ConfigError as error:
            self.verdict.unfit += error.mistakes

    # --------------------------------------------------------------------- names and shapes

    def check_weights(
        self, path: Path, model: nn.Module, strict: bool, left_out: frozenset[str]
    ) -> None:
        """Compare a file of weights with a model."""
        model = self._parts.strategy.unwrap(model)
        saved_shapes = (
            _safetensors_shapes(path) if path.suffix == ".safetensors" else _pickled_shapes(path)
        )
        # A file has one of the names of tied tensors; the others count as present.
        for tensor_name, tied_name in tied_tensor_names(model).items():
            if tensor_name not in saved_shapes and tied_name in saved_shapes:
                saved_shapes[tensor_name] = saved_shapes[tied_name]
        if strict:
            _refuse_problem(path, trained_problem(model, left_out))
        _refuse_problem(path, model_problem(model, saved_shapes, strict=strict, left_out=left_out))

    def _check_optimizer(self, path: Path, number: int) -> None:
        optimizer, _ = self._parts.plain_optimizers()[number]
        _refuse_problem(
            path, optimizer_problem(optimizer, read_torch_outline(path, **self._options))
        )

    def _shard_checks(self) -> Iterator[Callable[[], None]]:
        sharder = self._parts.sharder
        if sharder is not None:
            sources = self._sources
            for source_shards in (
                *sources.sharded_models.values(),
                *sources.sharded_optimizers.values(),
            ):
                yield partial(self._check_shards, sharder, source_shards)

    def _check_shards(self, sharder: ShardedCheckpoints, source_shards: SourceShards) -> None:
        model = self._parts.strategy.unwrap(source_shards.model)
        _refuse_problem(source_shards.folder, trained_problem(model, source_shards.left_out))
        sharder.check_sharded(
            source_shards.model,
            source_shards.optimizer,
            source_shards.folder,
            left_out=source_shards.left_out,
            ranks_there=ranks_of_part(self._sources.folder),
        )

    # --------------------------------------------------------------------- what is small

    def _read_schedulers(self) -> None:
        for number, path in enumerate(self._sources.schedulers):
            self.schedulers[number] = self._read_state(path, self._parts.schedulers[number])
        if self._sources.scaler is not None:
            self.scaler = read_torch_file(self._sources.scaler)
            _refuse_problem(self._sources.scaler, state_problem(self._parts.scaler, self.scaler))
        if self._sources.precision is not None:
            self.precision = read_torch_file(self._sources.precision)

    def _read_loaders(self) -> None:
        loaders = dict(self._parts.stateful_loaders())
        for number, path in self._sources.loaders.items():
            state = self.loaders[number] = read_torch_file(path, **self._options)
            method = getattr(loaders[number], "check_state_dict", None)
            if method is not None:
                method(state)
            elif not getattr(loaders[number], "use_stateful_dataloader", False):
                _refuse_problem(path, state_problem(loaders[number], state))

    def _read_custom(self) -> None:
        for number, (path, custom_object) in enumerate(
            zip(self._sources.custom, self._parts.custom, strict=True)
        ):
            if isinstance(custom_object, nn.Module):
                _refuse_problem(path, model_problem(custom_object, _pickled_shapes(path)))
            elif isinstance(custom_object, Optimizer):
                _refuse_problem(path, optimizer_problem(custom_object, read_torch_outline(path)))
            else:
                self.custom[number] = read_custom(path, custom_object, self._options)

    def _read_state(self, path: Path, stateful_object: Any) -> Any:
        saved_state = read_torch_file(path, **self._options)
        _refuse_problem(path, state_problem(stateful_object, saved_state))
        return saved_state

    def _read_generators(self, place: Place) -> None:
        sources = self._sources
        first_states = (
            {} if sources.first_generators is None else read_torch_file(sources.first_generators)
        )
        # A run with more processes than the saved one has ranks without a file of their own.
        states = None if sources.generators is None else read_torch_file(sources.generators)
        try:
            self.step = (first_states if states is None else states).get("step")
            if states is not None:
                # Set and undone: only setting a state shows whether a generator accepts it.
                with rng.preserve_rng_states():
                    rng.restore_rng_states(place, states)
        except Exception as error:  # each generator has its own exceptions for a wrong state
            raise CheckpointDamaged(
                f"{sources.generators} holds no states of random number generators "
                f"({type(error).__name__}: {error}). Load another checkpoint."
            ) from error
        self.generators = states


def read_custom(path: Path, custom_object: Any, options: Mapping[str, Any]) -> Any:
    """The state of a registered object: plain data, and classes that its state has now."""
    read_options = {name: value for name, value in options.items() if name == "weights_only"}
    return read_torch_file(path, allowed=_classes_in(custom_object.state_dict()), **read_options)


def _classes_in(state_dict: Any) -> set[type]:
    """Classes of the user's own in a state: instances of them may be read back."""
    classes: set[type] = set()
    pending_values = [state_dict]
    seen_ids = set()
    while pending_values:
        state_value = pending_values.pop()
        # By id, because values need not be hashable, and a state may contain itself.
        if id(state_value) in seen_ids:
            continue
        seen_ids.add(id(state_value))
        value_class = state_value if isinstance(state_value, type) else type(state_value)
        if value_class.__module__ != "builtins":
            classes.add(value_class)
        if isinstance(state_value, Mapping):
            pending_values += [*state_value.keys(), *state_value.values()]
        elif isinstance(state_value, (list, tuple, set, frozenset)):
            pending_values += state_value
        elif not isinstance(state_value, type) and not value_class.__module__.startswith(
            ("torch", "numpy")
        ):
            pending_values += getattr(state_value, "__dict__", {}).values()
    return classes


def _refuse_problem(path: Path, text: str) -> None:
    if text:
        raise ConfigError(
            f"{path} {text}. Nothing has been loaded. Prepare and register the same "
            "objects in the same order as when it was saved, or load another checkpoint."
        )


def _safetensors_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(path, "numpy") as file:
            tensor_names = file.keys()
            stored_shapes = {
                # Read from the header; no tensor is loaded.
                tensor_name: tuple(file.get_slice(tensor_name).get_shape())
                for tensor_name in tensor_names
            }
            tied_metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise CheckpointDamaged(
            f"{path} cannot be read ({error}). Nothing has been loaded. Load another checkpoint."
        ) from error
    tied_shapes = {
        tensor_name: stored_shapes[tied_name]
        for tensor_name, tied_name in tied_metadata.items()
        if tied_name in stored_shapes
    }
    return {**tied_shapes, **stored_shapes}


def _pickled_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    # Only shapes: the weights themselves are read later, once every process agrees to load.
    state_outline = read_torch_outline(path)
    if not isinstance(state_outline, Mapping):
        raise ConfigError(f"{path} holds no weights by name, but a {type(state_outline).__name__}.")
    return {
        str(name): tuple(tensor_outline.shape)
        for name, tensor_outline in state_outline.items()
        if hasattr(tensor_outline, "shape")
    }


def tied_tensor_names(model: nn.Module) -> dict[str, str]:
    """Names of tied tensors, each with another name of the same tensor."""
    names_by_tensor: dict[int, list[str]] = {}
    for list_named in (model.named_parameters, model.named_buffers):
        for tensor_name, tensor in list_named(remove_duplicate=False):
            names_by_tensor.setdefault(id(tensor), []).append(tensor_name)
    return {
        tensor_name: tied_name
        for tied_names in names_by_tensor.values()
        for tensor_name in tied_names
        for tied_name in tied_names
        if tied_name != tensor_name
    }


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
    is_strict = bool(options.get("strict", True))
    with all_succeed(collectives, text):
        source_folder = find_checkpoint(Path(folder))
        if parts.sharder is not None:
            check_is_own_part(source_folder, place)
        check_contents(source_folder, parts, with_models=not hooks)
        recorded, verdict = _read_recorded(source_folder)
        sources = find_sources(source_folder, parts, place, recorded)
        verdict.damaged += sources.damaged(place)
    # Two exchanges, because a damaged file must not even be read for comparison.
    _judge_together(collectives, text, verdict)
    load_trial = LoadTrial(sources, parts, read_options)
    with all_succeed(collectives, text):
        verdict = load_trial.run(place, strict=is_strict, with_models=not hooks)
    _judge_together(collectives, text, verdict)
    loader = _StateLoader(sources, parts, load_trial, read_options)
    # Around `all_succeed`, which raises here if another process failed: this one undoes its part,
    # too.
    with loader.undone_on_failure():
        with all_succeed(collectives, text):
            remaining_models = loader.models_left_by(hooks, is_strict)
            loader.load_small_states()
    with all_succeed(collectives, text):
        loader.load_models(remaining_models, device, options)
        loader.load_optimizers()
        loader.load_large_objects()
        loader.load_gradients()
        # Last, because a `load_state_dict` or a hook of the user's may draw random numbers.
        loader.generators(place)
    return load_trial.step


def _read_recorded(folder: Path) -> tuple[Mapping[str, Recorded], LoadVerdict]:
    try:
        return folder_writing.read_manifest(folder), LoadVerdict()
    except CheckpointDamaged as error:
        return {}, LoadVerdict(damaged=list(error.mistakes))


def _judge_together(collectives: Collectives, call_text: str, own_verdict: LoadVerdict) -> None:
    """Raise the problems of all processes, the same on all."""
    verdicts_by_rank = collectives.answers(
        f"{call_text}: all files read", [own_verdict.damaged, own_verdict.unfit]
    )
    # Several processes may find the same problem in a common file: it is reported once.
    LoadVerdict(
        damaged=list(
            dict.fromkeys(
                problem_text for damaged, _ in verdicts_by_rank for problem_text in damaged
            )
        ),
        unfit=list(
            dict.fromkeys(problem_text for _, unfit in verdicts_by_rank for problem_text in unfit)
        ),
    ).check()


def _read_device(map_location: str | None, place: Place) -> torch.device:
    if map_location not in {None, "cpu", "on_device"}:
        raise TypeError(
            f"load_state(map_location={shown(map_location)}) must be 'cpu' or 'on_device'. "
            "States go where their model is in any case. Leave it out."
        )
    return place.device if map_location == "on_device" else torch.device("cpu")


class _StateLoader:
    """One process's share of a load, once everything has been read and found to fit."""

    def __init__(
        self,
        sources: CheckpointSources,
        parts: CheckpointParts,
        trial: LoadTrial,
        reading: Mapping[str, Any],
    ) -> None:
        self._sources = sources
        self._parts = parts
        self._trial = trial
        self._read_options = dict(reading)
        self._undo_steps: list[Callable[[], Any]] = []

    def models_left_by(self, hooks: Sequence[LoadHook], strict: bool) -> list[nn.Module]:
        """Run the hooks, and check the models that they leave against their files."""
        models = list(self._parts.models)
        for load_hook in hooks:
            load_hook(models, str(self._sources.folder))
        # Without hooks `LoadTrial.run` has compared them all.
        for number in range(len(models) if hooks else 0):
            if number in self._sources.weights:
                path = self._sources.weights[number]
                left_out = self._sources.left_out.get(number, frozenset())
                self._trial.check_weights(path, models[number], strict, left_out)
            elif number not in self._sources.sharded_models:
                raise ConfigError(_missing_weights(self._sources.folder, number))
        return models

    # --------------------------------------------------------------------- can be undone

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
        parts = self._parts
        trial = self._trial
        for number, saved_state in trial.schedulers.items():
            self._load_undoable(parts.schedulers[number], saved_state)
        if parts.scaler is not None:
            self._load_undoable(parts.scaler, trial.scaler)
        if trial.precision is not None:
            previous_state = copy.deepcopy(parts.precision_state())
            self._undo_steps.append(lambda: parts.load_precision_state(previous_state))
            parts.load_precision_state(trial.precision)
        for number, saved_state in trial.custom.items():
            self._load_undoable(parts.custom[number], saved_state)
        self._load_loaders()

    def _load_undoable(self, stateful_object: Any, saved_state: Any) -> None:
        with contextlib.suppress(Exception):  # a state that cannot be copied cannot be put back
            previous_state = copy.deepcopy(stateful_object.state_dict())
            self._undo_steps.append(lambda: stateful_object.load_state_dict(previous_state))
        stateful_object.load_state_dict(saved_state)

    def _load_loaders(self) -> None:
        for number, loader in self._parts.stateful_loaders():
            if number in self._trial.loaders:
                loader.load_state_dict(self._trial.loaders[number])
            else:
                _log.warning(
                    "%s has no state of loader %d: it begins at its first epoch",
                    self._sources.folder,
                    number,
                )

    # --------------------------------------------------------------------- cannot be undone

    def load_models(
        self, models: Sequence[nn.Module], device: torch.device, options: Mapping[str, Any]
    ) -> None:
        """Weights, by number of those that hooks have left."""
        sources = self._sources
        strategy = self._parts.strategy
        for model_number, model in enumerate(models):
            model_shards = sources.sharded_models.get(model_number)
            if model_shards is not None and self._parts.sharder is not None:
                # The same choice as in saving: this optimizer's shards are in the model's folder.
                optimizer = self._parts.optimizer_of(model)
                self._parts.sharder.load_sharded(
                    model, optimizer, model_shards.folder, left_out=model_shards.left_out
                )
            else:
                path = sources.weights[model_number]
                own_model = strategy.unwrap(model)
                saved_weights = named_as_in(own_model, _read_weights(path, own_model, device))
                # Names have been compared: what is missing is frozen and stays as it is.
                is_partial = bool(sources.left_out.get(model_number))
                load_options = {**options, "strict": False} if is_partial else options
                strategy.load_model_state(model, saved_weights, **load_options)

    def load_optimizers(self) -> None:
        """Optimizers' states."""
        strategy = self._parts.strategy
        sharder = self._parts.sharder
        for number, (optimizer, model) in enumerate(self._parts.plain_optimizers()):
            shards = self._sources.sharded_optimizers.get(number)
            path = self._sources.optimizers.get(number)
            if shards is not None and sharder is not None:
                sharder.load_sharded(
                    shards.model,
                    optimizer,
                    shards.folder,
                    left_out=shards.left_out,
                )
            elif path is not None and model is None:
                optimizer.load_state_dict(read_torch_file(path, **self._read_options))
            elif path is not None and model is not None:
                strategy.load_optimizer_state(
                    model, optimizer, read_torch_file(path, **self._read_options)
                )

    def load_large_objects(self) -> None:
        """Registered models and optimizers, of which no second copy is kept."""
        for number, custom_object in enumerate(self._parts.custom):
            if number not in self._trial.custom:
                custom_object.load_state_dict(read_torch_file(self._sources.custom[number]))

    def load_gradients(self) -> None:
        """Gradients that wait for an optimizer step."""
        if self._sources.gradients is not None:
            self._parts.set_gradients(
                read_torch_file(self._sources.gradients, **self._read_options)
            )

    def generators(self, place: Place) -> None:
        """Continue random numbers where they were saved."""
        if self._trial.generators is not None:
            rng.restore_rng_states(place, self._trial.generators)
        else:
            name = layout.random_states_file(place.rank)
            _log.warning("%s has no %s: random numbers begin anew", self._sources.folder, name)


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


def _read_weights(path: Path, model: nn.Module, device: torch.device) -> dict[str, Any]:
    if path.suffix != ".safetensors":
        return dict(read_torch_file(path, map_location=device))
    return _read_safetensors(path, model, device)


def _read_safetensors(path: Path, model: nn.Module, device: torch.device) -> dict[str, Any]:
    """Weights by name, including those that were not written because they are tied to others."""
    with safe_open(path, framework="pt", device=str(device)) as file:
        weights_by_name = {tensor_name: file.get_tensor(tensor_name) for tensor_name in file.keys()}  # noqa: SIM118 - safe_open has no __iter__
        # huggingface_hub notes in the metadata which name a tied tensor was stored under.
        tied_names = {**tied_tensor_names(model), **(file.metadata() or {})}
    for tensor_name, tied_name in tied_names.items():
        if tensor_name not in weights_by_name and tied_name in weights_by_name:
            weights_by_name[tensor_name] = weights_by_name[tied_name]
    return weights_by_name
