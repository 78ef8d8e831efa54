"""Settings of a training loop, one small class per concern, named as users of Accelerate know them.

They hold what the user said and check it; nothing here imports torch. A wrong value raises
:class:`~nbaccel.errors.ConfigError`, which says what was given and what to give instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

from nbaccel.errors import ConfigError

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
]


class DistributedType(str, Enum):
    """How processes train together, by the names that Accelerate's users compare with."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    FSDP = "FSDP"
    DEEPSPEED = "DEEPSPEED"
    XLA = "XLA"


class Settings:
    """What all settings can do."""

    def to_dict(self) -> dict[str, Any]:
        """Every setting by name, as given."""
        return {item.name: getattr(self, item.name) for item in fields(self)}  # type: ignore[arg-type]

    def to_kwargs(self) -> dict[str, Any]:
        """Only the settings that differ from their defaults."""
        plain = type(self)()
        return {
            name: value for name, value in self.to_dict().items() if value != getattr(plain, name)
        }


class Handler(Settings):
    """Settings that go into ``Accelerator(kwargs_handlers=[...])``, one of each class."""


def _at_least(owner: object, least: float, *names: str) -> list[str]:
    return [
        f"{type(owner).__name__}({name}={value!r}) is too small: it must be at least {least}. "
        "A smaller value has no meaning. Give one, or leave it out."
        for name in names
        if (value := getattr(owner, name)) is not None and value < least
    ]


def _refuse(mistakes: list[str]) -> None:
    if mistakes:
        raise ConfigError(*mistakes)


# ------------------------------------------------------------------------- data and accumulation


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
        use_stateful_dataloader: Use torchdata's loader, which can say where it is.
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

    num_steps: int | None = None
    adjust_scheduler: bool | None = None
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        _refuse(_at_least(self, 1, "num_steps"))


@dataclass
class ProjectConfiguration(Settings):
    """Where a project keeps its checkpoints and logs.

    Attributes:
        project_dir: Folder of the project; checkpoints go to ``checkpoints/`` in it.
        logging_dir: Folder of the trackers; None takes `project_dir`.
        automatic_checkpoint_naming: Checkpoints are numbered: ``checkpoint_0``, ``checkpoint_1``, …
        total_limit: How many numbered checkpoints are kept; None keeps all.
        iteration: Number of the next checkpoint.
        save_on_each_node: The main process of every node writes, not only that of the first.
    """

    project_dir: str | Path | None = None
    logging_dir: str | Path | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        _refuse(_at_least(self, 1, "total_limit") + _at_least(self, 0, "iteration"))
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | Path | None = None) -> None:
        """Set the project's folder, and the trackers' where it has none of its own."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir


# ------------------------------------------------------------------------- handlers


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
    timeout: timedelta | float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.timeout, (int, float)):
            self.timeout = timedelta(seconds=self.timeout)
        if self.timeout is not None and self.timeout <= timedelta(0):
            raise ConfigError(
                f"InitProcessGroupKwargs(timeout={self.timeout}) must be positive. "
                "Every collective would fail at once. Give for example timedelta(minutes=10)."
            )


class DDPCommunicationHookType(str, Enum):
    """How DDP compresses gradients on their way."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


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
    comm_hook: DDPCommunicationHookType | str = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType | str = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    OWN: ClassVar[tuple[str, ...]] = ("comm_hook", "comm_wrapper", "comm_state_option")

    def __post_init__(self) -> None:
        for name in ("comm_hook", "comm_wrapper"):
            value = getattr(self, name)
            known = [hook.value for hook in DDPCommunicationHookType]
            if value not in known:
                raise ConfigError(
                    f"DistributedDataParallelKwargs({name}={value!r}) is unknown. "
                    f"Gradients would travel uncompressed. Give one of {', '.join(known)}."
                )
            setattr(self, name, DDPCommunicationHookType(value))


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


# ------------------------------------------------------------------------- fsdp

_FSDP1_SHARDING = {"FULL_SHARD": True, "SHARD_GRAD_OP": False}
_FSDP1_ONLY = {
    "backward_prefetch": "it prefetches by itself",
    "forward_prefetch": "it prefetches by itself",
    "param_init_fn": "build the model with its values before prepare",
    "state_dict_config": "state_dict_type='FULL_STATE_DICT' gives whole weights, on the CPU",
    "optim_state_dict_config": "state_dict_type='FULL_STATE_DICT' gives whole states, on the CPU",
}


def _plain_name(value: Any) -> str:
    """Of an enum's member or its text: ``FULL_SHARD``."""
    return str(getattr(value, "name", value)).rpartition(".")[2].upper()


_WRAP_POLICIES = ("transformer_based_wrap", "size_based_wrap", "no_wrap")
_STATE_TYPES = ("FULL_STATE_DICT", "SHARDED_STATE_DICT")


