"""``ZeroConfig``: a DeepSpeed configuration as an object, and as the JSON that DeepSpeed reads.

Its sections stand first, key by key, each with its meaning and unit.

Names are those of DeepSpeed's JSON. ``None`` leaves a key to DeepSpeed.

What ``zero_optimization`` holds in JSON are settings like any other here. A key has a field where
nbaccel explains it, checks its range, or computes with it. Any other is kept in ``extra``, so a
round trip loses nothing; `checking` compares it with DeepSpeed's models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from nbaccel.base.errors import ConfigError
from nbaccel.config.deepspeed_document import SECTION_RULES
from nbaccel.config.field_rules import FieldMistake, FieldRule, mistakes_in
from nbaccel.config.text_forms import plain_object, read_file
from nbaccel.config.value_readers import read_whole
from nbaccel.deepspeed.field_types import (
    Depth,
    DeviceField,
    FloatFormat,
    Fraction,
    Number,
    Params,
    Section,
    StepsField,
    Text,
    Truth,
    Whole,
    WholeFromOne,
    Words,
    holds,
    merged_mappings,
)

if TYPE_CHECKING:
    from typing_extensions import Self


__all__ = [
    "ZERO",
    "ZERO_KEYS",
    "ActivationCheckpointing",
    "Aio",
    "Bf16Section",
    "Checkpoint",
    "CheckpointWriter",
    "Comet",
    "CommsLogger",
    "CsvMonitor",
    "DataTypes",
    "FlopsProfiler",
    "Fp16Section",
    "LeafModules",
    "OffloadOptimizer",
    "OffloadParam",
    "OptimizerSection",
    "ParallelWrite",
    "SchedulerSection",
    "TensorBoard",
    "Throughput",
    "Timers",
    "TorchAutocast",
    "Wandb",
    "ZeroConfig",
    "old_forms",
]


class OffloadOptimizer(Section):
    """Where the optimizer's state is kept, and its step is computed (ZeRO 1, 2 and 3)."""

    device: DeviceField = Field(
        None, description="Where optimizer state is kept; nvme needs stage 3."
    )
    nvme_path: Text = Field(None, description="Folder for optimizer state on the fast disk.")
    pin_memory: Truth = Field(None, description="Page-locked host memory: faster, not swappable.")
    buffer_count: Whole = Field(None, description="Buffers for swapping, one per state at least.")
    pipeline_read: Truth = Field(None, description="Read the next tile while one is computed.")
    pipeline_write: Truth = Field(None, description="Write the last tile while one is computed.")
    ratio: Fraction = Field(None, description="Share of the state that is offloaded (stage 3).")
    super_offload: Truth = Field(None, description="Offload for superchips (stage 3).")
    cpuadam_cores_perc: Fraction = Field(
        None, description="Share of the CPU cores that computes Adam with super_offload."
    )


class OffloadParam(Section):
    """Where parameters are kept while they are not used (ZeRO 3)."""

    device: DeviceField = Field(None, description="Where parameters are kept; needs stage 3.")
    nvme_path: Text = Field(None, description="Folder for parameters on the fast disk.")
    pin_memory: Truth = Field(None, description="Page-locked host memory: faster, not swappable.")
    buffer_count: Whole = Field(None, description="Buffers for swapping parameters.")
    buffer_size: Whole = Field(None, description="Size of each of those buffers, in elements.")
    max_in_cpu: Whole = Field(None, description="Parameters kept in host memory, in elements.")


class LeafModules(Section):
    """Modules whose parameters ZeRO 3 gathers as one."""

    classes: Words = Field(None, description="Class names of such modules.")
    names: Words = Field(None, description="Names of such modules.")
    name_suffixes: Words = Field(None, description="Ends of names of such modules.")


class Aio(Section):
    """How DeepSpeed reads and writes a disk (nvme offload)."""

    block_size: WholeFromOne = Field(None, description="Bytes of one request to the disk.")
    queue_depth: WholeFromOne = Field(None, description="Requests under way at once.")
    intra_op_parallelism: WholeFromOne = Field(None, description="Threads per read or write.")
    single_submit: Truth = Field(None, description="Submit requests one by one.")
    overlap_events: Truth = Field(None, description="Submit requests while others complete.")
    use_gds: Truth = Field(None, description="GPUDirect Storage: disk to GPU directly.")


