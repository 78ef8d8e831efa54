"""``save_state``: writes everything that a run needs to continue."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from nbaccel.base import atomic
from nbaccel.base.errors import ConfigError
from nbaccel.base.units import count_noun
from nbaccel.plan.contracts.training import Place, Precision, ShardedCheckpoints, Strategy
from nbaccel.train import rng
from nbaccel.train.checkpoint import layout
from nbaccel.train.checkpoint.compatibility import frozen_names, without_names
from nbaccel.train.checkpoint.files import save
from nbaccel.train.checkpoint.folder_writing import new_checkpoint
from nbaccel.train.checkpoint.layout import CheckpointContents
from nbaccel.train.checkpoint.own_disks import FolderDisks, send_to_writers
from nbaccel.train.collectives import Collectives


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointParts:
    """What is saved together, in the order in which it was prepared.

    Attributes:
        strategy: Knows how the models are wrapped or sharded.
        models: Models, wrapped or not.
        optimizers: Torch optimizers, or objects that have theirs as ``optimizer``.
        schedulers: Objects with `state_dict` and `load_state_dict`.
        loaders: Data loaders; those without `state_dict` are passed over.
        scaler: The loss scaler of fp16, if there is one.
        precision: What layers compute in; it may have a state of its own.
        custom: Registered objects.
        in_shards: Whether every process is to write its shards, if the strategy can.
        amid_group: Whether gradients of some batches wait for an optimizer step. They are saved,
            too, unless they are sharded: torch gives no access to those.
        leaves_out_frozen: Whether parameters that are not trained are not saved.
    """

    strategy: Strategy
    models: Sequence[nn.Module] = ()
    optimizers: Sequence[Any] = ()
    schedulers: Sequence[Any] = ()
    loaders: Sequence[Any] = ()
    scaler: torch.amp.GradScaler | None = None
    precision: Precision | None = None
    custom: Sequence[Any] = ()
    in_shards: bool = False
    amid_group: bool = False
    leaves_out_frozen: bool = False

    @property
    def sharder(self) -> ShardedCheckpoints | None:
        """The strategy, if it can read and write shards."""
        return self.strategy if isinstance(self.strategy, ShardedCheckpoints) else None

    @property
    def precision_state(self) -> _PrecisionOfModels:
        """What the precision keeps beside weights and optimizers."""
        models = [self.strategy.unwrap(model) for model in self.models]
        return _PrecisionOfModels(self.precision, models)

    def plain_optimizers(self) -> list[tuple[torch.optim.Optimizer, nn.Module | None]]:
        """Torch's own optimizers, each with the model whose parameters it steps."""
        torch_optimizers = [
            getattr(prepared_optimizer, "optimizer", prepared_optimizer)
            for prepared_optimizer in self.optimizers
        ]
        return [(optimizer, self._model_of(optimizer)) for optimizer in torch_optimizers]

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
                saved_gradient = saved_gradients.get(number, {}).get(name)
                parameter.grad = (
                    None if saved_gradient is None else saved_gradient.to(parameter.device)
                )

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer | None:
        """The first optimizer that steps a model's parameters; its shards lie with the model's."""
        model_optimizers = (
            optimizer
            for optimizer, stepped_model in self.plain_optimizers()
            if stepped_model is model
        )
        return next(model_optimizers, None)

    def stateful_loaders(self) -> list[tuple[int, Any]]:
        """Loaders with a `state_dict`, by their number among all."""
        return [
            (number, loader)
            for number, loader in enumerate(self.loaders)
            if hasattr(loader, "state_dict")
        ]