@dataclass
class FullyShardedDataParallelPlugin(Settings):
    """How torch's ``fully_shard`` (FSDP2) shards models.

    Attributes:
        fsdp_version: 2, the only one: FSDP1 is in maintenance in torch.
        reshard_after_forward: Whether gathered weights are given up after the forward: less
            memory, one more gather in the backward (ZeRO-3); False keeps them (ZeRO-2).
        auto_wrap_policy: Which submodules are sharded on their own: ``transformer_based_wrap``
            (classes named in `transformer_cls_names_to_wrap`, or the model's `_no_split_modules`),
            ``size_based_wrap`` (`min_num_params`), ``no_wrap``, or a function ``module -> bool``.
            None: transformer blocks where the model names them, else no submodule.
        transformer_cls_names_to_wrap: Class names of those submodules.
        min_num_params: Least parameters of a submodule sharded on its own.
        cpu_offload: Whether shards live in host memory.
        mixed_precision_policy: ``torch.distributed.fsdp.MixedPrecisionPolicy``, a dict of its
            arguments, or ``fp16``/``bf16``; None follows the Accelerator's precision.
        state_dict_type: How ``save_state`` writes: ``SHARDED_STATE_DICT`` (every process its
            shard, torch.distributed.checkpoint) or ``FULL_STATE_DICT`` (one file).
        ignored_modules: Submodules left alone, or a regular expression on their names.
        activation_checkpointing: Whether wrapped submodules recompute activations.
        cpu_ram_efficient_loading: Taken for compatibility: workers share one copy anyway.
        sharding_strategy: FSDP1's word for `reshard_after_forward`: ``FULL_SHARD`` for True,
            ``SHARD_GRAD_OP`` for False.
        use_orig_params: FSDP1's; True is the only way of ``fully_shard``.
        sync_module_states: The same.
        limit_all_gathers: The same.
        backward_prefetch: FSDP1's, refused: ``fully_shard`` prefetches by itself.
        forward_prefetch: The same.
        param_init_fn: FSDP1's, refused: build the model in an outer cell.
        state_dict_config: FSDP1's, refused: say it with `state_dict_type`.
        optim_state_dict_config: The same.
    """

    fsdp_version: int = 2
    reshard_after_forward: bool = True
    auto_wrap_policy: str | Callable[[Any], bool] | None = None
    transformer_cls_names_to_wrap: Sequence[str] | None = None
    min_num_params: int | None = None
    cpu_offload: bool = False
    mixed_precision_policy: Any = None
    state_dict_type: str = "SHARDED_STATE_DICT"
    ignored_modules: Any = None
    activation_checkpointing: bool = False
    cpu_ram_efficient_loading: bool = False
    sharding_strategy: Any = None
    use_orig_params: bool | None = None
    sync_module_states: bool | None = None
    limit_all_gathers: bool | None = None
    backward_prefetch: Any = None
    forward_prefetch: Any = None
    param_init_fn: Any = None
    state_dict_config: Any = None
    optim_state_dict_config: Any = None

    def __post_init__(self) -> None:
        old = self._mistakes_of_fsdp1()
        _refuse([*self._mistakes(), *old, *_at_least(self, 1, "min_num_params")])
        if self.sharding_strategy is not None:
            self.reshard_after_forward = _FSDP1_SHARDING[_plain_name(self.sharding_strategy)]

    def _mistakes_of_fsdp1(self) -> list[str]:
        """Settings of FSDP1 that ``fully_shard`` cannot follow, each with what to do instead."""
        owner, found = "FullyShardedDataParallelPlugin", []
        sharding = self.sharding_strategy
        if sharding is not None and _plain_name(sharding) not in _FSDP1_SHARDING:
            found.append(
                f"{owner}(sharding_strategy={sharding!r}) cannot be followed: fully_shard knows "
                f"{' and '.join(_FSDP1_SHARDING)}. Give reshard_after_forward=True or False; for "
                "NO_SHARD leave the plugin out, which trains with DDP."
            )
        found += [
            f"{owner}({name}=False) cannot be followed: fully_shard always does it. Leave it out."
            for name in ("use_orig_params", "sync_module_states", "limit_all_gathers")
            if getattr(self, name) is False
        ]
        found += [
            f"{owner}({name}={getattr(self, name)!r}) is FSDP1's and would have no effect with "
            f"fully_shard. Leave it out; {instead}."
            for name, instead in _FSDP1_ONLY.items()
            if getattr(self, name)
        ]
        return found

    @property
    def writes_shards(self) -> bool:
        """Whether every process writes its own shard of a checkpoint."""
        return self.state_dict_type.upper() == "SHARDED_STATE_DICT"

    def _mistakes(self) -> list[str]:
        found = []
        if self.fsdp_version != 2:
            found.append(
                f"FullyShardedDataParallelPlugin(fsdp_version={self.fsdp_version!r}) cannot be "
                "served: torch keeps FSDP1 for old code only. Leave it out to get fully_shard."
            )
        policy = self.auto_wrap_policy
        if isinstance(policy, str) and policy.lower() not in _WRAP_POLICIES:
            found.append(
                f"FullyShardedDataParallelPlugin(auto_wrap_policy={policy!r}) is unknown. "
                f"Nothing says what to shard. Give one of {', '.join(_WRAP_POLICIES)}, or a "
                "function from a module to True or False."
            )
        if str(self.state_dict_type).upper() not in _STATE_TYPES:
            found.append(
                f"FullyShardedDataParallelPlugin(state_dict_type={self.state_dict_type!r}) is "
                f"unknown. Checkpoints could not be written. Give one of {', '.join(_STATE_TYPES)}."
            )
        return found
