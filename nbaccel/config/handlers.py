"""Settings of a training loop, by Accelerate's names; nothing here imports torch."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from nbaccel.base import env
from nbaccel.base.errors import ConfigError
from nbaccel.base.public_names import name_own
from nbaccel.config.enumerations import (
    DDPCommunicationHookType as DDPCommunicationHookType,
    DistributedType as DistributedType,
    DynamoBackend,
)
from nbaccel.config.field_rules import (
    NO_SMALLER,
    FieldCheck,
    FieldMistake,
    FieldRule,
    Handler as Handler,
    OptionalCount,
    Settings as Settings,
    checked_as,
    field_mistakes,
    refuse_mistakes,
)
from nbaccel.config.given_values import closest, plain_value, shown
from nbaccel.config.text_forms import json_like

_PLUGIN_NAME = "FullyShardedDataParallelPlugin"
WRAP_POLICIES = ("transformer_based_wrap", "size_based_wrap", "no_wrap")
_STATE_TYPES = ("FULL_STATE_DICT", "SHARDED_STATE_DICT")
_SHARDING_STRATEGIES = {"FULL_SHARD": True, "SHARD_GRAD_OP": False}
_OWN_WAY = ("backward_prefetch", "forward_prefetch")  # fully_shard prefetches by itself
_ALWAYS_DONE = ("use_orig_params", "sync_module_states", "limit_all_gathers")
FSDP_VARIABLES: Mapping[str, str] = {
    "sharding_strategy": "FSDP_SHARDING_STRATEGY",
    "reshard_after_forward": "FSDP_RESHARD_AFTER_FORWARD",
    "auto_wrap_policy": "FSDP_AUTO_WRAP_POLICY",
    "transformer_cls_names_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP",
    "min_num_params": "FSDP_MIN_NUM_PARAMS",
    "cpu_offload": "FSDP_OFFLOAD_PARAMS",
    "ignored_modules": "FSDP_IGNORED_MODULES",
    "state_dict_type": "FSDP_STATE_DICT_TYPE",
    "activation_checkpointing": "FSDP_ACTIVATION_CHECKPOINTING",
    "cpu_ram_efficient_loading": "FSDP_CPU_RAM_EFFICIENT_LOADING",
}
"""Settings that can be text, and Accelerate's variables, which its launcher and ours set."""
DYNAMO_VARIABLES: Mapping[str, str] = {
    "backend": "ACCELERATE_DYNAMO_BACKEND",
    "mode": "ACCELERATE_DYNAMO_MODE",
    "fullgraph": "ACCELERATE_DYNAMO_USE_FULLGRAPH",
    "dynamic": "ACCELERATE_DYNAMO_USE_DYNAMIC",
    "use_regional_compilation": "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION",
}
TRUTH_SETTINGS = (  # of both plugins
    *("reshard_after_forward", "cpu_offload", "activation_checkpointing"),
    *("cpu_ram_efficient_loading", "fullgraph", "dynamic", "use_regional_compilation"),
)
SHARDING_WORDS = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
# Torch's classes by name, since nothing here imports torch.
_OFFLOAD_POLICIES = {"CPUOffloadPolicy": True, "OffloadPolicy": False}


def plain_name(value: Any) -> str:
    """The name of an enum's member, or of its text: ``FULL_SHARD``."""
    return str(getattr(value, "name", value)).rpartition(".")[2].upper()


def sharding_word(value: Any) -> Any:
    """FSDP1's sharding strategy by its word; torch and older files number them from 1."""
    text = str(value).strip()
    if text.isdecimal() and 1 <= int(text) <= len(SHARDING_WORDS):
        return SHARDING_WORDS[int(text) - 1]
    return value


