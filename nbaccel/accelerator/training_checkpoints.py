"""``TrainingCheckpoints``: saves and loads everything that was prepared, together."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from nbaccel.accelerator.gradient_steps import GradientSteps
from nbaccel.accelerator.prepared_run import TrainingRun
from nbaccel.base import torch_private
from nbaccel.train import checkpoint
from nbaccel.train.checkpoint.folder_writing import send_to_writers


class TrainingCheckpoints(GradientSteps):
    """What a training saves, and how it goes on from that."""

    def __init__(self, run: TrainingRun) -> None:
        super().__init__(run)
        self._custom_objects: list[Any] = []
        self._checkpoints = checkpoint.Checkpoints(run.request.project, run.place, run.collectives)

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
        # torch gives no access to gradients that `fully_shard` holds between steps.
        if parts.amid_group and parts.sharder is not None:
            warnings.warn(
                f"save_state within a group of {num_steps} batches: gradients of "
                f"{step % num_steps} of them are sharded, and will not be in the checkpoint. Save "
                "where accelerator.sync_gradients is True.",
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

    def _checkpoint_parts(self, *, leaves_out_frozen: bool = False) -> checkpoint.CheckpointParts:
        return checkpoint.CheckpointParts(
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
        return self._checkpoints.register_save_state_pre_hook(hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Let ``hook(models, folder)`` run before anything is loaded."""
        return self._checkpoints.register_load_state_pre_hook(hook)

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
        return {
            name.replace(torch_private.COMPILED_PREFIX, ""): value for name, value in state.items()
        }

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
        state_dict = self._state_to_write(model)
        if self._writes_here:
            checkpoint.save_model(state_dict, save_directory, max_shard_size, safe_serialization)
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

    def _state_to_write(self, model: nn.Module) -> dict[str, Any]:
        """The whole state dict, on all processes that write files."""
        state = self.get_state_dict(model)
        if not self._run.request.project.save_on_each_node:
            return state
        text = "save_model: state of the model"
        writes_by_rank = self._run.collectives.answers(text, self._writes_here)
        writers = [rank for rank, writes in enumerate(writes_by_rank) if writes]
        return dict(send_to_writers(state, writers, self._run.collectives, what=text))

    @property
    def _writes_here(self) -> bool:
        """Whether this process writes files that exist once per run, or once per node."""
        place = self._run.place
        return place.is_local_main if self._run.request.project.save_on_each_node else place.is_main
