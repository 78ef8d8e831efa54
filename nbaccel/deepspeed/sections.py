"""The sections of a DeepSpeed configuration, key by key, each with its meaning and unit.

Names are those of DeepSpeed's JSON. ``None`` leaves a key to DeepSpeed.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from nbaccel.deepspeed.kinds import (
    Depth,
    Device,
    FloatFormat,
    Fraction,
    Number,
    Params,
    Text,
    Truth,
    Whole,
    WholeFromOne,
    Words,
)
from nbaccel.deepspeed.section import Holds, Section

__all__ = [
    "ActivationCheckpointing",
    "Aio",
    "Bf16",
    "Checkpoint",
    "CheckpointWriter",
    "Comet",
    "CommsLogger",
    "CsvMonitor",
    "DataTypes",
    "FlopsProfiler",
    "Fp16",
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
]


class OffloadOptimizer(Section):
    """Where the optimizer's state lives, and its step is computed (ZeRO 1, 2 and 3)."""

    device: Device = Field(None, description="Where optimizer state is kept; nvme needs stage 3.")
    nvme_path: Text = Field(None, description="Folder for optimizer state on the fast disk.")
    pin_memory: Truth = Field(None, description="Page-locked host memory: faster, not swappable.")
    buffer_count: Whole = Field(None, description="Buffers for swapping, one per state at least.")
    pipeline_read: Truth = Field(None, description="Read the next tile while one is computed.")
    pipeline_write: Truth = Field(None, description="Write the last tile while one is computed.")
    fast_init: Truth = Field(None, description="Initialise the optimizer on nvme quickly.")
    ratio: Fraction = Field(None, description="Share of the state that is offloaded (stage 3).")
    super_offload: Truth = Field(None, description="Offload for superchips (stage 3).")
    cpuadam_cores_perc: Fraction = Field(
        None, description="Share of the CPU cores that computes Adam with super_offload."
    )


class OffloadParam(Section):
    """Where parameters live while they are not computed with (ZeRO 3)."""

    device: Device = Field(None, description="Where parameters are kept; needs stage 3.")
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


class Fp16(Section):
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


class Bf16(Section):
    """Training in bfloat16."""

    enabled: Truth = Field(None, description="Whether to train in bfloat16.")
    immediate_grad_update: Truth = Field(None, description="Accumulate gradients as they come.")
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
    """Who writes a checkpoint, and how."""

    type: Text = Field(None, description="fast, python or mock.")
    decoupled: Truth = Field(None, description="Write while training goes on.")
    io_buffer_size: WholeFromOne = Field(None, description="Buffer, in bytes.")
    io_buffer_double: Truth = Field(None, description="Two buffers: one fills, one is written.")
    show_statistics: Truth = Field(None, description="Log how fast it was.")
    data_parallel: Text = Field(None, description="replica, socket or machine.")
    io_multiplier: WholeFromOne = Field(None, description="Writers per rank.")


_Parallel = Holds(ParallelWrite)
_Writer = Holds(CheckpointWriter)


class Checkpoint(Section):
    """How checkpoints are written and read."""

    tag_validation: Text = Field(None, description="Warn, Ignore or Fail where ranks' tags differ.")
    load_universal: Truth = Field(None, description="The checkpoint is a universal one.")
    use_node_local_storage: Truth = Field(None, description="Each node writes to its own disk.")
    checkpoint_serialization: Truth = Field(None, description="torch.save's zip format.")
    parallel_write: Annotated[ParallelWrite | None, _Parallel, BeforeValidator(_Parallel.read)] = (
        Field(None, description="Writing by several ranks.")
    )
    writer: Annotated[CheckpointWriter | None, _Writer, BeforeValidator(_Writer.read)] = Field(
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
    team: Text = Field(None, description="Team of the run.")
    project: Text = Field(None, description="Project of the run.")


class Comet(Section):
    """Logging to Comet."""

    enabled: Truth = Field(None, description="Whether to log there.")
    samples_log_interval: WholeFromOne = Field(None, description="Samples between two entries.")
    project: Text = Field(None, description="Project of the run.")
    workspace: Text = Field(None, description="Workspace.")
    api_key: Text = Field(None, description="API key; better kept in Comet's own configuration.")
    experiment_name: Text = Field(None, description="Name of the experiment.")
    experiment_key: Text = Field(None, description="Key of an experiment to go on with.")
    online: Truth = Field(None, description="Log online.")
    mode: Text = Field(None, description="get, create or get_or_create.")


class Throughput(Section):
    """The timer of samples per second."""

    enabled: Truth = Field(None, description="Whether to measure.")
    synchronized: Truth = Field(None, description="Wait for the device: exact, and slower.")


_Throughput = Holds(Throughput)


class Timers(Section):
    """Timers."""

    throughput: Annotated[Throughput | None, _Throughput, BeforeValidator(_Throughput.read)] = (
        Field(None, description="The timer of samples per second.")
    )