class Fp16Section(Section):
    """Training in float16, with a scaled loss."""

    enabled: Truth = Field(None, description="Whether to train in float16.")
    auto_cast: Truth = Field(None, description="Cast inputs to float16.")
    loss_scale: Number = Field(None, description="Fixed scale of the loss; 0 adapts it.")
    initial_scale_power: Whole = Field(None, description="The first scale, as a power of two.")
    loss_scale_window: Whole = Field(None, description="Steps after which the scale doubles.")
    hysteresis: Whole = Field(None, description="Overflows before the scale is lowered.")
    consecutive_hysteresis: Truth = Field(None, description="Refill hysteresis after good steps.")
    min_loss_scale: Whole = Field(None, description="The scale's floor.")
    fp16_master_weights_and_grads: Truth = Field(
        None, description="Master weights and gradients in float16 too (offloaded Adam)."
    )


class Bf16Section(Section):
    """Training in bfloat16."""

    enabled: Truth = Field(None, description="Whether to train in bfloat16.")
    check_grad_overflow: Truth = Field(None, description="Skip steps whose gradients overflow.")
    bf16_master_weights_and_grads: Truth = Field(
        None, description="Master weights and gradients in bfloat16 too."
    )
    bf16_optimizer_states: Truth = Field(None, description="Optimizer state in bfloat16 too.")


class TorchAutocast(Section):
    """Mixed precision by ``torch.autocast`` in place of fp16 and bf16."""

    enabled: Truth = Field(None, description="Whether to use torch.autocast.")
    dtype: Text = Field(None, description="Number format: float16 or bfloat16.")
    lower_precision_safe_modules: Words = Field(
        None, description="Classes of modules that may communicate in that format."
    )


class DataTypes(Section):
    """Number formats of single things."""

    grad_accum_dtype: FloatFormat = Field(None, description="Format gradients accumulate in.")
    param_dtype: FloatFormat = Field(None, description="Format of parameters.")
    buffer_dtype: FloatFormat = Field(None, description="Format of buffers.")


class OptimizerSection(Section):
    """The optimizer that DeepSpeed makes."""

    type: Text = Field(None, description="Its name: AdamW, Adam, Lion, Muon, Adagrad, Lamb, ...")
    params: Params = Field(None, description="Its constructor's arguments: lr, betas, ...")
    legacy_fusion: Truth = Field(None, description="The older fused float16 optimizer.")


class SchedulerSection(Section):
    """The learning rate schedule that DeepSpeed makes."""

    type: Text = Field(
        None,
        description="Its name: WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest.",
    )
    params: Params = Field(None, description="Its constructor's arguments; counts are in steps.")


class ActivationCheckpointing(Section):
    """How ``deepspeed.checkpointing`` keeps activations for the backward pass."""

    partition_activations: Truth = Field(None, description="Shard them among model ranks.")
    cpu_checkpointing: Truth = Field(None, description="Keep sharded ones in host memory.")
    contiguous_memory_optimization: Truth = Field(None, description="Keep them in one buffer.")
    number_checkpoints: WholeFromOne = Field(None, description="Checkpoints in that buffer.")
    synchronize_checkpoint_boundary: Truth = Field(None, description="Synchronise at each one.")
    profile: Truth = Field(None, description="Log the time of each.")


class ParallelWrite(Section):
    """Writing a checkpoint by several ranks."""

    pipeline_stage: Truth = Field(None, description="Pipeline stages write in parallel.")


class CheckpointWriter(Section):
    """Which writer writes a checkpoint, and how."""

    type: Text = Field(None, description="fast, python or mock.")
    decoupled: Truth = Field(None, description="Write while training goes on.")
    io_buffer_size: WholeFromOne = Field(None, description="Buffer, in bytes.")
    io_buffer_double: Truth = Field(None, description="Two buffers: one fills, one is written.")
    show_statistics: Truth = Field(None, description="Log how fast it was.")
    data_parallel: Text = Field(None, description="replica, socket or machine.")
    io_multiplier: WholeFromOne = Field(None, description="Writers per rank.")


_Parallel = holds(ParallelWrite)
_Writer = holds(CheckpointWriter)


