"""Settings of a training loop, one small class per concern, named as users of Accelerate know them.

They hold and check the user's settings; nothing here imports torch. A wrong value raises
:class:`~nbaccel.base.errors.ConfigError`, which has the given value and says what to give instead.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field

from nbaccel.base import env
from nbaccel.base.errors import ConfigError
from nbaccel.config.enumerations import DDPCommunicationHookType, DistributedType, DynamoBackend
from nbaccel.config.field_rules import FieldRule, OptionalCount, checked_as
from nbaccel.config.fsdp_settings import FullyShardedDataParallelPlugin
from nbaccel.config.settings_base import Handler, Settings
from nbaccel.config.value_readers import plain_value

__all__ = [
    "AutocastKwargs",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "Handler",
    "InitProcessGroupKwargs",
    "ProfileKwargs",
    "ProjectConfiguration",
    "Settings",
    "TorchDynamoPlugin",
]


_FOLDER_NUMBER = Annotated[
    int,
    Field(ge=0),
    FieldRule(
        why="A smaller value has no meaning",
        do="Give one, or leave it out",
    ),
]
_TIMEOUT_FIELD = Annotated[
    timedelta | None,
    Field(gt=timedelta(0)),
    FieldRule(
        must="a timedelta or a number of seconds above 0, or None",
        why="Every collective would fail at once",
        do="Give for example timedelta(minutes=10)",
    ),
]
_HOOK_FIELD = Annotated[
    DDPCommunicationHookType,
    FieldRule(
        read=plain_value,
        must=f"one of {', '.join(DDPCommunicationHookType.list())}",
        allowed=tuple(DDPCommunicationHookType.list()),
        why="Gradients would travel uncompressed",
        do='Leave it at "no" to compress nothing',
    ),
]


@dataclass
class DataLoaderConfiguration(Settings):
    """How data loaders are shared out over the processes.

    Attributes:
        split_batches: Each batch of the loader is cut into one slice per process, so `batch_size`
            is the total one. Otherwise every process gets whole batches, in turn.
        dispatch_batches: Process 0 reads all batches and sends the others their part. None: only
            for iterable datasets.
        even_batches: The last round is completed with samples from the beginning, so that all
            processes get equally many batches of equal size.
        use_seedable_sampler: Shuffling depends on seed and epoch alone, so that it can be repeated.
        data_seed: That seed; None takes torch's initial seed of process 0.
        non_blocking: Copies to the device do not wait (needs `pin_memory` in the loader).
        use_stateful_dataloader: Use torchdata's loader, which can save its position.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False


@dataclass
class GradientAccumulationPlugin(Settings):
    """How gradients are accumulated over several batches.

    Attributes:
        num_steps: Batches for one optimizer step; None reads
            ``ACCELERATE_GRADIENT_ACCUMULATION_STEPS``, else 1.
        adjust_scheduler: True where the schedule was written in batches: it then advances by every
            batch that went into an optimizer step. None or False: by one per optimizer step, which
            is what Accelerate does whatever it is given.
        sync_with_dataloader: The last batch of a loader ends the group even if it is short.
        sync_each_batch: Reduce gradients after every batch, which takes less memory and more time.
    """

    num_steps: int | None = field(default=None, metadata=checked_as(OptionalCount))
    adjust_scheduler: bool | None = None
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False


@dataclass
class ProjectConfiguration(Settings):
    """Where a project keeps its checkpoints and logs.

    Attributes:
        project_dir: Folder of the project; checkpoints go to ``checkpoints/`` in it.
        logging_dir: Folder of the trackers; None takes `project_dir`.
        automatic_checkpoint_naming: Checkpoints are numbered: ``checkpoint_0``, ``checkpoint_1``, …
        total_limit: How many numbered checkpoints are kept; None keeps all.
        iteration: Number of the next checkpoint.
        save_on_each_node: In `save` and `save_model` the main process of every node writes, not
            only that of the first. `save_state` does so by itself where disks are not shared.
    """

    project_dir: str | Path | None = None
    logging_dir: str | Path | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = field(default=None, metadata=checked_as(OptionalCount))
    iteration: int = field(default=0, metadata=checked_as(_FOLDER_NUMBER))
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | Path | None = None) -> None:
        """Set the project's folder, and that of the trackers where none was given."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir


@dataclass
class AutocastKwargs(Handler):
    """Arguments of ``torch.autocast``.

    Attributes:
        enabled: Whether layers compute in the lower precision at all.
        cache_enabled: Whether cast weights are kept within one forward; None leaves it to torch.
    """

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass
class GradScalerKwargs(Handler):
    """Arguments of ``torch.amp.GradScaler``, for fp16.

    Attributes:
        init_scale: Factor on the loss at the start.
        growth_factor: By how much it grows after `growth_interval` good steps.
        backoff_factor: By how much it shrinks after a step with infinite gradients.
        growth_interval: Good steps in a row before it grows.
        enabled: Whether the loss is scaled at all.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass
