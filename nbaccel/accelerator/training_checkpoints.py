"""``TrainingCheckpoints``: saves and loads everything that was prepared, together."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from nbaccel.accelerator.gradient_steps import GradientSteps
from nbaccel.accelerator.prepared_run import TrainingRun
from nbaccel.accelerator.preparer import PreparedObjects
from nbaccel.base import torch_private
from nbaccel.train import checkpoint
from nbaccel.train.checkpoint.own_disks import send_to_writers
from nbaccel.train.gradient import GradientState


class TrainingCheckpoints:
    """Checkpoints of a run.

    Attributes:
        folders: Names of checkpoints, and the hooks that run before saving and loading.
    """

    def __init__(
        self,
        run: TrainingRun,
        prepared: PreparedObjects,
        steps: GradientSteps,
        gradient_state: GradientState,
    ) -> None:
        self._run = run
        self._prepared = prepared
        self._gradient_steps = steps
        self._gradient_state = gradient_state
        self._custom_objects: list[Any] = []
        self.folders = checkpoint.Checkpoints(run.request.project, run.place, run.collectives)

    def save(
        self,
        folder: str | Path | None,
        *,
        safe_serialization: bool = True,
        exclude_frozen: bool = False,
        may_be_numbered: bool = True,
    ) -> Path:
        """Save everything that training needs to continue; see `Accelerator.save_state`."""
        parts = self._checkpoint_parts(leaves_out_frozen=exclude_frozen)
        step = self._gradient_steps.step
        num_steps = self._gradient_state.num_steps
        # torch gives no access to gradients that `fully_shard` holds between steps.
        if parts.amid_group and parts.sharder is not None:
            warnings.warn(
                f"save_state within a group of {num_steps} batches: gradients of "
                f"{step % num_steps} of them are sharded, and will not be in the checkpoint. Save "
                "where accelerator.sync_gradients is True.",
                stacklevel=3,
            )
        return self.folders.save(
            folder,
            parts,
            step=step,
            safe_serialization=safe_serialization,
            may_be_numbered=may_be_numbered,
        )

    def load(
        self,
        folder: str | Path | None,
        *,
        map_location: str | None,
        load_kwargs: Mapping[str, Any] | None,
        options: Mapping[str, Any],
    ) -> None:
        """Put back what :meth:`save` wrote; see `Accelerator.load_state`."""
        step = self.folders.load(
            folder,
            self._checkpoint_parts(),
            map_location=map_location,
            load_kwargs=load_kwargs,
            **options,
        )
        if step is not None:
            self._gradient_steps.resume_at(step)

    def _checkpoint_parts(self, *, leaves_out_frozen: bool = False) -> checkpoint.CheckpointParts:
        return checkpoint.CheckpointParts(
            strategy=self._run.strategy,
            models=self._prepared.models,
            optimizers=self._prepared.optimizers,
            schedulers=self._prepared.schedulers,
            loaders=self._prepared.loaders,
            scaler=self._run.precision.scaler,
            precision=self._run.precision,
            custom=self._custom_objects,
            amid_group=not self._gradient_state.sync_gradients,
            in_shards=self._run.request.writes_shards,
            leaves_out_frozen=leaves_out_frozen,
        )

    def register(self, *objects: Any) -> None:
        """Save and load further objects, which have `state_dict` and `load_state_dict`."""
        checkpoint.check_checkpointable(objects)
        self._custom_objects += objects

    def state_dict(self, model: nn.Module, unwrap: bool) -> dict[str, Any]:
        """The whole state dict of a prepared model; see `Accelerator.get_state_dict`."""
        strategy = self._run.strategy
        # An engine's own may hold placeholders, and its names are those of the module anyway.
        inner_model = torch_private.uncompiled(model)
        if not unwrap and inner_model is model and not strategy.owns_precision:
            return dict(model.state_dict())
        if any(parameter.is_meta for parameter in inner_model.parameters()):
            # Only here: a model that lies in memory needs nothing of it.
            from nbaccel.bigmodel.offloaded_state import get_state_dict_offloaded_model

            return get_state_dict_offloaded_model(strategy.unwrap(inner_model))
        state = strategy.model_state(inner_model)
        # A submodule compiled before `prepare` adds a prefix to the names of its tensors.
        return {
            name.replace(torch_private.COMPILED_PREFIX, ""): value for name, value in state.items()
        }

    def state_to_write(self, model: nn.Module) -> dict[str, Any]:
        """The whole state dict, on all processes that write files; see :attr:`writes_here`."""
        state = self.state_dict(model, unwrap=True)
        if not self._run.request.project.save_on_each_node:
            return state
        text = "save_model: state of the model"
        writes_by_rank = self._run.collectives.answers(text, self.writes_here)
        writers = [rank for rank, writes in enumerate(writes_by_rank) if writes]
        return dict(send_to_writers(state, writers, self._run.collectives, what=text))

    @property
    def writes_here(self) -> bool:
        """Whether this process writes files that exist once per run, or once per node."""
        place = self._run.place
        return place.is_local_main if self._run.request.project.save_on_each_node else place.is_main