class Checkpoint(Section):
    """How checkpoints are written and read."""

    tag_validation: Text = Field(None, description="Warn, Ignore or Fail where ranks' tags differ.")
    load_universal: Truth = Field(None, description="The checkpoint is a universal one.")
    use_node_local_storage: Truth = Field(None, description="Each node writes to its own disk.")
    checkpoint_serialization: Truth = Field(None, description="torch.save's zip format.")
    parallel_write: Annotated[ParallelWrite | None, _Parallel] = Field(
        None, description="Writing by several ranks."
    )
    writer: Annotated[CheckpointWriter | None, _Writer] = Field(
        None, description="Who writes, and how."
    )


class FlopsProfiler(Section):
    """Counting what the model computes."""

    enabled: Truth = Field(None, description="Whether to profile.")
    recompute_fwd_factor: Number = Field(None, description="Extra forwards by recomputation.")
    profile_step: Whole = Field(None, description="The step that is profiled.")
    module_depth: Depth = Field(None, description="Depth of modules printed; -1 is all.")
    top_modules: WholeFromOne = Field(None, description="Modules printed per depth.")
    detailed: Truth = Field(None, description="Print every module.")
    output_file: Text = Field(None, description="File to print to; nothing prints to the screen.")


class CommsLogger(Section):
    """Logging of communication."""

    enabled: Truth = Field(None, description="Whether to log communication.")
    verbose: Truth = Field(None, description="Log every operation as it happens.")
    prof_all: Truth = Field(None, description="Profile all operations.")
    prof_ops: Words = Field(None, description="Operations to profile, where not all.")
    debug: Truth = Field(None, description="Add the caller's name.")


class TensorBoard(Section):
    """Logging to TensorBoard."""

    enabled: Truth = Field(None, description="Whether to log there.")
    output_path: Text = Field(None, description="Folder of the logs.")
    job_name: Text = Field(None, description="Folder inside it.")


class CsvMonitor(Section):
    """Logging to CSV files."""

    enabled: Truth = Field(None, description="Whether to log there.")
    output_path: Text = Field(None, description="Folder of the files.")
    job_name: Text = Field(None, description="Folder inside it.")


class Wandb(Section):
    """Logging to Weights & Biases."""

    enabled: Truth = Field(None, description="Whether to log there.")
    group: Text = Field(None, description="Group of runs.")
    project: Text = Field(None, description="Project of the run.")


class Comet(Section):
    """Logging to Comet."""

    enabled: Truth = Field(None, description="Whether to log there.")
    samples_log_interval: WholeFromOne = Field(None, description="Samples between two entries.")
    project: Text = Field(None, description="Project of the run.")
    api_key: Text = Field(None, description="API key; better kept in Comet's own configuration.")
    experiment_name: Text = Field(None, description="Name of the experiment.")
    mode: Text = Field(None, description="get, create or get_or_create.")


class Throughput(Section):
    """The timer of samples per second."""

    enabled: Truth = Field(None, description="Whether to measure.")
    synchronized: Truth = Field(None, description="Wait for the device: exact, and slower.")


_Throughput = holds(Throughput)


class Timers(Section):
    """Timers."""

    throughput: Annotated[Throughput | None, _Throughput] = Field(
        None, description="The timer of samples per second."
    )


ZERO = "zero_optimization"

# `offload_optimizer="cpu"` and `optimizer="AdamW"` are short for sections of one key.
_offload_optimizer = holds(OffloadOptimizer, "device")
_offload_param = holds(OffloadParam, "device")
_leaf = holds(LeafModules)
_optimizer = holds(OptimizerSection, "type")
_scheduler = holds(SchedulerSection, "type")
_fp16 = holds(Fp16Section)
_bf16 = holds(Bf16Section)
_autocast = holds(TorchAutocast)
_types = holds(DataTypes)
_aio = holds(Aio)
_activations = holds(ActivationCheckpointing)
_checkpoint = holds(Checkpoint)
_flops = holds(FlopsProfiler)
_comms = holds(CommsLogger)
_tensorboard = holds(TensorBoard)
_wandb = holds(Wandb)
_csv = holds(CsvMonitor)
_comet = holds(Comet)
_timers = holds(Timers)

Stage = Annotated[
    Literal[0, 1, 2, 3, "auto"] | None,
    FieldRule(read=read_whole, must="one of 0, 1, 2, 3", do="Give 0 to shard nothing"),
]


