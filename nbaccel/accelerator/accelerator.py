"""``Accelerator``: prepares what a training loop uses, and runs its steps on every process.

It decides nothing by itself: arguments become a request, the request and this process become a
plan, and the plan names the strategy and the precision that do the work.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from nbaccel.accelerator.accelerator_base import RunDescription
from nbaccel.accelerator.arguments import Request, dynamo_settings, refuse_unserved
from nbaccel.accelerator.gradient_steps import GradientSteps
from nbaccel.accelerator.prepared_run import TrainingRun
from nbaccel.accelerator.preparer import PreparedObjects, PrepareOptions, Preparer
from nbaccel.accelerator.training_checkpoints import TrainingCheckpoints
from nbaccel.config import Configured, RunConfig
from nbaccel.config.call_arguments import explained_constructor
from nbaccel.config.handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    Handler,
    ProfileKwargs,
    ProjectConfiguration,
)
from nbaccel.loops import metrics_reporter
from nbaccel.optimizer import AcceleratedOptimizer
from nbaccel.precision import precision_check
from nbaccel.scheduler import AcceleratedScheduler
from nbaccel.state import remember_accelerator
from nbaccel.train import checkpoint, distributed, trackers
from nbaccel.train.gradient import GradientState
from nbaccel.train.in_sync import check_in_sync
from nbaccel.train.loader import PreparedLoader
from nbaccel.train.prepare_loader import skip_first_batches
from nbaccel.train.profiling import profile_block
from nbaccel.train.progress import Progress
from nbaccel.train.resuming import Resuming

_AnyBatch = TypeVar("_AnyBatch")


class Accelerator(RunDescription):
    """The training loop, on any number of devices.

    Without a launcher it trains on one device; inside `notebook_launcher`, `torchrun` or a SLURM
    job on as many as there are processes. The loop is the same::

        accelerator = Accelerator()
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for batch in loader:
            with accelerator.accumulate(model):
                loss = loss_function(model(batch[0]), batch[1])
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()

    Args:
        device_placement: Whether models and batches are moved to the device.
        split_batches: Whether each batch of a loader is cut into a slice per process.
        mixed_precision: ``no``, ``fp16``, ``bf16`` or ``fp8``; None takes what the launcher asked.
        gradient_accumulation_steps: Batches per optimizer step; None: the launcher's, else 1.
        cpu: Compute on the CPU even if there is a GPU.
        dataloader_config: How loaders are shared out.
        deepspeed_plugin: Shard models by DeepSpeed's ZeRO; without a launcher, in one process.
        fsdp_plugin: Shard models by torch's ``fully_shard``.
        rng_types: Random generators to synchronise at an epoch's start; None: the samplers' own.
        log_with: Trackers: ``jsonl``, ``tensorboard``, ``wandb``, ``mlflow`` ..., ``all``, objects,
            or a list of these; one whose package is not installed is left out, with a warning.
        project_dir: Folder for checkpoints and logs.
        project_config: More about that folder.
        gradient_accumulation_plugin: More about accumulation.
        step_scheduler_with_optimizer: Whether schedulers step only when optimizers do.
        kwargs_handlers: Further settings, one object per class; guides also write `kwarg_handlers`.
        deepspeed_plugins: By name, first one first; see ``state.select_deepspeed_plugin(name)``.
        dynamo_backend: Of ``torch.compile``; ``no``: none; None: ``ACCELERATE_DYNAMO_BACKEND``.
        dynamo_plugin: More about it.
        downcast_bf16: Under bf16 on TPUs by torch_xla: float is bfloat16 there, double is float32.
        config: A `RunConfig`, or a picker; arguments win over it.

    Attributes:
        gradient_state: Where the accumulation of gradients stands.
        trackers: Those that `init_trackers` has begun.

    Raises:
        ConfigError: Arguments are wrong or contradict each other.
        PlatformUnsupported: An argument needs what this version does not support.
    """

    @explained_constructor
    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: Sequence[str] | None = None,
        log_with: Any = None,
        project_dir: str | Path | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[Handler] | None = None,
        dynamo_backend: str | None = None,
        dynamo_plugin: Any = None,
        deepspeed_plugins: Any = None,
        parallelism_config: Any = None,
        *,
        config: RunConfig | Configured | None = None,
        downcast_bf16: bool = False,
        kwarg_handlers: Sequence[Handler] | None = None,
    ) -> None:
        refuse_unserved(torch_tp_plugin, megatron_lm_plugin, parallelism_config)
        request = Request.of(
            mixed_precision=mixed_precision,
            cpu=cpu,
            gradient_accumulation_steps=gradient_accumulation_steps,
            gradient_accumulation_plugin=gradient_accumulation_plugin,
            split_batches=split_batches,
            dataloader_config=dataloader_config,
            project_dir=project_dir,
            project_config=project_config,
            plugins={
                "fsdp_plugin": fsdp_plugin,
                "deepspeed_plugin": deepspeed_plugin,
                "deepspeed_plugins": deepspeed_plugins,
            },
            kwargs_handlers=kwargs_handlers,
            kwarg_handlers=kwarg_handlers,
            config=config,
            downcast_bf16=downcast_bf16,
        )
        self._requested_trackers = tuple(trackers.find_trackers(log_with, request.logging_dir))
        run = TrainingRun.begin(request, dynamo_settings(dynamo_backend, dynamo_plugin))
        super().__init__(run)
        precision_check.note(self.mixed_precision)  # a launch checks that its precision is used
        self.device_placement = device_placement
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.rng_types = list(rng_types) if rng_types is not None else ["generator"]
        self.gradient_state = GradientState(request.accumulation)
        self.trackers: list[trackers.GeneralTracker] = []
        self._make_parts(run)
        remember_accelerator(self)  # last: `AcceleratorState()` must not find an incomplete one

    def _make_parts(self, run: TrainingRun) -> None:
        self._progress: Progress[Any] | None = None
        self._trigger = False
        prepared = PreparedObjects()
        # Libraries for Accelerate read these lists under these names.
        self._models = prepared.models
        self._optimizers = prepared.optimizers
        self._schedulers = prepared.schedulers
        self._dataloaders = prepared.loaders
        self._preparer = Preparer(run, self.gradient_state, prepared)
        self._gradient_steps = steps = GradientSteps(run, self.gradient_state, prepared)
        self._checkpoints = TrainingCheckpoints(run, prepared, steps, self.gradient_state)
        self.gradient_state.resuming = Resuming.asked_for(
            run.place,
            prepared.loaders,
            save=functools.partial(self._checkpoints.save, may_be_numbered=False),
            load=self.load_state,
            rest_of=skip_first_batches,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Accelerator:
        return self  # a copy would count steps separately, with the same prepared objects

    def prepare(self, *args: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """Make models, optimizers, data loaders and schedulers ready to train.

        Args:
            *args: In any order; anything else passes through. What is prepared already stays.
            device_placement: Whether each of them is moved to the device; None: the accelerator's.

        Returns:
            The same, ready, in the same order; one alone, or a tuple.

        Raises:
            ConfigError: `device_placement` does not fit the arguments, or one cannot be prepared.
        """
        ready = self._preparer.prepare(args, device_placement, self._prepare_options())
        return ready[0] if len(ready) == 1 else tuple(ready)

    def _prepare_options(self) -> PrepareOptions:
        return PrepareOptions(
            device_placement=self.device_placement,
            rng_types=self.rng_types,
            step_scheduler_with_optimizer=self.step_scheduler_with_optimizer,
        )

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Make one model ready.

        Args:
            model: The model.
            device_placement: Whether it is moved to the device; None: as the accelerator was told.
            evaluation_mode: Only for evaluation: it is not wrapped for training together.
        """
        if not evaluation_mode:
            return self.prepare(model, device_placement=[device_placement])  # type: ignore[no-any-return]
        to_device = self.device_placement if device_placement is None else device_placement
        return self._preparer.prepare_for_evaluation(model, to_device=to_device)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Make one optimizer ready; its model is prepared elsewhere."""
        return self.prepare(optimizer, device_placement=[device_placement])  # type: ignore[no-any-return]

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> PreparedLoader:
        """Share one data loader out over the processes.

        Args:
            data_loader: The loader.
            device_placement: Whether batches are moved to the device.
            slice_fn_for_dispatch: How a batch of process 0 is divided: called with the batch,
                a slice of rows, and two keywords, `process_index` and `num_processes`.
        """
        return self._preparer.prepare_loader(
            data_loader,
            to_device=self.device_placement if device_placement is None else device_placement,
            rng_types=self.rng_types,
            slice_fn=slice_fn_for_dispatch,
        )

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Make one learning-rate scheduler ready; its optimizer must be prepared before it."""
        return self._preparer.prepare_scheduler(
            scheduler, with_optimizer=self.step_scheduler_with_optimizer
        )

    def skip_first_batches(self, dataloader: Any, num_batches: int | None = None) -> Any:
        """A new loader without the first batches, to continue from a saved state.

        Args:
            dataloader: A prepared loader, or a plain one; it is not changed.
            num_batches: How many to leave out; None for as many as the loaded state had used.
        """
        return skip_first_batches(dataloader, num_batches)

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """The user's own module inside a prepared one, as it was given to `prepare`.

        Args:
            model: A prepared model.
            keep_fp32_wrapper: Whether its forward goes on computing in the accelerator's precision.
            keep_torch_compile: Whether it stays compiled.
        """
        return self._preparer.unwrap(
            model, keep_autocast=keep_fp32_wrapper, keep_compiled=keep_torch_compile
        )

    def free_memory(self, *objects: Any) -> list[None]:
        """Let go of everything prepared, so that its memory is free.

        Args:
            *objects: Further references of the caller.

        Returns:
            As many Nones: ``model, optimizer = accelerator.free_memory(model, optimizer)``.
        """
        self._preparer.release()
        self._gradient_steps.step = 0
        return [None] * len(objects)

    def clear(self, *objects: Any) -> list[None]:
        """Another name of :meth:`free_memory`."""
        return self.free_memory(*objects)

    @property
    def step(self) -> int:
        """Batches since the last complete group."""
        return self._gradient_steps.step

    @step.setter
    def step(self, value: int) -> None:
        self._gradient_steps.step = value

    @property
    def sync_gradients(self) -> bool:
        """Whether the current batch ends with an optimizer step."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.gradient_state.sync_gradients = value

    @property
    def gradient_accumulation_steps(self) -> int:
        """Batches for one optimizer step; may be changed while training."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        GradientAccumulationPlugin(num_steps=value)  # refuses what makes no sense
        self.gradient_state.num_steps = value

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether any optimizer left its last step out, because gradients were infinite."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Compute gradients, scaled for accumulation and fp16.

        Args:
            loss: A 0-d tensor, mean over the batch.
            **kwargs: Arguments of ``Tensor.backward``.
        """
        if self._progress is not None:
            # The loss as the user computed it: `backward` divides it by the accumulation steps.
            self._progress.note_loss(loss)
        self._gradient_steps.backward(loss, **kwargs)

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Backward and step in one, of optimizers that have it (LOMO).

        Args:
            loss: A 0-d tensor.
            learning_rate: The learning rate of this step.

        Raises:
            ConfigError: No prepared optimizer has it, or there is no learning rate.
        """
        self._gradient_steps.fused_backward(loss, learning_rate)

    def accumulate(self, *models: nn.Module) -> contextlib.AbstractContextManager[None]:
        """A context for one batch, in which gradients are reduced only if it completes a group.

        Args:
            *models: The models that are trained in the block.
        """
        return self._gradient_steps.accumulate(models)

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Leave gradients of backward passes in the block on their process."""
        with self._run.strategy.no_sync(model):
            yield

    @contextlib.contextmanager
    def trigger_sync_in_backward(self, model: nn.Module) -> Iterator[None]:
        """Reduce gradients in the block's backward, though the forwards ran under `no_sync`."""
        with self._run.strategy.sync_in_backward(model):
            yield

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide fp16's factor out of the gradients; what was done already is not done again.

        Args:
            optimizer: One prepared optimizer, or several; None for all.

        Raises:
            ConfigError: The group of batches is not complete yet.
        """
        self._gradient_steps.unscale_gradients(optimizer)

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Scale gradients down to a norm over the whole model.

        Args:
            parameters: Parameters of a prepared model.
            max_norm: Largest norm to leave.
            norm_type: Which norm.

        Returns:
            The norm before, a 0-d tensor.
        """
        return self._gradient_steps.clip_norm(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Cut every element of the gradients to ``[-clip_value, clip_value]``.

        Raises:
            ConfigError: The strategy's engine holds the gradients.
        """
        self._gradient_steps.clip_value(parameters, clip_value)

    @contextlib.contextmanager
    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> Iterator[None]:
        """Compute in the accelerator's precision inside the block (a loss, for example)."""
        with self._run.precision.autocast(autocast_handler):
            yield

    @contextlib.contextmanager
    def join_uneven_inputs(
        self, joinables: Iterable[nn.Module], even_batches: bool | None = None
    ) -> Iterator[None]:
        """Let processes run out of batches at different times.

        Args:
            joinables: The prepared models that are trained in the block.
            even_batches: The loaders' setting meanwhile; None leaves them unchanged.

        Raises:
            ConfigError: The strategy cannot do it.
        """
        with self._gradient_steps.join(joinables, even_batches):
            yield

    def gather(self, tensor: Any) -> Any:
        """Join every process's tensors along their first dimension.

        Args:
            tensor: Tensors of shape ``[n, ...]``, equal on all processes, in containers.

        Returns:
            The same with tensors of shape ``[num_processes * n, ...]``.

        Raises:
            CollectiveMismatch: Shapes or dtypes differ; it lists them by process.
        """
        return self._collectives.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Like `gather`, without the samples that fill up the last batch.

        Args:
            input_data: Tensors in containers, or a list of picklable objects.
            use_gather_object: Send tensors as objects, whatever their shapes.

        Returns:
            What the processes computed for each sample of the dataset, once.
        """
        num_rows = self.gradient_state.unpadded_rows
        return self._collectives.gather_rows(input_data, num_rows, as_objects=use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Combine every process's tensors element by element: ``sum``, ``mean`` or ``max``."""
        return self._collectives.reduce(tensor, reduction, scale)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False
    ) -> Any:
        """Make every process's tensors equally long in one dimension, so they can be gathered."""
        return self._collectives.pad_across_processes(tensor, dim, pad_index, pad_first)

    def check_in_sync(self) -> bool:
        """Whether the processes still train the same model; warns by name where they do not.

        Compared are all parameters bit by bit (sharded ones differ and are left out), learning
        rates, and how many batches of each loader were used. A collective.

        Returns:
            True where everything is equal, on all processes alike.
        """
        models = (self._run.strategy.unwrap(model) for model in self._models)
        return check_in_sync(models, self._optimizers, self._dataloaders, self._collectives)

    def set_trigger(self) -> None:
        """Set a flag that `check_trigger` shows to all processes."""
        self._trigger = True

    def check_trigger(self) -> bool:
        """Whether any process has set the flag since the last call, which resets it."""
        set_here = self._trigger
        self._trigger = False
        return any(self._collectives.answers("check_trigger", set_here))

    @property
    def flag_tensor(self) -> torch.Tensor | None:
        """Whether `set_trigger` was called since the last `check_trigger`: a 0-d 1, or None."""
        return torch.tensor(1, device=self.device) if self._trigger else None

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
        return self._checkpoints.save(
            output_dir,
            safe_serialization=safe_serialization,
            exclude_frozen=exclude_frozen_parameters,
        )

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
        self._checkpoints.load(
            input_dir, map_location=map_location, load_kwargs=load_kwargs, options=options
        )

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load further objects with the state.

        Args:
            *objects: With `state_dict` and `load_state_dict`.

        Raises:
            ConfigError: Some lack these; it lists them all.
        """
        self._checkpoints.register(*objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Let ``hook(models, weights, folder)`` run before weights are written."""
        return self._checkpoints.folders.register_save_state_pre_hook(hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Let ``hook(models, folder)`` run before anything is loaded."""
        return self._checkpoints.folders.register_load_state_pre_hook(hook)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """All tensors of a prepared model by name; a collective where it is sharded.

        Args:
            model: The model.
            unwrap: Whether names are those of the user's own module.
        """
        return self._checkpoints.state_dict(model, unwrap)

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
        state_dict = self._checkpoints.state_to_write(model)
        if self._checkpoints.writes_here:
            checkpoint.save_model(state_dict, save_directory, max_shard_size, safe_serialization)
        self.wait_for_everyone()  # so that any process may read the files

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Write an object to a file, once per run (or node: `save_on_each_node`).

        Args:
            obj: Anything that pickles.
            f: The file; a reader sees the old one or the whole new one.
            safe_serialization: safetensors, for a dict of tensors.
        """
        if self._checkpoints.writes_here:
            checkpoint.save(obj, f, safe_serialization)

    @property
    def log_with(self) -> list[Any]:
        """Trackers that were asked for and are installed: names, and objects that were given."""
        return [trackers.logger_type_of(tracker) for tracker in self._requested_trackers]

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
        self.trackers += trackers.start_trackers(
            self._requested_trackers,
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
        """Send metrics to every tracker; in a launch, its dashboard shows the numbers among them.

        Args:
            values: Name → number or text.
            step: Number of the training step.
            log_kwargs: Tracker's name → further arguments of its `log`.
        """
        if self.gradient_state.is_skipping:
            return
        if reporter := metrics_reporter.current():
            reporter.log(values, step)
        for tracker in self.trackers:
            tracker.log(dict(values), step=step, **(log_kwargs or {}).get(tracker.name, {}))

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """One of the trackers that have begun.

        Args:
            name: Its name.
            unwrap: Whether to return what is inside it (a `SummaryWriter`, for example).

        Returns:
            The tracker; where none has begun, as on other processes than 0, one that does nothing.

        Raises:
            ConfigError: Trackers have begun, and none of that name.
        """
        return trackers.find_started_tracker(self.trackers, name, unwrap=unwrap)

    def progress(
        self, loader: Iterable[_AnyBatch], description: str = "", *, epochs: int | None = None
    ) -> Iterator[_AnyBatch]:
        """Iterate over a loader's batches under one progress bar for all processes.

        Call it on every process; process 0 shows it, with mean loss and samples per second of all.

        Args:
            loader: What to iterate over.
            description: Text before the bar.
            epochs: How often this loop is run in all; so the panel tells what is left of all.
        """
        before = self._progress
        self._progress = Progress(loader, self._place, description, epochs)
        resuming = self.gradient_state.resuming
        try:
            if resuming is None or isinstance(loader, PreparedLoader):
                yield from self._progress
            else:
                yield from resuming.rounds(self._progress)
        finally:  # loops with bars may be nested
            self._progress = before

    @contextlib.contextmanager
    def profile(
        self, profile_handler: ProfileKwargs | None = None
    ) -> Iterator[torch.profiler.profile]:
        """Profile the block with torch's profiler, which is yielded.

        Args:
            profile_handler: Its settings; None takes those of the constructor.

        Raises:
            ConfigError: An activity is unknown.
        """
        settings = profile_handler or self.profile_handler
        with profile_block(settings, self._collectives) as profiler:
            yield profiler

    def end_training(self) -> None:
        """Finish the trackers and leave the process group; nothing can be gathered after it."""
        for tracker in self.trackers:
            tracker.finish()
        self.trackers.clear()
        if not self.use_distributed:  # the notebook continues, with whole modules again
            self._run.strategy.release()
        distributed.leave_process_group(self._collectives)
