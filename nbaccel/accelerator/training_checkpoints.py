"""``TrainingCheckpoints``: saves and loads everything that was prepared, together."""

from __future__ import annotations

import re
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from nbaccel.accelerator.prepared_run import TrainingRun
from nbaccel.accelerator.preparer import Preparer
from nbaccel.base import torch_private
from nbaccel.base.errors import ConfigError
from nbaccel.base.log import get_logger
from nbaccel.config.handlers import ProjectConfiguration
from nbaccel.plan.contracts.training import Place
from nbaccel.train import checkpoint
from nbaccel.train.checkpoint.folder_writing import discard_checkpoint, send_to_writers
from nbaccel.train.checkpoint.loading import LoadHook, load_state
from nbaccel.train.checkpoint.saving import CheckpointParts, SaveHook, save_state, uncompiled_name
from nbaccel.train.collectives import Collectives

_log = get_logger(__name__)


class TrainingCheckpoints(Preparer):
    """What a training saves, and how it goes on from that."""

    def __init__(self, run: TrainingRun) -> None:
        super().__init__(run)
        self._custom_objects: list[Any] = []
        self._checkpoints = Checkpoints(run.request.project, run.place, run.collectives)

    def save_state(
        self,
        output_dir: str | Path | None = None,
        safe_serialization: bool = True,
        *,
        exclude_frozen_parameters: bool = False,
    ) -> Path:
        """Save everything that training needs to continue; returns the checkpoint's folder.

        A collective. The checkpoint appears in one step: a process killed while saving leaves the
        previous one whole and none of this one.

        Args:
            output_dir: Folder of the checkpoint; None where checkpoints are numbered
                (`ProjectConfiguration.automatic_checkpoint_naming`).
            safe_serialization: Weights as safetensors instead of a pickle.
            exclude_frozen_parameters: Leave out parameters that are not trained, whatever the
                strategy is. `load_state` then leaves those of the model as they are.

        Raises:
            ConfigError: There is nowhere to save to.
            CheckpointFailed: Some process could not write; it says which, and nothing has changed.
        """
        if self.gradient_state.is_skipping:
            # It would hold what training has become since.
            return Path(output_dir or ".")
        return self._save_training(
            output_dir,
            exclude_frozen=exclude_frozen_parameters,
            safe_serialization=safe_serialization,
        )

    def _save_training(
        self, folder: str | Path | None, *, exclude_frozen: bool = False, **options: Any
    ) -> Path:
        parts = self._checkpoint_parts(leaves_out_frozen=exclude_frozen)
        step = self.step
        num_steps = self.gradient_state.num_steps
        lists = (parts.models, parts.optimizers, parts.schedulers, parts.loaders, parts.custom)
        if not any(lists) and not self._checkpoints.save_hooks:
            warnings.warn(
                f"save_state({str(folder)!r}) saves random states alone: this Accelerator has "
                "prepared nothing, and another one's model and optimizer are not saved with it. "
                "Give them to this one's prepare(), too.",
                stacklevel=3,
            )
        # torch gives no access to gradients that `fully_shard` holds between steps.
        if parts.amid_group and parts.sharder is not None:
            warnings.warn(
                f"save_state within a group of {num_steps} batches leaves out sharded gradients of "
                f"{step % num_steps}. Save where accelerator.sync_gradients is True.",
                stacklevel=3,
            )
        return self._checkpoints.save(folder, parts, step=step, **options)

    def load_state(
        self,
        input_dir: str | Path | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        *,
        map_location: str | None = None,
        **options: Any,
    ) -> None:
        """Put back all that `save_state` wrote, or nothing; call it everywhere, after `prepare`.

        Loaders then repeat the order of the interrupted epoch: pass over what was used with
        ``accelerator.skip_first_batches(loader)``.

        Args:
            input_dir: Folder of the checkpoint; None for the numbered one of the highest number.
            load_kwargs: Arguments of ``torch.load``.
            map_location: ``cpu`` or ``on_device``.
            **options: Arguments of the models' ``load_state_dict``.

        Raises:
            ConfigError: There is none, or it does not fit what was prepared.
        """
        saved_step = self._checkpoints.load(
            input_dir,
            self._checkpoint_parts(),
            map_location=map_location,
            load_kwargs=load_kwargs,
            **options,
        )
        if saved_step is None:
            return
        self.step = saved_step
        # It may have been saved within a group of batches.
        state = self.gradient_state
        state.batches_in_group = saved_step % state.num_steps
        state.sync_gradients = state.batches_in_group == 0

    def _checkpoint_parts(self, *, leaves_out_frozen: bool = False) -> CheckpointParts:
        return CheckpointParts(
            strategy=self._run.strategy,
            models=self._models,
            optimizers=self._optimizers,
            schedulers=self._schedulers,
            loaders=self._dataloaders,
            scaler=self._run.precision.scaler,
            precision=self._run.precision,
            custom=self._custom_objects,
            amid_group=not self.gradient_state.sync_gradients,
            in_shards=self._run.request.said_by_settings.writes_shards,
            leaves_out_frozen=leaves_out_frozen,
        )

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load further objects with the state.

        Args:
            *objects: With `state_dict` and `load_state_dict`.

        Raises:
            ConfigError: Some lack these; it lists them all.
        """
        checkpoint.check_checkpointable(objects)
        self._custom_objects += objects

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Let ``hook(models, weights, folder)`` run before weights are written."""
        return add_hook(self._checkpoints.save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Let ``hook(models, folder)`` run before anything is loaded."""
        return add_hook(self._checkpoints.load_hooks, hook)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """All tensors of a prepared model by name; a collective where it is sharded.

        Args:
            model: The model.
            unwrap: Whether names are those of the user's own module.
        """
        strategy = self._run.strategy
        # An engine's own may hold placeholders, and its names are those of the module anyway.
        inner_model = torch_private.uncompiled(model)
        if not unwrap and inner_model is model and not strategy.owns_precision:
            return dict(model.state_dict())
        if any(parameter.is_meta for parameter in inner_model.parameters()):
            # Only here: a model that lies in memory needs nothing of it.
            from nbaccel.utils.modeling import get_state_dict_offloaded_model

            return get_state_dict_offloaded_model(strategy.unwrap(inner_model))
        state = strategy.model_state(inner_model)
        # A submodule compiled before `prepare` adds a prefix to the names of its tensors.
        return {uncompiled_name(name): value for name, value in state.items()}

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | Path,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a model's weights, for use elsewhere; call it on every process.

        Args:
            model: A prepared model.
            save_directory: Folder for ``model.safetensors``, or several files and an index.
            max_shard_size: Most bytes of one file, as a number or text (``"5GB"``).
            safe_serialization: safetensors instead of a pickle.

        Raises:
            ConfigError: `save_directory` is a file.
        """
        # On every process, because gathering sharded weights is a collective.
        state = self.get_state_dict(model)
        if self._run.request.project.save_on_each_node:
            text = "save_model: state of the model"
            writes_by_rank = self._run.collectives.answers(text, self._writes_here)
            writers = [rank for rank, writes in enumerate(writes_by_rank) if writes]
            state = dict(send_to_writers(state, writers, self._run.collectives, what=text))
        if self._writes_here:
            checkpoint.save_model(state, save_directory, max_shard_size, safe_serialization)
        self.wait_for_everyone()  # so that any process may read the files

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Write an object to a file, once per run (or node: `save_on_each_node`).

        Args:
            obj: Anything that pickles.
            f: The file; a reader sees the old one or the whole new one.
            safe_serialization: safetensors, for a dict of tensors.
        """
        if self._writes_here:
            checkpoint.save(obj, f, safe_serialization)

    @property
    def _writes_here(self) -> bool:
        """Whether this process writes files that exist once per run, or once per node."""
        place = self._run.place
        return place.is_local_main if self._run.request.project.save_on_each_node else place.is_main


@dataclass(eq=False)
class Checkpoints:
    """Names checkpoints, keeps as many as are wanted, and calls the hooks of users."""

    _project: ProjectConfiguration
    _place: Place
    _collectives: Collectives
    save_hooks: OrderedDict[int, SaveHook] = field(default_factory=OrderedDict)
    load_hooks: OrderedDict[int, LoadHook] = field(default_factory=OrderedDict)

    def save(
        self,
        folder: str | Path | None,
        parts: CheckpointParts,
        *,
        may_be_numbered: bool = True,
        **options: Any,
    ) -> Path:
        """Save everything that the run needs to continue; a collective."""
        project = self._project
        is_numbered = project.automatic_checkpoint_naming and may_be_numbered
        if is_numbered:
            parent = _folder_of(project)
            # After all existing ones, also of an earlier run.
            number = max([project.iteration, *(n + 1 for n in _numbered_checkpoints(parent))])
            target = parent / f"checkpoint_{number}"
            if folder is not None:
                _log.warning("checkpoints are numbered: saving to %s, not to %s", target, folder)
        elif folder is not None:
            target = Path(folder)
        else:
            raise ConfigError(
                f"save_state(output_dir={folder!r}) has nowhere to save to, because checkpoints "
                "are not numbered. Give a folder, or "
                "ProjectConfiguration(automatic_checkpoint_naming=True)."
            )
        checkpoint_path = save_state(
            target,
            parts,
            self._place,
            self._collectives,
            hooks=self.save_hooks.values(),
            series=is_numbered,
            **options,
        )
        # From the folder's name, which process 0 chose: the count of this process may be another.
        saved_number = _number_of(checkpoint_path) if is_numbered else None
        project.iteration = (project.iteration if saved_number is None else saved_number) + 1
        # After the new one is in place: a save that fails must not cost an older checkpoint.
        if is_numbered and self._place.is_local_main:
            existing = list(_numbered_checkpoints(checkpoint_path.parent).values())
            for path in existing[: -project.total_limit if project.total_limit else 0]:
                discard_checkpoint(path)
        return checkpoint_path

    def load(self, folder: str | Path | None, parts: CheckpointParts, **options: Any) -> int | None:
        """Put back what :meth:`save` wrote; a collective."""
        source_folder = self._source_folder(folder)
        saved_step = load_state(
            source_folder,
            parts,
            self._place,
            self._collectives,
            hooks=self.load_hooks.values(),
            **options,
        )
        checkpoint_number = _number_of(source_folder)
        if folder is None and checkpoint_number is not None:
            self._project.iteration = checkpoint_number + 1
        return saved_step

    def _source_folder(self, folder: str | Path | None) -> Path:
        if folder is not None:
            return Path(folder)
        if not self._project.automatic_checkpoint_naming:
            raise ConfigError(
                f"load_state(input_dir={folder!r}) has nothing to load from, because checkpoints "
                "are not numbered. Give the folder that save_state returned."
            )
        # Process 0 chooses: another one might look a moment later, when there is one more. What is
        # wrong is sent as text, because the others wait for the broadcast.
        found: Path | str = ""
        if self._place.is_main:
            try:
                parent = _folder_of(self._project)
                found = (
                    f"load_state() found no checkpoint_<number> in {str(parent)!r}: there is "
                    "nothing to continue from. Save one first, or give the folder of a checkpoint."
                )
                if existing := _numbered_checkpoints(parent):
                    found = existing[max(existing)]
            except ConfigError as error:
                found = str(error)
        found = self._collectives.broadcast_object(found)
        if isinstance(found, str):
            raise ConfigError(found)
        return found


def add_hook(hooks: OrderedDict[int, Any], hook: Callable[..., None]) -> RemovableHandle:
    """Add a hook, which the handle removes."""
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def _folder_of(configuration: ProjectConfiguration) -> Path:
    if configuration.project_dir is None:
        raise ConfigError(
            "ProjectConfiguration(automatic_checkpoint_naming=True) has "
            f"project_dir={configuration.project_dir!r}: checkpoints are numbered in a project's "
            "folder. Give Accelerator(project_dir=...) or ProjectConfiguration(project_dir=...)."
        )
    return Path(configuration.project_dir).expanduser() / "checkpoints"


def _number_of(folder: Path) -> int | None:
    name_match = re.fullmatch(r"checkpoint_(\d+)", folder.name)
    return int(name_match[1]) if name_match else None


def _numbered_checkpoints(folder: Path) -> dict[int, Path]:
    paths = folder.iterdir() if folder.is_dir() else ()
    numbered = [(_number_of(path), path) for path in paths if path.is_dir()]
    # By number: by name, checkpoint_10 would come before checkpoint_9.
    return dict(sorted((number, path) for number, path in numbered if number is not None))