class _ZeroSection(Section):
    """What JSON holds under ``zero_optimization``."""

    stage: Stage = Field(
        None, description="ZeRO stage; 1 shards the optimizer, 2 also gradients, 3 also weights."
    )
    offload_optimizer: Annotated[OffloadOptimizer | None, _offload_optimizer] = Field(
        None, description="Where optimizer state lives (stages 1 to 3)."
    )
    offload_param: Annotated[OffloadParam | None, _offload_param] = Field(
        None, description="Where parameters live (stage 3)."
    )
    overlap_comm: Truth = Field(None, description="Reduce gradients while others are computed.")
    contiguous_gradients: Truth = Field(None, description="Gradients in one buffer.")
    reduce_scatter: Truth = Field(None, description="Reduce-scatter in place of all-reduce.")
    reduce_bucket_size: WholeFromOne = Field(
        None, description="Elements of gradients reduced at a time; memory against calls."
    )
    allgather_partitions: Truth = Field(None, description="All-gather in place of broadcasts.")
    allgather_bucket_size: Whole = Field(None, description="Elements gathered at a time.")
    round_robin_gradients: Truth = Field(
        None, description="Ranks take turns in copying gradients to the host (offload)."
    )
    sub_group_size: Whole = Field(None, description="Elements the optimizer steps at a time.")
    stage3_max_live_parameters: Whole = Field(
        None, description="Elements a device holds gathered before it releases some."
    )
    stage3_max_reuse_distance: Whole = Field(
        None, description="Elements within which a parameter used again is not released."
    )
    stage3_prefetch_bucket_size: Whole = Field(None, description="Elements fetched ahead of use.")
    stage3_param_persistence_threshold: Whole = Field(
        None, description="Parameters below so many elements are not sharded."
    )
    stage3_model_persistence_threshold: Whole = Field(
        None, description="Elements that may stay unsharded in all."
    )
    stage3_gather_16bit_weights_on_model_save: Truth = Field(
        None, description="Gather the weights for save_16bit_model; without, it writes nothing."
    )
    stage3_module_granularity_threshold: Whole = Field(
        None, description="Modules finer than so many elements are fetched as one."
    )
    stage3_use_all_reduce_for_fetch_params: Truth = Field(
        None, description="Fetch parameters by all-reduce: less work on the host."
    )
    stage3_allgather_sequential: Truth = Field(
        None, description="Gather parameters one by one: less memory."
    )
    ignore_unused_parameters: Truth = Field(None, description="Go on where some get no gradient.")
    compute_grad_norm: Truth = Field(None, description="Compute the global norm (stages 1, 2).")
    zero_hpz_partition_size: Whole = Field(
        None, description="Ranks that hold a second copy of the shards (ZeRO++)."
    )
    zero_quantized_weights: Truth = Field(None, description="Gather weights in 8 bits (ZeRO++).")
    zero_quantized_nontrainable_weights: Truth = Field(
        None, description="Keep frozen weights quantized (ZeRO++)."
    )
    zero_quantized_gradients: Truth = Field(
        None, description="Reduce gradients in 4 bits (ZeRO++)."
    )
    leaf_module: Annotated[LeafModules | None, _leaf] = Field(
        None, description="Modules gathered as one (stage 3)."
    )


# A class beside `ZeroConfig`, so that its fields are the keys that JSON has under that section.
ZERO_KEYS = tuple(name for name in _ZeroSection.model_fields if name != "extra")