def split_names(text: str) -> list[str]:
    """Names that are written with commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def _variable_value(setting_name: str, text: str) -> Any:
    """What a variable says of a setting; None where a launcher only set its default."""
    if setting_name == "sharding_strategy":
        return sharding_word(text)
    if setting_name == "transformer_cls_names_to_wrap":
        return split_names(text)
    if setting_name == "auto_wrap_policy":
        return text.lower()
    if setting_name == "min_num_params":
        return None if text == "0" else text
    # FSDP1's words for resharding, which are understood, are no truth values.
    is_truth = setting_name in TRUTH_SETTINGS and text.upper() not in SHARDING_WORDS
    return env.flag(FSDP_VARIABLES[setting_name]) if is_truth else text


def _wrap_policy(value: Any) -> Any:
    if isinstance(value, str) and value.lower() not in WRAP_POLICIES:
        raise ValueError(value)
    return value


_VERSION_FIELD = Annotated[
    Literal[1, 2] | None, FieldRule(do="Leave it out to get fully_shard, which is 2")
]
_WRAP_POLICY = Annotated[
    Any,
    FieldRule(
        read=_wrap_policy,
        must=f"one of {', '.join(WRAP_POLICIES)}, or a function from a module to True or False",
        allowed=WRAP_POLICIES,
        why="Nothing says what to shard",
        do="Leave it out to shard the blocks that the model names",
    ),
]
_STATE_TYPE = Annotated[
    Literal["FULL_STATE_DICT", "SHARDED_STATE_DICT"] | None,
    FieldRule(
        read=lambda value: None if value is None else plain_name(value),
        why="Checkpoints could not be written",
        do="Leave it out to write shards",
    ),
]


@dataclass
class FullyShardedDataParallelPlugin(Settings):
    """How torch's ``fully_shard`` (FSDP2) shards models.

    What is not given is taken from Accelerate's variables (``FSDP_OFFLOAD_PARAMS`` and the like),
    which launchers set.

    Attributes:
        fsdp_version: 2; 1 is accepted and trains with ``fully_shard``, too, with a warning.
        sharding_strategy: FSDP1's word for `reshard_after_forward`: ``FULL_SHARD`` for True,
            ``SHARD_GRAD_OP`` for False.
        reshard_after_forward: Whether gathered weights are freed after the forward: less
            memory, one more gather in the backward (ZeRO-3); False keeps them (ZeRO-2). None: True.
        backward_prefetch: FSDP1's, without effect: ``fully_shard`` prefetches by itself.
        mixed_precision_policy: ``torch.distributed.fsdp.MixedPrecisionPolicy``, a dict of its
            arguments, or ``fp16``/``bf16``; None follows the Accelerator's precision.
        auto_wrap_policy: Which submodules are sharded on their own: ``transformer_based_wrap``
            (classes named in `transformer_cls_names_to_wrap`, or the model's `_no_split_modules`),
            ``size_based_wrap`` (`min_num_params`), ``no_wrap``, or a function ``module -> bool``.
            None: transformer blocks where the model names them, else no submodule.
        cpu_offload: Whether shards live in host memory; torch's policy objects are understood.
        ignored_modules: Submodules left alone, or a regular expression on their names.
        state_dict_type: How ``save_state`` writes: ``SHARDED_STATE_DICT`` (every process its
            shard, torch.distributed.checkpoint) or ``FULL_STATE_DICT`` (one file). None: as
            `state_dict_config` says, else one file for `fsdp_version` 1 and shards for 2.
        state_dict_config: Torch's ``FullStateDictConfig`` or ``ShardedStateDictConfig``, another
            way to say `state_dict_type`. Whole weights are always collected in host memory.
        optim_state_dict_config: The same for the optimizer, which is written as the model is.
        limit_all_gathers: FSDP1's; True is the only way of ``fully_shard``.
        use_orig_params: The same.
        param_init_fn: FSDP1's, refused: build the model in an outer cell.
        sync_module_states: As `limit_all_gathers`.
        forward_prefetch: As `backward_prefetch`.
        activation_checkpointing: Whether wrapped submodules recompute activations.
        activation_checkpointing_offload: Refused: this version does not move them to the host.
        cpu_ram_efficient_loading: Taken for compatibility: workers share one copy anyway.
        transformer_cls_names_to_wrap: Class names of submodules sharded on their own.
        min_num_params: Least parameters of a submodule sharded on its own.
    """

    fsdp_version: int | None = field(default=None, metadata=checked_as(_VERSION_FIELD))
    sharding_strategy: Any = None
    reshard_after_forward: Any = None
    backward_prefetch: Any = None
    mixed_precision_policy: Any = None
    auto_wrap_policy: str | Callable[[Any], bool] | None = field(
        default=None, metadata=checked_as(_WRAP_POLICY)
    )
    cpu_offload: Any = None
    ignored_modules: Any = None
    state_dict_type: Any = field(default=None, metadata=checked_as(_STATE_TYPE))
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = None
    param_init_fn: Any = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | None = None
    activation_checkpointing: bool | None = None
    activation_checkpointing_offload: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    transformer_cls_names_to_wrap: Sequence[str] | None = None
    min_num_params: int | None = field(default=None, metadata=checked_as(OptionalCount))

    def __post_init__(self) -> None:
        self._take_variables()
        mistakes = field_mistakes(self)
        # A wrong type would be reported a second time, as a contradiction.
        is_wrong_type = any(one.path == "state_dict_type" for one in mistakes)
        texts = [] if is_wrong_type else self._contradictions()
        refuse_mistakes([*mistakes, *texts, *self._unfollowed()])
        self._warn_of_fsdp1()
        # The default depends on the version that was given, so it is read before it becomes 2.
        if self.state_dict_type is None:
            usual = _STATE_TYPES[self.fsdp_version != 1]
            self.state_dict_type = _kind_of(self.state_dict_config) or usual
        self.fsdp_version = 2
        choice = self.sharding_strategy or self.reshard_after_forward
        if choice is None or isinstance(choice, bool):
            self.reshard_after_forward = choice is not False
        else:
            self.reshard_after_forward = _SHARDING_STRATEGIES[plain_name(choice)]
        policy = type(self.cpu_offload).__name__
        # An object of FSDP1's class is true whatever its field says.
        offloads = self.cpu_offload.offload_params if policy == "CPUOffload" else self.cpu_offload
        self.cpu_offload = bool(_OFFLOAD_POLICIES.get(policy, offloads))
        self.activation_checkpointing = bool(self.activation_checkpointing)

    def _take_variables(self) -> None:
        """Take what was not given from Accelerate's variables; a setting that was given wins."""
        names = set(FSDP_VARIABLES)
        if self.sharding_strategy is not None or self.reshard_after_forward is not None:
            # Two words for one thing: the variable of the other would contradict it.
            names -= {"sharding_strategy", "reshard_after_forward"}
        if self.state_dict_config is not None or self.optim_state_dict_config is not None:
            names.discard("state_dict_type")
        version = self.fsdp_version or (env.read("FSDP_VERSION") or "").strip()
        if str(version) == "2":
            # `accelerate launch` sets it all the same, to a default.
            names.discard("sharding_strategy")
        for name in FSDP_VARIABLES:
            text = (env.read(FSDP_VARIABLES[name]) or "").strip()
            if name in names and text and text.lower() != "none" and getattr(self, name) is None:
                setattr(self, name, _variable_value(name, text))

    @property
    def writes_shards(self) -> bool:
        """Whether every process writes its own shard of a checkpoint."""
        return plain_name(self.state_dict_type) == "SHARDED_STATE_DICT"

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Let ``save_state`` write in another way from now on: train in shards, save one file.

        Args:
            state_dict_type: ``FULL_STATE_DICT`` or ``SHARDED_STATE_DICT``; None leaves it.

        Raises:
            ConfigError: It is another.
        """
        if state_dict_type is not None:
            self.state_dict_type = FieldCheck(_STATE_TYPE).read(
                "state_dict_type", state_dict_type, owner=type(self).__name__
            )

    def set_mixed_precision(
        self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False
    ) -> None:
        """Give the number format, where none was given.

        Args:
            mixed_precision: ``fp16``, ``bf16`` or ``fp32``.
            buffer_autocast: FSDP1's, without effect: ``fully_shard`` leaves buffers as they are.
            override: Whether it replaces one that was given.
        """
        if override or self.mixed_precision_policy is None:
            self.mixed_precision_policy = None if mixed_precision == "fp32" else mixed_precision

    def set_auto_wrap_policy(self, model: Any) -> None:
        """Nothing to do: what is sharded on its own is chosen in `prepare`, by the model there."""

    def set_cpu_offload(self) -> None:
        """Nothing to do: `cpu_offload` is a truth value as soon as it is given."""

    def _contradictions(self) -> list[str]:
        return [
            f"{_PLUGIN_NAME}(state_dict_type={self.state_dict_type!r}) contradicts "
            f"{name}={getattr(self, name)!r}, which decides, too. Leave one of them out."
            for name in ("state_dict_config", "optim_state_dict_config")
            if self.state_dict_type is not None
            and _kind_of(getattr(self, name)) not in (None, self.state_dict_type)
        ]

    def _unfollowed(self) -> list[str]:
        """Messages about settings that ``fully_shard`` does not support, each with a remedy."""
        settings = [
            f"{_PLUGIN_NAME}({setting_name}={value!r}) is not supported by fully_shard. Give "
            "reshard_after_forward, or leave the plugin out, which trains with DDP."
            for setting_name in ("sharding_strategy", "reshard_after_forward")
            if not isinstance(value := getattr(self, setting_name), (bool, type(None)))
            and plain_name(value) not in _SHARDING_STRATEGIES
        ]
        if self.param_init_fn is not None:
            settings.append(
                f"{_PLUGIN_NAME}(param_init_fn={self.param_init_fn!r}) is FSDP1's. Leave it out; "
                "build the model before prepare."
            )
        if self.activation_checkpointing_offload:
            settings.append(
                f"{_PLUGIN_NAME}(activation_checkpointing_offload=True) is not supported: this "
                "version does not move activations to host memory. Leave it out."
            )
        return settings

    def _warn_of_fsdp1(self) -> None:
        given = self.to_dict()
        fsdp1_settings = ["fsdp_version=1"] * (self.fsdp_version == 1)
        fsdp1_settings += [f"{name}={given[name]!r}" for name in _OWN_WAY if given[name]]
        fsdp1_settings += [f"{name}=False" for name in _ALWAYS_DONE if given[name] is False]
        if fsdp1_settings:
            warnings.warn(
                f"{_PLUGIN_NAME}({', '.join(fsdp1_settings)}): fully_shard, which is FSDP2, "
                "trains in FSDP1's place. Losses and weights are the same; parameters are "
                "DTensors, and none is flattened. Leave these arguments out.",
                stacklevel=4,  # past __post_init__ and the __init__ that dataclass made
            )


def _kind_of(state_dict_config: Any) -> str | None:
    """Which `state_dict_type` one of torch's configurations belongs to."""
    name = type(state_dict_config).__name__
    if state_dict_config is None or not name.endswith("StateDictConfig"):
        return None
    return "FULL_STATE_DICT" if name.startswith("Full") else "SHARDED_STATE_DICT"


_FOLDER_NUMBER = Annotated[int, Field(ge=0), NO_SMALLER]
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
        unknown_activities = [name for name in self.activities or () if str(name) not in kinds]
        if unknown_activities:
            raise ConfigError(
                f"ProfileKwargs(activities={list(self.activities or ())}) has unknown ones: "
                f"{unknown_activities}. Give some of {', '.join(kinds)}."
            )
        arguments = {name: value for name, value in self.to_dict().items() if value is not None}
        arguments.pop("output_trace_dir", None)
        if not self.with_modules:  # for TorchScript only: torch warns whenever it is passed
            del arguments["with_modules"]
        if (schedule := arguments.pop("schedule_option", None)) is not None:
            arguments["schedule"] = profiler_module.schedule(**schedule)
        if self.activities is not None:
            enum = profiler_module.ProfilerActivity
            arguments["activities"] = [getattr(enum, kinds[str(one)]) for one in self.activities]
        return profiler_module.profile(**arguments)


_MODE_FIELD = Annotated[
    Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None,
    FieldRule(
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
        backend = self.backend or env.read(DYNAMO_VARIABLES["backend"]) or "no"
        name = str(getattr(backend, "value", backend))
        # A package may register a further backend with torch, whose name is case-sensitive.
        self.backend = DynamoBackend(name.upper()) if name.upper() in DynamoBackend else name
        self.mode = self.mode or env.read(DYNAMO_VARIABLES["mode"]) or "default"
        super().__post_init__()
        for name in ("fullgraph", "dynamic", "use_regional_compilation"):
            if getattr(self, name) is None:
                said = env.flag(DYNAMO_VARIABLES[name])
                # torch decides whether shapes may change, unless something is said.
                setattr(self, name, said if name == "dynamic" else bool(said))

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
        defaults = {"mode": "default", "fullgraph": False, "disable": False}
        given = compile_arguments.items()
        return {name: one for name, one in given if one not in (None, defaults.get(name))}


# Settings of both plugins in a `RunConfig`. Training code gets them by Accelerate's variables.

_PLACE_VARIABLES = frozenset(
    {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK"}
    | {"MASTER_ADDR", "MASTER_PORT"}
)


def read_fsdp_settings(value: Any) -> Any:
    """Settings of `FullyShardedDataParallelPlugin`, as JSON holds them."""
    if not isinstance(value, Mapping):
        return value
    settings = _checked_names(value, FSDP_VARIABLES)
    if isinstance(class_names := settings.get("transformer_cls_names_to_wrap"), str):
        settings["transformer_cls_names_to_wrap"] = split_names(class_names)
    with warnings.catch_warnings():
        # The plugin is built for its checks alone; the worker's says what it does otherwise.
        warnings.simplefilter("ignore")
        plugin = _built_from(FullyShardedDataParallelPlugin, settings)
    if "min_num_params" in settings:
        # It may have been text; others are kept as given, since the plugin translates FSDP1's.
        settings["min_num_params"] = plugin.min_num_params
    return settings


def read_dynamo_settings(value: Any) -> Any:
    """Settings of `TorchDynamoPlugin`, also from a backend's name alone."""
    if isinstance(value, str):
        value = {"backend": value}
    if not isinstance(value, Mapping):
        return value
    settings = _checked_names(value, DYNAMO_VARIABLES)
    _built_from(TorchDynamoPlugin, settings)
    return settings


def _checked_names(settings: Mapping[str, Any], known_names: Mapping[str, str]) -> dict[str, Any]:
    """The settings as JSON holds them, without those that are None."""
    plain_settings: dict[str, Any] = json_like(settings)
    known = ", ".join(known_names)
    mistakes = [
        FieldMistake(
            f"{name} is no setting of it. It would be silently ignored."
            f"{closest(name, known_names) or f' The settings are: {known}.'}",
            name,
        )
        for name in plain_settings
        if name not in known_names
    ]
    mistakes += [
        FieldMistake(f"{name}={shown(plain_settings[name])} must be true or false.", name)
        for name in TRUTH_SETTINGS
        if not isinstance(plain_settings.get(name), (bool, type(None)))
    ]
    refuse_mistakes(mistakes)
    return {name: value for name, value in plain_settings.items() if value is not None}


def _built_from(plugin_class: Callable[..., Any], settings: Mapping[str, Any]) -> Any:
    try:
        return plugin_class(**settings)
    except ConfigError as error:
        # Without their paths, since the messages name the class that was called.
        raise ConfigError(*map(FieldMistake, error.mistakes)) from error


def read_worker_variables(given_value: Any) -> Any:
    """Environment variables as text."""
    if not isinstance(given_value, Mapping):
        return given_value
    if placed_names := sorted(_PLACE_VARIABLES & {str(name) for name in given_value}):
        text = (
            f"{', '.join(placed_names)} cannot be given: the launcher tells each worker its "
            "place by it. Give num_processes, num_nodes, node_rank, master_addr or use_port."
        )
        raise ConfigError(FieldMistake(text))
    return {
        str(name): str(value) if isinstance(value, (bool, int, float)) else value
        for name, value in given_value.items()
    }


def setting_variables(
    settings: Mapping[str, Any] | None, variable_names: Mapping[str, str]
) -> dict[str, str]:
    """The variables that carry settings of a plugin to workers."""
    variables = {}
    for name, value in (settings or {}).items():
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        if value is not None:
            variables[variable_names[name]] = text.lower() if isinstance(value, bool) else text
    return variables


name_own(globals())
