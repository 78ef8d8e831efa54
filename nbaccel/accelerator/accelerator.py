"""``Accelerator``: prepares what a training loop uses, and runs its steps on every process.

It decides nothing by itself: arguments become a request, the request and this process become a
plan, and the plan names the strategy and the precision that do the work.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from nbaccel import tracking
from nbaccel.accelerator.prepared_run import Request, TrainingRun, dynamo_settings, refuse_unserved
from nbaccel.accelerator.training_checkpoints import TrainingCheckpoints
from nbaccel.config import Configured, RunConfig
from nbaccel.config.call_arguments import explained
from nbaccel.config.handlers import (
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    Handler,
    ProfileKwargs,
    ProjectConfiguration,
)
from nbaccel.data_loader import skip_first_batches
from nbaccel.loops import metrics_reporter
from nbaccel.plan import registry
from nbaccel.precision import precision_check
from nbaccel.state import remember_accelerator
from nbaccel.train import distributed
from nbaccel.train.in_sync import check_in_sync
from nbaccel.train.loader import PreparedLoader
from nbaccel.train.progress import Progress
from nbaccel.train.resuming import Resuming

_AnyBatch = TypeVar("_AnyBatch")


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
        given = locals()  # first, when only the arguments are local
        refuse_unserved(given)
        request = Request.of(given)
        self._requested_trackers = tuple(
            tracking.filter_trackers(log_with, request.project.logging_dir)
        )
        run = TrainingRun.begin(request, dynamo_settings(dynamo_backend, dynamo_plugin))
        super().__init__(run)
        precision_check.note(self.mixed_precision)  # a launch checks that its precision is used
        self.device_placement = device_placement
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.rng_types = list(rng_types) if rng_types is not None else ["generator"]
        self.trackers: list[tracking.GeneralTracker] = []
        self._trigger = False
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
        return tracking.find_started_tracker(self.trackers, name, unwrap=unwrap)

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