class ZeroConfig(_ZeroSection):
    """A DeepSpeed configuration.

    Examples:
        >>> ZeroConfig(stage=2, offload_optimizer="cpu", train_batch_size=8).to_json()
        '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "train_batch_size": 8}'
    """  # noqa: E501 - one line of output

    train_batch_size: WholeFromOne = Field(
        None, description="Samples per optimizer step, over all processes."
    )
    train_micro_batch_size_per_gpu: WholeFromOne = Field(
        None, description="Samples per process and forward pass."
    )
    gradient_accumulation_steps: WholeFromOne = Field(
        None, description="Forward passes per optimizer step."
    )
    gradient_clipping: Number = Field(
        None, description="Largest norm of the gradients; 0 does not clip. DeepSpeed's own is 1."
    )
    optimizer: Annotated[OptimizerSection | None, _optimizer] = Field(
        None, description="The optimizer that DeepSpeed makes."
    )
    scheduler: Annotated[SchedulerSection | None, _scheduler] = Field(
        None, description="The learning rate schedule that DeepSpeed makes."
    )
    fp16: Annotated[Fp16Section | None, _fp16] = Field(None, description="Training in float16.")
    bf16: Annotated[Bf16Section | None, _bf16] = Field(None, description="Training in bfloat16.")
    torch_autocast: Annotated[TorchAutocast | None, _autocast] = Field(
        None, description="Mixed precision by torch.autocast."
    )
    data_types: Annotated[DataTypes | None, _types] = Field(
        None, description="Number formats of single things."
    )
    communication_data_type: FloatFormat = Field(None, description="Format gradients travel in.")
    seq_parallel_communication_data_type: FloatFormat = Field(
        None, description="The same, among ranks that share a sequence."
    )
    prescale_gradients: Truth = Field(None, description="Divide gradients before the reduction.")
    gradient_predivide_factor: Number = Field(None, description="By what they are divided then.")
    gradient_allreduce_op: Text = Field(None, description="mean, or sum (below stage 3).")
    disable_allgather: Truth = Field(None, description="Broadcast in place of all-gather.")
    managed_gradient_accumulation: Truth = Field(None, description="DeepSpeed counts the passes.")
    sequence_parallel_size: WholeFromOne = Field(None, description="Ranks that share a sequence.")
    zero_allow_untested_optimizer: Truth = Field(None, description="ZeRO with any optimizer.")
    zero_force_ds_cpu_optimizer: Truth = Field(
        None, description="Refuse an offloaded optimizer that is not DeepSpeed's."
    )
    aio: Annotated[Aio | None, _aio] = Field(
        None, description="How the disk is read and written (nvme)."
    )
    activation_checkpointing: Annotated[ActivationCheckpointing | None, _activations] = Field(
        None, description="How activations are kept for the backward pass."
    )
    checkpoint: Annotated[Checkpoint | None, _checkpoint] = Field(
        None, description="How checkpoints are written and read."
    )
    steps_per_print: StepsField = Field(None, description="Steps between two lines of progress.")
    wall_clock_breakdown: Truth = Field(
        None, description="Log the time of forward, backward, step."
    )
    memory_breakdown: Truth = Field(None, description="Log the memory in use.")
    dump_state: Truth = Field(None, description="Print the engine's state at the start.")
    log_level: Text = Field(None, description="DeepSpeed's log level: debug, info, warning, ...")
    flops_profiler: Annotated[FlopsProfiler | None, _flops] = Field(
        None, description="Counting what the model computes."
    )
    comms_logger: Annotated[CommsLogger | None, _comms] = Field(
        None, description="Logging of communication."
    )
    tensorboard: Annotated[TensorBoard | None, _tensorboard] = Field(
        None, description="Logging to TensorBoard."
    )
    wandb: Annotated[Wandb | None, _wandb] = Field(None, description="Logging to Weights & Biases.")
    csv_monitor: Annotated[CsvMonitor | None, _csv] = Field(
        None, description="Logging to CSV files."
    )
    comet: Annotated[Comet | None, _comet] = Field(None, description="Logging to Comet.")
    timers: Annotated[Timers | None, _timers] = Field(None, description="Timers.")
    dataloader_drop_last: Truth = Field(None, description="Drop the last incomplete batch.")
    disable_python_gc: Truth = Field(None, description="Collect no garbage while training.")

    @property
    def zero_stage(self) -> int:
        """The stage as DeepSpeed reads it: 0 where none is given."""
        return self.stage if isinstance(self.stage, int) else 0

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Self:
        """Read a DeepSpeed configuration; keys without a field are kept in ``extra``.

        Old forms that DeepSpeed still reads (``bfloat16``, ``cpu_offload``, ...) become today's.

        Args:
            settings: Keys and values, as in DeepSpeed's JSON.

        Returns:
            The configuration.

        Raises:
            ConfigError: Values are wrong, all of them listed.
        """
        settings, _ = old_forms(plain_object(settings, "A ZeroConfig"))
        flat_settings = {
            config_key: value for config_key, value in settings.items() if config_key != ZERO
        }
        # A key of `zero_optimization` at the top level is not a setting: DeepSpeed ignores it
        # there, so it is kept as it stands, for the check to find.
        extra_keys = {
            config_key: flat_settings.pop(config_key)
            for config_key in tuple(flat_settings)
            if config_key in ZERO_KEYS
        }
        zero_section = settings.get(ZERO)
        if isinstance(zero_section, dict):
            flat_settings |= {
                config_key: zero_section[config_key]
                for config_key in ZERO_KEYS
                if config_key in zero_section
            }
            remaining_keys = {
                config_key: value
                for config_key, value in zero_section.items()
                if config_key not in ZERO_KEYS
            }
            # An empty section is kept, too, so that a round trip loses nothing.
            if remaining_keys or not zero_section:
                extra_keys[ZERO] = remaining_keys
        elif zero_section is not None:
            raise ConfigError(FieldMistake(SECTION_RULES[ZERO].refusal(ZERO, zero_section), ZERO))
        try:
            return super().from_dict(
                {
                    **flat_settings,
                    "extra": merged_mappings(dict(flat_settings.get("extra") or {}), extra_keys),
                }
            )
        except ConfigError as error:
            raise ConfigError(*map(_in_its_section, mistakes_in(error))) from error

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Read a file with a DeepSpeed configuration.

        Args:
            path: A JSON file.

        Returns:
            The configuration.

        Raises:
            ConfigError: There is no such file, or what it holds is wrong.
        """
        return cls.from_dict(read_file(path))

    def to_dict(self) -> dict[str, Any]:
        """The configuration as DeepSpeed reads it, without the keys that are left to DeepSpeed.

        Returns:
            What ``deepspeed.initialize(config=...)`` takes; changing it changes nothing here.
        """
        settings = dict(self._given())
        section = {key: settings.pop(key) for key in ZERO_KEYS if key in settings}
        return merged_mappings({**({ZERO: section} if section else {}), **settings}, self.extra)

    def to_file(self, path: str | Path) -> None:
        """Write the configuration as a JSON file.

        Args:
            path: Where; a file there is replaced.
        """
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")


def old_forms(old_settings: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Today's form of what DeepSpeed still reads in an older one."""
    new_settings = dict(old_settings)
    notes: list[str] = []

    def moved(holder: dict[str, Any], old_key: str, config_key: str, key_value: Any) -> None:
        del holder[old_key]
        holder.setdefault(config_key, key_value)
        notes.append(f"{old_key} is an old form: write {config_key}={holder[config_key]!r}.")

    if "bfloat16" in new_settings:
        moved(new_settings, "bfloat16", "bf16", new_settings["bfloat16"])
    if isinstance(new_settings.get(ZERO), bool):
        new_settings[ZERO] = {"stage": int(new_settings[ZERO])}
        notes.append(f"{ZERO} was true or false in an old form: write {new_settings[ZERO]!r}.")
    if isinstance(new_settings.get(ZERO), dict):
        # A copy, since the given configuration must stay as it is.
        zero_section = new_settings[ZERO] = dict(new_settings[ZERO])
        for old_key, config_key in (
            ("cpu_offload", "offload_optimizer"),
            ("cpu_offload_param", "offload_param"),
        ):
            if isinstance(zero_section.get(old_key), bool):
                moved(
                    zero_section,
                    old_key,
                    config_key,
                    {"device": "cpu"} if zero_section[old_key] else {"device": "none"},
                )
        old_key = "stage3_gather_fp16_weights_on_model_save"
        if old_key in zero_section:
            moved(
                zero_section,
                old_key,
                "stage3_gather_16bit_weights_on_model_save",
                zero_section[old_key],
            )
        for config_key in [key_name for key_name in ZERO_KEYS if key_name.startswith("stage3_")]:
            if config_key.removeprefix("stage3_") in zero_section:
                moved(
                    zero_section,
                    config_key.removeprefix("stage3_"),
                    config_key,
                    zero_section[config_key.removeprefix("stage3_")],
                )
    if isinstance(new_settings.get("aio"), dict) and "thread_count" in new_settings["aio"]:
        # DeepSpeed's documentation still has the old name, which DeepSpeed ignores.
        aio = new_settings["aio"] = dict(new_settings["aio"])
        moved(aio, "thread_count", "intra_op_parallelism", aio["thread_count"])
    return new_settings, tuple(notes)


def _in_its_section(mistake: FieldMistake) -> FieldMistake:
    """A mistake with the path that its setting has in JSON."""
    return mistake.under(ZERO) if mistake.path.partition(".")[0] in ZERO_KEYS else mistake