class InitProcessGroupKwargs(Handler):
    """Arguments of ``torch.distributed.init_process_group``.

    Attributes:
        backend: ``gloo``, ``nccl``, ``cpu:gloo,cuda:nccl``; None takes what fits the device.
        init_method: Where the processes meet; None takes the launcher's store.
        timeout: How long a process waits in a collective for the others (a `timedelta` or
            seconds); None waits ten minutes.
    """

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | float | None = field(default=None, metadata=checked_as(_TIMEOUT_FIELD))


@dataclass
class DistributedDataParallelKwargs(Handler):
    """Arguments of ``torch.nn.parallel.DistributedDataParallel``.

    Attributes:
        dim: Batch dimension of inputs that DDP scatters itself.
        broadcast_buffers: Whether buffers are taken from process 0 at each forward.
        bucket_cap_mb: Size of gradient buckets in MiB.
        find_unused_parameters: Whether parameters may take no part in a forward.
        check_reduction: Taken for compatibility; torch ignores it.
        gradient_as_bucket_view: Whether gradients live in the buckets, which saves a copy.
        static_graph: Whether every iteration uses the same parameters.
        comm_hook: Compression of gradients.
        comm_wrapper: Compression around `comm_hook`: ``fp16`` or ``bf16``.
        comm_state_option: Arguments of PowerSGD's state.
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType | str = field(
        default=DDPCommunicationHookType.NO, metadata=checked_as(_HOOK_FIELD)
    )
    comm_wrapper: DDPCommunicationHookType | str = field(
        default=DDPCommunicationHookType.NO, metadata=checked_as(_HOOK_FIELD)
    )
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    OWN: ClassVar[tuple[str, ...]] = ("comm_hook", "comm_wrapper", "comm_state_option")


@dataclass
class ProfileKwargs(Handler):
    """Arguments of ``torch.profiler.profile``.

    Attributes:
        activities: Of ``cpu``, ``cuda``; None takes what the device has.
        schedule_option: Arguments of ``torch.profiler.schedule``: wait, warmup, active, repeat.
        on_trace_ready: Called with the profiler when a cycle is done.
        record_shapes: Keep the shapes of operators' inputs.
        profile_memory: Follow allocations.
        with_stack: Keep source lines.
        with_flops: Estimate floating-point operations.
        with_modules: Keep module names.
        output_trace_dir: Folder for a Chrome trace per process.
    """

    activities: Sequence[str] | None = None
    schedule_option: Mapping[str, int] | None = None
    on_trace_ready: Callable[[Any], None] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | Path | None = None

    def build(self) -> Any:
        """A ``torch.profiler.profile`` with these settings.

        Returns:
            The profiler, to be used as a context manager.

        Raises:
            ConfigError: An activity is unknown.
        """
        # By name and only here: modules of `config` must not import torch.
        profiler_module: Any = importlib.import_module("torch.profiler")
        kinds = {"cpu": "CPU", "cuda": "CUDA", "xpu": "XPU", "hpu": "HPU", "mtia": "MTIA"}
        unknown_activities = [
            argument_name
            for argument_name in self.activities or ()
            if str(argument_name) not in kinds
        ]
        if unknown_activities:
            raise ConfigError(
                f"ProfileKwargs(activities={list(self.activities or ())}) has unknown ones: "
                f"{unknown_activities}. Nothing would be recorded for them. Give some of "
                f"{', '.join(kinds)}."
            )
        # These three are not arguments of torch's, or need torch to be converted.
        plain_settings = replace(self, activities=None, schedule_option=None, output_trace_dir=None)
        profiler_arguments = {
            argument_name: argument_value
            for argument_name, argument_value in plain_settings.to_dict().items()
            if argument_value is not None
        }
        if not self.with_modules:  # for TorchScript only: torch warns whenever it is passed
            del profiler_arguments["with_modules"]
        # Both need torch's classes, which the settings can only name.
        if self.schedule_option is not None:
            profiler_arguments["schedule"] = profiler_module.schedule(**self.schedule_option)
        if self.activities is not None:
            known_activities = profiler_module.ProfilerActivity
            profiler_arguments["activities"] = [
                getattr(known_activities, kinds[str(argument_name)])
                for argument_name in self.activities
            ]
        return profiler_module.profile(**profiler_arguments)


_DYNAMO_PREFIX = "ACCELERATE_DYNAMO_"
_CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
_COMPILE_MODES: tuple[str, ...] = get_args(_CompileMode)
_MODE_FIELD = Annotated[
    _CompileMode | None,
    FieldRule(
        must=f"one of {', '.join(_COMPILE_MODES)}",
        allowed=_COMPILE_MODES,
        why="torch.compile would refuse it when the model is prepared",
        do='Leave it out to take "default"',
    ),
]


@dataclass
class TorchDynamoPlugin(Handler):
    """How ``torch.compile`` compiles prepared models: ``Accelerator(dynamo_plugin=...)``.

    A setting that is None is read from the environment, where a launcher may have set it.

    Attributes:
        backend: ``inductor`` and the like; ``no`` compiles nothing (``ACCELERATE_DYNAMO_BACKEND``).
        mode: ``default``, ``reduce-overhead`` or ``max-autotune`` (``ACCELERATE_DYNAMO_MODE``).
        fullgraph: Whether a model that is not one graph is refused (``..._USE_FULLGRAPH``).
        dynamic: Whether shapes may change (``..._USE_DYNAMIC``); None leaves it to torch.
        options: Of the backend.
        disable: Compile nothing after all, for tests.
        use_regional_compilation: Whether repeated blocks are compiled one by one, which is done
            sooner (``..._USE_REGIONAL_COMPILATION``).
    """

    backend: DynamoBackend | str | None = None
    mode: str | None = field(default=None, metadata=checked_as(_MODE_FIELD))
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Mapping[str, Any] | None = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
        # Before the check, so that it covers values from the environment, too.
        self.backend = _dynamo_backend(self.backend or env.read(f"{_DYNAMO_PREFIX}BACKEND") or "no")
        self.mode = self.mode or env.read(f"{_DYNAMO_PREFIX}MODE") or "default"
        super().__post_init__()
        if self.fullgraph is None:
            self.fullgraph = bool(env.flag(f"{_DYNAMO_PREFIX}USE_FULLGRAPH"))
        if self.dynamic is None:
            self.dynamic = env.flag(f"{_DYNAMO_PREFIX}USE_DYNAMIC")
        if self.use_regional_compilation is None:
            self.use_regional_compilation = bool(
                env.flag(f"{_DYNAMO_PREFIX}USE_REGIONAL_COMPILATION")
            )

    @property
    def compiles(self) -> bool:
        """Whether anything is compiled."""
        return self.backend != DynamoBackend.NO

    def to_dict(self) -> dict[str, Any]:
        """Every setting by name; the backend in lower case, as torch has it."""
        # The enum's values are in upper case, and torch's names in lower case.
        is_known_backend = isinstance(self.backend, DynamoBackend)
        name = str(self.backend).lower() if is_known_backend else self.backend
        return {**super().to_dict(), "backend": name}

    def to_kwargs(self) -> dict[str, Any]:
        """The arguments of ``torch.compile``."""
        compile_arguments = self.to_dict()
        del compile_arguments["use_regional_compilation"]
        # Arguments with torch's default are left out: torch refuses `mode` beside `options`.
        default_arguments = {"mode": "default", "fullgraph": False, "disable": False}
        return {
            name: value
            for name, value in compile_arguments.items()
            if value is not None and value != default_arguments.get(name)
        }


def _dynamo_backend(backend: Any) -> DynamoBackend | str:
    name = str(getattr(backend, "value", backend))
    # A package may register a further backend with torch, whose name is case-sensitive.
    return DynamoBackend(name.upper()) if name.upper() in DynamoBackend else name
