"""``Accelerator``: prepares what a training loop uses, and runs its steps on every process.

It decides nothing by itself: arguments become a request, the request and this process become a
plan, and the plan names the strategy and the precision that do the work.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.data import IterableDataset

from nbaccel import tracking
from nbaccel.accelerator.prepared_run import Request, TrainingRun, dynamo_settings, refuse_unserved
from nbaccel.accelerator.training_checkpoints import TrainingCheckpoints
from nbaccel.base import torch_private
from nbaccel.base.errors import ConfigError
from nbaccel.base.training_libraries import attribute
from nbaccel.config import Configured, RunConfig, handlers
from nbaccel.config.call_arguments import explained
from nbaccel.data_loader import skip_first_batches
from nbaccel.loops import loop_watch, metrics_reporter
from nbaccel.optimizer import AcceleratedOptimizer
from nbaccel.plan import registry
from nbaccel.precision import precision_check
from nbaccel.state import remember_accelerator, shows
from nbaccel.train import distributed
from nbaccel.train.collectives import check_in_sync
from nbaccel.train.loader import PreparedLoader
from nbaccel.train.progress import Progress
from nbaccel.train.resuming import Resuming

_AnyBatch = TypeVar("_AnyBatch")
_NO_CONTEXT = contextlib.nullcontext()  # it has no state, so one object serves every batch


class Accelerator(TrainingCheckpoints):
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
        step: Batches since the last complete group.
        trackers: Those that `init_trackers` has begun.

    Raises:
        ConfigError: Arguments are wrong or contradict each other.
        PlatformUnsupported: An argument needs what this version does not support.
    """

    @explained
    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool = False,
        dataloader_config: handlers.DataLoaderConfiguration | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: handlers.FullyShardedDataParallelPlugin | None = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: Sequence[str] | None = None,
        log_with: Any = None,
        project_dir: str | Path | None = None,
        project_config: handlers.ProjectConfiguration | None = None,
        gradient_accumulation_plugin: handlers.GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[handlers.Handler] | None = None,
        dynamo_backend: str | None = None,
        dynamo_plugin: Any = None,
        deepspeed_plugins: Any = None,
        parallelism_config: Any = None,
        *,
        config: RunConfig | Configured | None = None,
        downcast_bf16: bool = False,
        kwarg_handlers: Sequence[handlers.Handler] | None = None,
    ) -> None:
        given = locals()  # first, when only the arguments are local
        refuse_unserved(given)
        request = Request.of(given)
        self._requested_trackers = tuple(
            tracking.filter_trackers(log_with, request.project.logging_dir)
        )
        super().__init__(TrainingRun.begin(request, dynamo_settings(dynamo_backend, dynamo_plugin)))
        precision_check.note(self.mixed_precision)  # a launch checks that its precision is used
        self.device_placement = device_placement
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.rng_types = list(rng_types) if rng_types is not None else ["generator"]
        self.trackers: list[tracking.GeneralTracker] = []
        self._trigger = False
        self._progress: Progress[Any] | None = None
        self.gradient_state.resuming = Resuming.asked_for(
            self._place,
            self._dataloaders,
            save=functools.partial(self._save_training, may_be_numbered=False),
            load=self.load_state,
            rest_of=skip_first_batches,
        )
        remember_accelerator(self)  # last: `AcceleratorState()` must not find an incomplete one

    def __deepcopy__(self, memo: dict[int, Any]) -> Accelerator:
        return self  # a copy would count steps separately, with the same prepared objects

    sync_gradients: bool = shows("gradient_state.sync_gradients", is_settable=True)
    """Whether the current batch ends with an optimizer step."""

    @property
    def gradient_accumulation_steps(self) -> int:
        """Batches for one optimizer step; may be changed while training."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        handlers.GradientAccumulationPlugin(num_steps=value)  # refuses what makes no sense
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
        loop_watch.note_loss(loss)
        state = self.gradient_state
        if state.num_steps != 1:
            # Gradients of a group add up; the division makes their sum the mean over the group.
            loss = loss / state.num_steps
        scaler = self._run.precision.scaler
        if scaler is not None:
            loss = scaler.scale(loss)
        with loop_watch.telling():
            self._run.strategy.backward(loss, sync=state.sync_gradients, **kwargs)

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Backward and step in one, of optimizers that have it (LOMO).

        Args:
            loss: A 0-d tensor.
            learning_rate: The learning rate of this step.

        Raises:
            ConfigError: No prepared optimizer has it, or there is no learning rate.
        """
        optimizers = self._optimizers
        found = [getattr(optimizer, "fused_backward", None) for optimizer in optimizers]
        fused_backwards = list(filter(None, found))
        if not fused_backwards or learning_rate is None:
            names = [type(optimizer.optimizer).__name__ for optimizer in optimizers]
            raise ConfigError(
                f"lomo_backward(learning_rate={learning_rate!r}) needs a learning rate and an "
                f"optimizer with `fused_backward`; prepared are {names or 'none'}. Prepare "
                "one of lomo_optim, or call accelerator.backward(loss)."
            )
        for fused_backward in fused_backwards:
            fused_backward(loss, learning_rate)

    def accumulate(self, *models: nn.Module) -> contextlib.AbstractContextManager[None]:
        """A context for one batch, in which gradients are reduced only if it completes a group.

        Args:
            *models: The models that are trained in the block.
        """
        state = self.gradient_state
        if state.num_steps > 1 and any(map(self._is_anothers, models)):
            warnings.warn(
                f"accumulate got a model of another Accelerator: what that one has prepared knows "
                f"nothing of gradient_accumulation_steps={state.num_steps}, and its optimizer "
                "steps at every batch. Give model and optimizer to this one's prepare(), too.",
                stacklevel=2,
            )
        state.batches_in_group = 1 if state.sync_gradients else state.batches_in_group + 1
        # A short group at the end steps, too, so the next epoch begins with a whole group.
        if state.sync_with_dataloader and state.end_of_dataloader:
            self.step = 0
            state.sync_gradients = True
        else:
            self.step += 1
            state.sync_gradients = self.step % state.num_steps == 0
        if state.sync_gradients or state.sync_each_batch or self._run.place.is_alone:
            return _NO_CONTEXT
        if len(models) == 1:
            return self._run.strategy.no_sync(models[0])
        return self._no_sync_of_all(models)

    @contextlib.contextmanager
    def _no_sync_of_all(self, models: Iterable[nn.Module]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for model in models:
                stack.enter_context(self._run.strategy.no_sync(model))
            yield

    # Contexts of this kind, as Accelerate's, decorate functions as well.
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
        scaler = self._run.precision.scaler
        # GradScalerKwargs(enabled=False) gives a scaler that changes nothing.
        if scaler is None or not scaler.is_enabled():
            return
        gradient_state = self.gradient_state
        if not gradient_state.sync_gradients:
            raise ConfigError(
                f"Gradients were to be unscaled or clipped after batch {self.step} of a group of "
                f"{gradient_state.num_steps}: those of later batches would be added in another "
                f"scale ({scaler.get_scale():.0f}). Clip under `if accelerator.sync_gradients:`."
            )
        optimizers = self._optimizers if optimizer is None else optimizer
        for chosen in optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]:
            inner = chosen.optimizer if isinstance(chosen, AcceleratedOptimizer) else chosen
            # `clip_grad_norm_` may have unscaled them already, and torch raises the second time.
            if not torch_private.gradients_are_unscaled(scaler, inner):
                scaler.unscale_(inner)

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
        self.unscale_gradients()
        return self._run.strategy.clip_grad_norm(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Cut every element of the gradients to ``[-clip_value, clip_value]``.

        Raises:
            ConfigError: The strategy's engine holds the gradients.
        """
        if self._run.strategy.owns_precision:
            raise ConfigError(
                f"clip_grad_value_({clip_value}) is not available with strategy "
                f"{self._run.initial_plan.strategy!r}: its engine holds the gradients, and clips "
                "by norm alone. Use clip_grad_norm_."
            )
        self.unscale_gradients()
        nn.utils.clip_grad_value_(parameters, clip_value)

    @contextlib.contextmanager
    def autocast(self, autocast_handler: handlers.AutocastKwargs | None = None) -> Iterator[None]:
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
        context = self._run.strategy.join(joinables)
        if context is None:
            raise ConfigError(
                "join_uneven_inputs is not available with strategy "
                f"{self._run.initial_plan.strategy!r}: its forward passes need every process, so "
                "the process with most batches would wait for ever. Keep even_batches=True."
            )
        with contextlib.ExitStack() as stack:
            if even_batches is not None:
                if any(isinstance(one.dataset, IterableDataset) for one in self._dataloaders):
                    warnings.warn(
                        f"join_uneven_inputs(even_batches={even_batches}) is only supported for "
                        "map-style datasets: a loader of an IterableDataset completes its last "
                        "batches as before. Give it a dataset with a length.",
                        stacklevel=3,
                    )
                for loader in self._dataloaders:
                    stack.enter_context(attribute(loader, "even_batches", even_batches))
            with context:
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
        set_here, self._trigger = self._trigger, False
        return any(self._collectives.answers("check_trigger", set_here))

    @property
    def flag_tensor(self) -> torch.Tensor | None:
        """Whether `set_trigger` was called since the last `check_trigger`: a 0-d 1, or None."""
        return torch.tensor(1, device=self.device) if self._trigger else None

    @property
    def log_with(self) -> list[Any]:
        """Trackers that were asked for and are installed: names, and objects that were given."""
        return [tracking.logger_type_of(tracker) for tracker in self._requested_trackers]

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
        self.trackers += tracking.start_trackers(
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
        for tracker in self.trackers:
            if tracker.name == name:
                return getattr(tracker, "tracker", tracker) if unwrap else tracker
        if not self.trackers:
            return tracking.GeneralTracker(_blank=True)
        raise ConfigError(
            f"get_tracker({name!r}) finds none: started are {[one.name for one in self.trackers]}. "
            "Give its name to Accelerator(log_with=...), before init_trackers."
        )

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
        shown = Progress(loader, self._place, description, epochs)
        resuming = self.gradient_state.resuming
        with attribute(self, "_progress", shown):
            if resuming is None or isinstance(loader, PreparedLoader):
                yield from shown
            else:
                yield from resuming.rounds(shown)

    @contextlib.contextmanager
    def profile(
        self, profile_handler: handlers.ProfileKwargs | None = None
    ) -> Iterator[torch.profiler.profile]:
        """Profile the block with torch's profiler, which is yielded.

        Args:
            profile_handler: Its settings; None takes those of the constructor.

        Raises:
            ConfigError: An activity is unknown.
        """
        settings = profile_handler or self.profile_handler
        own_activities = registry.device(self._place.device_name).profiler_activities()
        settings = replace(settings, activities=settings.activities or own_activities)
        with settings.build() as profiler:
            yield profiler
        if settings.output_trace_dir is not None:
            folder = Path(settings.output_trace_dir)
            folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(folder / f"profile_{self.process_index}.json"))
            self.wait_for_everyone()  # after it, any process may read all traces

    def end_training(self) -> None:
        """Finish the trackers and leave the process group; nothing can be gathered after it."""
        for tracker in self.trackers:
            tracker.finish()
        self.trackers.clear()
        if not self.use_distributed:  # the notebook continues, with whole modules again
            self._run.strategy.release()
        distributed.leave_process_group(self._collectives)