class _PrecisionOfModels(NamedTuple):
    """A precision with the models that it has a state for."""

    precision: Precision | None
    models: list[nn.Module]

    def state_dict(self) -> dict[str, Any]:
        """Empty where it has none."""
        return {} if self.precision is None else self.precision.state_dict(self.models)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` gave."""
        if self.precision is not None:
            self.precision.load_state_dict(self.models, state)


def check_checkpointable(objects: Sequence[Any]) -> None:
    """Refuse objects that cannot be part of a checkpoint."""
    mistakes = []
    for object_number, custom_object in enumerate(objects):
        needed_methods = ("state_dict", "load_state_dict")
        missing_methods = [
            method_name
            for method_name in needed_methods
            if not callable(getattr(custom_object, method_name, None))
        ]
        if missing_methods:
            mistakes.append(
                f"register_for_checkpointing: object {object_number}, a "
                f"{type(custom_object).__name__}, has no {' and no '.join(missing_methods)}, so "
                "it could be neither saved nor restored. Give it both methods, or register an "
                "object that has them."
            )
    if mistakes:
        raise ConfigError(*mistakes)


# ------------------------------------------------------------------------- is all there?


def check_contents(folder: Path, parts: CheckpointParts, *, with_models: bool = True) -> None:
    """Refuse a folder that does not fit, before anything is loaded from it.

    Kinds of which nothing was prepared may be there: a script that evaluates needs no optimizer.
    """
    contents = CheckpointContents.of(folder)
    text = f"The checkpoint {str(folder)!r}"
    mistakes = []
    expected_kinds = [("scheduler", len(parts.schedulers), contents.schedulers)]
    own_kind = parts.sharder.shard_kind if parts.sharder is not None else ""
    own_shards = contents.sharded_models.get(own_kind, frozenset())
    other_shards = {
        object_kind: model_numbers
        for object_kind, model_numbers in contents.sharded_models.items()
        if object_kind != own_kind
    }
    # Another strategy's shards are a mistake only if there is nothing that this run can read.
    if other_shards and not (own_shards or contents.models) and (parts.models or parts.optimizers):
        mistakes += [
            _foreign_shards(text, object_kind, model_numbers)
            for object_kind, model_numbers in other_shards.items()
        ]
    else:
        # An optimizer in shards is in the model's folder, and is checked when that is read.
        if not own_shards:
            expected_kinds.insert(0, ("optimizer", len(parts.optimizers), contents.optimizers))
        if with_models:
            expected_kinds.insert(0, ("model", len(parts.models), contents.models | own_shards))
    for object_kind, num_expected, numbers_there in expected_kinds:
        if num_expected and numbers_there != frozenset(range(num_expected)):
            mistakes.append(_count_mismatch(text, object_kind, numbers_there, num_expected))
    if contents.custom != frozenset(range(len(parts.custom))):
        mistakes.append(
            _count_mismatch(text, "registered object", contents.custom, len(parts.custom))
        )
    if parts.scaler is not None and not contents.has_scaler:
        mistakes.append(_count_mismatch(text, "scaler", frozenset(), 1))
    if mistakes:
        raise ConfigError(*mistakes)


def _count_mismatch(
    folder_text: str, object_kind: str, numbers_found: frozenset[int], num_expected: int
) -> str:
    numbers_text = f" ({', '.join(map(str, sorted(numbers_found)))})" if numbers_found else ""
    return (
        f"{folder_text} has {count_noun(len(numbers_found), object_kind)}{numbers_text}, but "
        f"{num_expected} {'is' if num_expected == 1 else 'are'} to be loaded. States would go to "
        "the wrong ones, or be lost. Prepare and register the same objects in the same order as "
        "when it was saved."
    )


def _foreign_shards(text: str, shard_kind: str, numbers: frozenset[int]) -> str:
    remedies = {
        "fsdp": "with FSDP as it was saved, or save it with state_dict_type='FULL_STATE_DICT'",
        "deepspeed": "with DeepSpeed as it was saved, or take its weights: nbaccel to-fp32 DIR OUT",
    }
    return (
        f"{text} has {count_noun(len(numbers), 'model')} in shards, one file per "
        "process. The strategy of this run cannot put them together. Load it "
        f"{remedies[shard_kind]}."
    )


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
        _StateWriter(partial_folder, parts, disks, collectives).write_all(
            list(hooks), place, step, safe_serialization
        )
    return target


class _StateWriter:
    """One process's share of a save.

    A strategy's state dicts are collectives, so a process that fails must take part in all
    of them: it writes no more, and raises its first error when the others are done, too.
    """

    def __init__(
        self,
        folder: Path,
        parts: CheckpointParts,
        disks: FolderDisks,
        collectives: Collectives,
    ) -> None:
        self._folder = folder
        self._parts = parts
        self._sharder = parts.sharder if parts.in_shards else None
        # Where a node has a disk of its own, its processes find all that they need there.
        self._writes_shared = disks.made_folder
        self._ranks_by_folder = disks.ranks_by_folder
        self._collectives = collectives
        self._met_errors: list[Exception] = []
        self._left_out: dict[int, frozenset[str]] = {}

    def write_all(self, hooks: list[SaveHook], place: Place, step: int, safetensors: bool) -> None:
        self._write_models(hooks, safetensors)
        self._write_left_out()
        self._write_optimizers()
        self._write_loaders(place)
        self._write_small_states()
        # Per process: gradients of an incomplete group have not been reduced yet, so they differ.
        if self._parts.amid_group and self._parts.sharder is None:
            self._write(layout.gradients_file(place.rank), self._parts.gradients, is_own=True)
        # The step is in this file because Accelerate keeps it there.
        states = {"step": step, **rng.capture_rng_states(place)}
        self._write(layout.random_states_file(place.rank), lambda: states, is_own=True)
        if self._met_errors:
            raise self._met_errors[0]

    def _write_models(self, hooks: list[SaveHook], safetensors: bool) -> None:
        parts = self._parts
        model_states = []
        left_out_of_states: dict[int, frozenset[str]] = {}
        for model_number, model in enumerate(parts.models):
            left_out = self._names_left_out(model)
            if self._sharder is None:
                model_state = without_names(
                    self._on_writers(parts.strategy.model_state(model)), left_out
                )
                left_out_of_states[id(model_state)] = left_out
                model_states.append(model_state)
            else:
                folder = self._folder / self._sharder.shard_folder(model_number)
                self._sharder.save_sharded(
                    model,
                    parts.optimizer_of(model),
                    folder,
                    left_out=left_out,
                    ranks_by_folder=self._ranks_by_folder,
                )
                self._left_out[model_number] = left_out
        # A copy, because hooks may remove models; the weights of all are gathered before they run.
        remaining_models = list(parts.models)
        for save_hook in hooks:
            self._attempt_step(
                partial(save_hook, remaining_models, model_states, str(self._folder))
            )
        # Numbered as the hooks left the list, which may have removed entries.
        for model_number, model_state in enumerate(model_states):
            self._left_out[model_number] = left_out_of_states.get(id(model_state), frozenset())
            file_name = layout.numbered_name(
                layout.SAFE_WEIGHTS if safetensors else layout.PICKLED_WEIGHTS, model_number
            )
            self._write(file_name, lambda: model_state, safetensors=safetensors)  # noqa: B023 - at once

    def _on_writers(self, whole_state: Any) -> Any:
        """A state that was gathered on process 0, on all processes that write it."""
        makers = [ranks[0] for ranks in self._ranks_by_folder]
        return send_to_writers(whole_state, makers, self._collectives, what="save_state: weights")

    def _names_left_out(self, model: nn.Module) -> frozenset[str]:
        if not self._parts.leaves_out_frozen:
            return frozenset()
        return frozen_names(self._parts.strategy.unwrap(model))

    def _write_left_out(self) -> None:
        if self._writes_shared and any(self._left_out.values()):
            left_out_path = self._folder / layout.LEFT_OUT_FILE
            self._attempt_step(
                lambda: atomic.write_text(left_out_path, layout.left_out_text(self._left_out))
            )

    def _write_optimizers(self) -> None:
        for number, (optimizer, model) in enumerate(self._parts.plain_optimizers()):
            name = layout.numbered_name(layout.OPTIMIZER_FILE, number)
            if model is None:
                self._write(name, optimizer.state_dict)
            elif self._sharder is None:
                state = self._on_writers(self._parts.strategy.optimizer_state(model, optimizer))
                self._write(name, lambda: state)  # noqa: B023 - called at once
            # The model's first optimizer has been written into the model's own shard folder.
            elif optimizer is not self._parts.optimizer_of(model):
                folder = self._folder / layout.OPTIMIZER_SHARDS.format(number)
                self._sharder.save_sharded(
                    model,
                    optimizer,
                    folder,
                    left_out=self._names_left_out(model),
                    ranks_by_folder=self._ranks_by_folder,
                )

    def _write_loaders(self, place: Place) -> None:
        for number, loader in self._parts.stateful_loaders():
            is_stateful = bool(getattr(loader, "use_stateful_dataloader", False))
            # Each process has workers, random numbers and a part of the data of its own.
            name = layout.loader_file(number, stateful=is_stateful, rank=place.rank)
            self._write(name, loader.state_dict, is_own=True)

    def _write_small_states(self) -> None:
        for number, scheduler in enumerate(self._parts.schedulers):
            name = layout.numbered_name(layout.SCHEDULER_FILE, number)
            self._write(name, scheduler.state_dict)
        if self._parts.scaler is not None:
            self._write(layout.SCALER_FILE, self._parts.scaler.state_dict)
        if state := self._parts.precision_state.state_dict():
            self._write(layout.PRECISION_FILE, lambda: state)
        for number, custom_object in enumerate(self._parts.custom):
            self._write(layout.CUSTOM_OBJECT_FILE.format(number), custom_object.state_dict)

    def _write(
        self,
        file_name: str,
        get_state: Callable[[], Any],
        *,
        safetensors: bool = False,
        is_own: bool = False,
    ) -> None:
        """Write a file, one of every process or one that is there once in a folder."""
        if is_own or self._writes_shared:
            path = self._folder / file_name
            self._attempt_step(lambda: save(get_state(), path, safetensors))

    def _attempt_step(self, step: Callable[[], None]) -> None:
        if self._met_errors:
            return
        try:
            step()
        except Exception as error:  # raised at the end of `write_all`, see the class
            self._met_errors.append(error)
