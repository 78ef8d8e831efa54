"""What an accelerator keeps: checkpoints, weights, and metrics told to trackers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from nbaccel import env
from nbaccel.accelerator.facts import Facts
from nbaccel.errors import ConfigError
from nbaccel.launch import reporting
from nbaccel.train import checkpoint
from nbaccel.train.trackers import GeneralTracker, start_trackers

__all__ = ["Keeping"]


class Keeping(Facts):
    """How an accelerator saves, loads and logs."""

    # --------------------------------------------------------------------- checkpoints

    def save_state(
        self,
        output_dir: str | Path | None = None,
        safe_serialization: bool = True,
        *,
        exclude_frozen_parameters: bool = False,
    ) -> Path:
        """Save everything that training needs to go on; call it on every process.

        The checkpoint appears in one step: a process killed while saving leaves the previous one
        whole and none of this one.

        Args:
            output_dir: Folder of the checkpoint; None where checkpoints are numbered
                (`ProjectConfiguration.automatic_checkpoint_naming`).
            safe_serialization: Weights as safetensors instead of a pickle.
            exclude_frozen_parameters: DeepSpeed's, without effect: `load_state` puts back a whole
                model, so frozen weights are written, too.

        Returns:
            The folder.

        Raises:
            ConfigError: There is nowhere to save to.
            CheckpointFailed: Some process could not write; it says which, and nothing has changed.
        """
        if exclude_frozen_parameters:
            warnings.warn(
                "save_state(exclude_frozen_parameters=True) writes frozen weights all the same: "
                "load_state puts back a whole model. For what was trained alone use the model's "
                "own save_pretrained, or accelerator.save(...) with a part of its state dict.",
                stacklevel=2,
            )
        parts = self._parts()
        if parts.amid_group and parts.sharder is not None:
            warnings.warn(
                f"save_state amid a group of {self.gradient_accumulation_steps} batches: gradients "
                f"of {self.step % self.gradient_accumulation_steps} of them are sharded, and will "
                "not be in the checkpoint. Save where accelerator.sync_gradients is True.",
                stacklevel=2,
            )
        return self._checkpoints.save(
            output_dir, parts, step=self.step, safe_serialization=safe_serialization
        )

    def load_state(
        self,
        input_dir: str | Path | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        *,
        map_location: str | None = None,
        **options: Any,
    ) -> None:
        """Put back what `save_state` wrote; call it on every process, after `prepare`.

        Loaders then repeat the order of the interrupted epoch: pass over what was used with
        ``accelerator.skip_first_batches(loader)``.

        Args:
            input_dir: Folder of the checkpoint; None for the numbered one of the highest number.
            load_kwargs: Arguments of ``torch.load``.
            map_location: ``cpu`` or ``on_device``.
            **options: Arguments of the models' ``load_state_dict``.

        Raises:
            ConfigError: There is no such checkpoint, or it does not fit what was prepared; nothing
                has been loaded then.
        """
        step = self._checkpoints.load(
            input_dir,
            self._parts(),
            map_location=map_location,
            load_kwargs=load_kwargs,
            **options,
        )
        if step is not None:
            self.step = step
            state = self.gradient_state
            state.batches_in_group = step % state.num_steps
            state.sync_gradients = state.batches_in_group == 0

    def _parts(self) -> checkpoint.Parts:
        return checkpoint.Parts(
            strategy=self._strategy,
            models=self._models,
            optimizers=self._optimizers,
            schedulers=self._schedulers,
            loaders=self._dataloaders,
            scaler=self._precision.scaler,
            custom=self._custom_objects,
            amid_group=not self.sync_gradients,
            in_shards=self._request.writes_shards,
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

    # --------------------------------------------------------------------- weights

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The whole state dict of a prepared model; a collective where it is sharded.

        Args:
            model: The model.
            unwrap: Whether names are those of the user's own module.

        Returns:
            Names and tensors.
        """
        # An engine's own may hold placeholders, and its names are those of the module anyway.
        if not unwrap and not hasattr(model, "_orig_mod") and not self._strategy.owns_precision:
            return dict(model.state_dict())
        state = self._strategy.model_state(getattr(model, "_orig_mod", model))
        # What was compiled before `prepare` sits deeper, and shows in the names.
        return {name.replace("_orig_mod.", ""): value for name, value in state.items()}

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
        state = self.get_state_dict(model)
        if self._writes:
            checkpoint.save_model(state, save_directory, max_shard_size, safe_serialization)
        self.wait_for_everyone()

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Write an object to a file, once per run (or node: `save_on_each_node`).

        Args:
            obj: Anything that pickles.
            f: The file; whoever looks sees the old one or the whole new one.
            safe_serialization: safetensors, for a dict of tensors.
        """
        if self._writes:
            checkpoint.save(obj, f, safe_serialization)

    @property
    def _writes(self) -> bool:
        each_node = self.project_configuration.save_on_each_node
        return self.is_local_main_process if each_node else self.is_main_process

    # --------------------------------------------------------------------- trackers

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Begin a run with every tracker of ``log_with``.

        Args:
            project_name: Name of the run.
            config: Settings to keep beside the metrics.
            init_kwargs: Tracker's name → further arguments of its constructor.
        """
        self.trackers += start_trackers(
            self._wanted_trackers,
            self._place,
            project_name,
            logging_dir=self.logging_dir,
            config=None if config is None else dict(config),
            init_kwargs=init_kwargs,
        )

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Tell every tracker some metrics; in a launch, its dashboard shows the numbers among them.

        Args:
            values: Name → number or text.
            step: Number of the training step.
            log_kwargs: Tracker's name → further arguments of its `log`.
        """
        reporting.log(values, step)
        for tracker in self.trackers:
            tracker.log(dict(values), step=step, **(log_kwargs or {}).get(tracker.name, {}))

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """One of the trackers that have begun.

        Args:
            name: Its name.
            unwrap: Whether to return what is inside it (a `SummaryWriter`, for example).

        Returns:
            The tracker. Where none has begun (on other processes than 0, before `init_trackers`, or
            where no package is installed), one that does nothing.

        Raises:
            ConfigError: Trackers have begun, and none of that name.
        """
        for tracker in self.trackers:
            if tracker.name == name:
                return getattr(tracker, "tracker", tracker) if unwrap else tracker
        if not self.trackers:
            return GeneralTracker(_blank=True)
        raise ConfigError(
            f"get_tracker({name!r}) finds none: begun are "
            f"{[tracker.name for tracker in self.trackers]}. Give its name to "
            "Accelerator(log_with=...), before init_trackers."
        )

    # --------------------------------------------------------------------- the end

    def end_training(self) -> None:
        """Finish the trackers and leave the process group; nothing can be gathered after it."""
        for tracker in self.trackers:
            tracker.finish()
        self.trackers.clear()
        if not self.use_distributed:
            self._strategy.release()
        if not self.use_distributed or not dist.is_initialized():
            return  # nobody to leave, or left already
        self.wait_for_everyone()
        # A notebook's worker keeps it: what follows in the cell may use it, and it goes with it.
        if not env.flag("FORK_LAUNCHED"):
            dist.destroy_process_group()
