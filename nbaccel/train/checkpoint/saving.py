"""``save_state``: writes everything that a run needs to continue."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from nbaccel.base import torch_private
from nbaccel.base.errors import ConfigError
from nbaccel.plan.contracts.training import (
    ModelShards,
    Place,
    Precision,
    ShardedCheckpoints,
    Strategy,
)
from nbaccel.train import rng
from nbaccel.train.checkpoint import files
from nbaccel.train.checkpoint.files import save
from nbaccel.train.checkpoint.folder_writing import FolderDisks, new_checkpoint, send_to_writers
from nbaccel.train.collectives import Collectives


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointParts:
    """What is saved together, in the order in which it was prepared."""

    strategy: Strategy  # knows how the models are wrapped or sharded
    models: Sequence[nn.Module] = ()  # models, wrapped or not
    optimizers: Sequence[Any] = ()  # torch optimizers, or objects that have theirs as ``optimizer``
    schedulers: Sequence[Any] = ()  # objects with `state_dict` and `load_state_dict`
    loaders: Sequence[Any] = ()  # data loaders; those without `state_dict` are passed over
    scaler: torch.amp.GradScaler | None = None  # the loss scaler of fp16, if there is one
    # What layers compute in; it may have a state of its own.
    precision: Precision = field(default_factory=Precision)
    custom: Sequence[Any] = ()  # registered objects
    in_shards: bool = False  # whether every process is to write its shards, if the strategy can
    # Whether gradients of some batches wait for an optimizer step. They are saved, too, unless they
    # are sharded: torch gives no access to those.
    amid_group: bool = False
    leaves_out_frozen: bool = False  # whether parameters that are not trained are not saved

    @property
    def sharder(self) -> ShardedCheckpoints | None:
        """The strategy, if it can read and write shards."""
        return self.strategy if isinstance(self.strategy, ShardedCheckpoints) else None

    @property
    def precision_state(self) -> SimpleNamespace:
        """What the precision keeps beside weights and optimizers, as an object with a state."""
        models = [self.strategy.unwrap(model) for model in self.models]
        return SimpleNamespace(
            state_dict=partial(self.precision.state_dict, models),
            load_state_dict=partial(self.precision.load_state_dict, models),
        )

    def plain_optimizers(self) -> list[tuple[torch.optim.Optimizer, nn.Module | None]]:
        """Torch's own optimizers, each with the model whose parameters it steps."""
        inner = [getattr(optimizer, "optimizer", optimizer) for optimizer in self.optimizers]
        return [(optimizer, self._model_of(optimizer)) for optimizer in inner]

    def _model_of(self, optimizer: torch.optim.Optimizer) -> nn.Module | None:
        engine_model = getattr(optimizer, "model", None)  # an engine's optimizer says it
        if any(model is engine_model for model in self.models):
            return engine_model
        stepped_ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for model in self.models:
            if any(id(parameter) in stepped_ids for parameter in model.parameters()):
                return model
        return None

    def gradients(self) -> dict[int, dict[str, torch.Tensor]]:
        """This process's gradients by number of the model and name of the parameter."""
        return {
            number: {
                name: parameter.grad
                for name, parameter in self.strategy.unwrap(model).named_parameters()
                if parameter.grad is not None
            }
            for number, model in enumerate(self.models)
        }

    def set_gradients(self, saved_gradients: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
        """Restore what :meth:`gradients` gave; other parameters get no gradient."""
        for number, model in enumerate(self.models):
            for name, parameter in self.strategy.unwrap(model).named_parameters():
                saved = saved_gradients.get(number, {}).get(name)
                parameter.grad = None if saved is None else saved.to(parameter.device)

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer | None:
        """The first optimizer that steps a model's parameters; its shards lie with the model's."""
        pairs = self.plain_optimizers()
        return next((optimizer for optimizer, stepped in pairs if stepped is model), None)

    def stateful_loaders(self) -> list[tuple[int, Any]]:
        """Loaders with a `state_dict`, by their number among all."""
        numbered = enumerate(self.loaders)
        return [(number, loader) for number, loader in numbered if hasattr(loader, "state_dict")]


def check_checkpointable(objects: Sequence[Any]) -> None:
    """Refuse objects that cannot be part of a checkpoint."""
    mistakes = []
    for number, registered in enumerate(objects):
        methods = ("state_dict", "load_state_dict")
        missing = [name for name in methods if not callable(getattr(registered, name, None))]
        if missing:
            mistakes.append(
                f"register_for_checkpointing: object {number}, a {type(registered).__name__}, has "
                f"no {' and no '.join(missing)}: it could not be saved and restored. Give it both."
            )
    if mistakes:
        raise ConfigError(*mistakes)


SaveHook = Callable[[list[Any], list[Any], str], None]


def save_state(
    folder: str | Path,
    parts: CheckpointParts,
    place: Place,
    collectives: Collectives,
    *,
    step: int,
    safe_serialization: bool = True,
    hooks: Iterable[SaveHook] = (),
    series: bool = False,
) -> Path:
    """Save everything that a run needs to continue; a collective.

    The folder appears whole, or, if any process fails or dies, not at all. An existing one of that
    name is replaced in one step; files in it that are not a checkpoint's stay.
    """
    sharder = parts.sharder if parts.in_shards else None
    with new_checkpoint(Path(folder), place, collectives, series=series, sharder=sharder) as (
        partial_folder,
        target,
        disks,
    ):
        _StateWriter(partial_folder, parts, disks, collectives, sharder).write_all(
            list(hooks), place, step, safe_serialization
        )
    return target


@dataclass(eq=False)
class _StateWriter:
    """One process's share of a save.

    A strategy's state dicts are collectives, so a process that fails must take part in all
    of them: it writes no more, and raises its first error when the others are done, too.
    """

    _folder: Path
    _parts: CheckpointParts
    _disks: FolderDisks
    _collectives: Collectives
    _sharder: ShardedCheckpoints | None  # where every process writes its shards

    def __post_init__(self) -> None:
        # Where a node has a disk of its own, its processes find all that they need there.
        self._writes_shared = self._disks.made_folder
        self._met_errors: list[Exception] = []
        self._left_out: dict[int, frozenset[str]] = {}

    def write_all(self, hooks: list[SaveHook], place: Place, step: int, safetensors: bool) -> None:
        self._write_models(hooks, safetensors)
        if self._writes_shared and any(self._left_out.values()):
            self._attempt(partial(files.write_left_out, self._folder, self._left_out))
        self._write_optimizers()
        for number, loader in self._parts.stateful_loaders():
            # Each process has workers, random numbers and a part of the data of its own.
            name = files.loader_file(number, loader, place.rank)
            self._write(name, loader.state_dict, is_own=True)
        for number, scheduler in enumerate(self._parts.schedulers):
            self._write(files.numbered_name(files.SCHEDULER_FILE, number), scheduler.state_dict)
        if self._parts.scaler is not None:
            self._write(files.SCALER_FILE, self._parts.scaler.state_dict)
        if state := self._parts.precision_state.state_dict():
            self._write(files.PRECISION_FILE, state)
        for number, custom_object in enumerate(self._parts.custom):
            self._write(files.CUSTOM_OBJECT_FILE.format(number), custom_object.state_dict)
        # Per process: gradients of an incomplete group have not been reduced yet, so they differ.
        if self._parts.amid_group and self._parts.sharder is None:
            name = files.GRADIENTS_FILE.format(place.rank)
            self._write(name, self._parts.gradients, is_own=True)
        # The step is in this file because Accelerate keeps it there.
        random_states = {"step": step, **rng.capture_rng_states(place)}
        self._write(files.RANDOM_STATES_FILE.format(place.rank), random_states, is_own=True)
        if self._met_errors:
            raise self._met_errors[0]

    def _write_models(self, hooks: list[SaveHook], safetensors: bool) -> None:
        parts = self._parts
        states: list[dict[str, Any]] = []
        left_out_by_state: dict[int, frozenset[str]] = {}
        for number, model in enumerate(parts.models):
            left_out = self._names_left_out(model)
            if self._sharder is not None:
                self._left_out[number] = left_out
                shard_folder = self._sharder.shard_folder(number)
                self._write_shards(model, parts.optimizer_of(model), shard_folder)
                continue
            whole_state = self._on_writers(parts.strategy.model_state(model))
            kept = {n: it for n, it in whole_state.items() if uncompiled_name(n) not in left_out}
            states.append(kept)
            left_out_by_state[id(kept)] = left_out
        # A copy, because hooks may remove models; the weights of all are gathered before they run.
        remaining_models = list(parts.models)
        for save_hook in hooks:
            self._attempt(partial(save_hook, remaining_models, states, str(self._folder)))
        # Numbered as the hooks left the list, which may have removed entries.
        base_name = files.SAFE_WEIGHTS if safetensors else files.PICKLED_WEIGHTS
        for number, state in enumerate(states):
            self._left_out[number] = left_out_by_state.get(id(state), frozenset())
            self._write(files.numbered_name(base_name, number), state, safetensors=safetensors)

    def _write_shards(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, folder_name: str
    ) -> None:
        sharder: Any = self._sharder
        shards = ModelShards(
            model=model,
            optimizer=optimizer,
            folder=self._folder / folder_name,
            left_out=self._names_left_out(model),
            ranks_by_folder=self._disks.ranks_by_folder,
        )
        sharder.save_sharded(shards)

    def _on_writers(self, whole_state: Any) -> Any:
        makers = [ranks[0] for ranks in self._disks.ranks_by_folder]
        return send_to_writers(whole_state, makers, self._collectives, what="save_state: weights")

    def _names_left_out(self, model: nn.Module) -> frozenset[str]:
        if not self._parts.leaves_out_frozen:
            return frozenset()
        is_trained = trained_by_name(self._parts.strategy.unwrap(model))
        return frozenset(name for name, trained in is_trained.items() if not trained)

    def _write_optimizers(self) -> None:
        for number, (optimizer, model) in enumerate(self._parts.plain_optimizers()):
            name = files.numbered_name(files.OPTIMIZER_FILE, number)
            if model is None:
                self._write(name, optimizer.state_dict)
            elif self._sharder is None:
                state = self._on_writers(self._parts.strategy.optimizer_state(model, optimizer))
                self._write(name, state)
            # The model's first optimizer has been written into the model's own shard folder.
            elif optimizer is not self._parts.optimizer_of(model):
                self._write_shards(model, optimizer, files.OPTIMIZER_SHARDS.format(number))

    def _write(
        self, file_name: str, state: Any, *, safetensors: bool = False, is_own: bool = False
    ) -> None:
        """Write a state, or what makes it: a file of every process, or one per folder."""
        if is_own or self._writes_shared:
            path = self._folder / file_name
            self._attempt(lambda: save(state() if callable(state) else state, path, safetensors))

    def _attempt(self, step: Callable[[], None]) -> None:
        if self._met_errors:
            return
        try:
            step()
        except Exception as error:  # raised at the end of `write_all`, see the class
            self._met_errors.append(error)


def uncompiled_name(tensor_name: str) -> str:
    """The name of a tensor in a model that is not compiled."""
    # The model or the saved one may have been compiled, without the other being so.
    return tensor_name.replace(torch_private.COMPILED_PREFIX, "")


def trained_by_name(model: nn.Module) -> dict[str, bool]:
    """Which parameters are trained, those of tied ones under all their names."""
    named = model.named_parameters(remove_duplicate=False)
    return {uncompiled_name(name): parameter.requires_grad for name, parameter in named}
