"""What choices are called in plain words, which come first, and what their numbers count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nbaccel.deepspeed.config import ZERO

__all__ = [
    "COMMON",
    "DEFAULTS",
    "LABELS",
    "MEANINGS",
    "OPTIMIZERS",
    "OPTIMIZER_PLACE",
    "PARAM_PLACE",
    "PASSES",
    "PLACES",
    "SCHEDULES",
    "SECTIONS",
    "STAGES",
    "TITLES",
    "UNIT_OF",
    "YOURS",
    "Option",
]

OPTIMIZER_PLACE = f"{ZERO}.offload_optimizer.device"
PARAM_PLACE = f"{ZERO}.offload_param.device"


@dataclass(frozen=True, slots=True)
class Option:
    """One of the values of a choice.

    Attributes:
        value: What the configuration holds; None leaves it to the plan or to DeepSpeed.
        label: How it is called.
        meaning: What it does, in one line.
    """

    value: Any
    label: str
    meaning: str = ""


TITLES = {"precision": "Precision", "zero": "ZeRO and DeepSpeed", "launch": "Launch"}
# Names of the choices that come first, in the order in which they are shown.
COMMON = {
    "precision": ("mixed_precision",),
    "zero": (
        "zero_stage",
        OPTIMIZER_PLACE,
        f"{ZERO}.offload_optimizer.nvme_path",
        PARAM_PLACE,
        f"{ZERO}.offload_param.nvme_path",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "activation_checkpointing",
        f"{ZERO}.overlap_comm",
        f"{ZERO}.reduce_bucket_size",
        f"{ZERO}.allgather_bucket_size",
        f"{ZERO}.stage3_prefetch_bucket_size",
        "optimizer.type",
        "scheduler.type",
    ),
    "launch": (
        "device",
        "num_processes",
        "start_method",
        "num_nodes",
        "node_rank",
        "master_addr",
        "use_port",
    ),
}
LABELS = {
    "mixed_precision": "Precision",
    "zero_stage": "ZeRO stage",
    OPTIMIZER_PLACE: "Optimizer state on",
    PARAM_PLACE: "Parameters on",
    f"{ZERO}.offload_optimizer.nvme_path": "Folder for optimizer state",
    f"{ZERO}.offload_param.nvme_path": "Folder for parameters",
    "train_micro_batch_size_per_gpu": "Batch per process",
    "gradient_accumulation_steps": "Accumulation",
    "gradient_clipping": "Gradient clipping",
    "activation_checkpointing": "Activation checkpointing",
    f"{ZERO}.overlap_comm": "Overlap communication",
    f"{ZERO}.reduce_bucket_size": "Reduce bucket",
    f"{ZERO}.allgather_bucket_size": "All-gather bucket",
    f"{ZERO}.stage3_prefetch_bucket_size": "Prefetch bucket",
    "optimizer.type": "Optimizer",
    "scheduler.type": "Scheduler",
    "device": "Device",
    "num_processes": "Processes",
    "start_method": "Start method",
    "num_nodes": "Nodes",
    "node_rank": "This node's number",
    "master_addr": "Address of node 0",
    "use_port": "Port",
    "fp8.backend": "FP8 backend",
    "fp8.opt_level": "MS-AMP level",
    "fp8.fp8_format": "Format",
    "fp8.amax_history_len": "Amax history",
    "fp8.amax_compute_algo": "Amax algorithm",
    "fp8.use_autocast_during_eval": "FP8 in evaluation",
}
# Where a description says how to write the value, and a form has the values to choose from.
MEANINGS = {
    "mixed_precision": "Number format of the forward and backward pass.",
    "zero_stage": "What each process holds only a shard of.",
    "optimizer.type": "Who makes the optimizer, and which.",
    "scheduler.type": "Who makes the learning rate schedule, and which.",
}
SECTIONS = {
    "": "Engine",
    ZERO: "ZeRO",
    f"{ZERO}.offload_optimizer": "Optimizer offload",
    f"{ZERO}.offload_param": "Parameter offload",
    f"{ZERO}.leaf_module": "Leaf modules",
    "optimizer": "Optimizer",
    "scheduler": "Scheduler",
    "fp16": "fp16",
    "bf16": "bf16",
    "torch_autocast": "torch.autocast",
    "data_types": "Number formats",
    "aio": "Disk access (aio)",
    "activation_checkpointing": "Activation checkpointing by DeepSpeed",
    "checkpoint": "Checkpoints",
    "checkpoint.parallel_write": "Checkpoints",
    "checkpoint.writer": "Checkpoints",
    "flops_profiler": "Profiler",
    "comms_logger": "Communication log",
    "tensorboard": "TensorBoard",
    "csv_monitor": "CSV files",
    "wandb": "Weights & Biases",
    "comet": "Comet",
    "timers.throughput": "Timers",
}
# Of numbers that count something else than what their meaning begins with.
UNITS = {
    "bytes": ("aio.block_size", "checkpoint.writer.io_buffer_size"),
    "samples": (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "comet.samples_log_interval",
    ),
    "batches": ("gradient_accumulation_steps",),
    "steps": (
        "steps_per_print",
        "flops_profiler.profile_step",
        "fp16.loss_scale_window",
        "fp8.interval",
        "fp8.amax_history_len",
    ),
    "powers of two": ("fp8.margin", "fp16.initial_scale_power"),
    "norm": ("gradient_clipping",),
    "processes": ("num_processes",),
    "machines": ("num_nodes",),
    "restarts": ("max_restarts",),
    "threads": ("threads_per_process", "aio.intra_op_parallelism"),
    "s": ("timeout", "monitor_interval"),
    "requests": ("aio.queue_depth",),
    "buffers": (
        f"{ZERO}.offload_optimizer.buffer_count",
        f"{ZERO}.offload_param.buffer_count",
    ),
    "ranks": (f"{ZERO}.zero_hpz_partition_size", "sequence_parallel_size"),
}
UNIT_OF = {name: unit for unit, names in UNITS.items() for name in names}
# DeepSpeed's own, for what a user is likely to look at; a test holds them against the library.
DEFAULTS = {
    "gradient_clipping": 1.0,
    f"{ZERO}.overlap_comm": None,
    f"{ZERO}.reduce_bucket_size": 500_000_000,
    f"{ZERO}.allgather_bucket_size": 500_000_000,
    f"{ZERO}.stage3_prefetch_bucket_size": 50_000_000,
    f"{ZERO}.stage3_param_persistence_threshold": 100_000,
    f"{ZERO}.stage3_max_live_parameters": 1_000_000_000,
    f"{ZERO}.stage3_max_reuse_distance": 1_000_000_000,
    f"{ZERO}.sub_group_size": 1_000_000_000,
    f"{ZERO}.contiguous_gradients": True,
    f"{ZERO}.reduce_scatter": True,
    f"{ZERO}.offload_optimizer.buffer_count": 4,
    f"{ZERO}.offload_param.buffer_count": 5,
    f"{ZERO}.offload_param.buffer_size": 100_000_000,
}
STAGES = (
    Option(None, "off", "Every process holds the whole model: plain data-parallel training."),
    Option(0, "0", "DeepSpeed's engine, nothing in shards."),
    Option(1, "1", "Shards the optimizer."),
    Option(2, "2", "Shards optimizer and gradients."),
    Option(3, "3", "Shards optimizer, gradients and weights."),
)
PLACES = (
    Option(None, "device", "On the device that computes."),
    Option("cpu", "CPU", "In host memory: slower, and room on the device."),
    Option("nvme", "NVMe", "In files on a fast disk: slowest, and the most room (stage 3)."),
)
OPTIMIZERS = ("AdamW", "Adam", "Lion", "Adagrad", "Muon", "SGD")
SCHEDULES = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest")
YOURS = Option(None, "yours", "The one that your code makes.")
PASSES = {
    "fprop": "forward",
    "dgrad": "input gradient",
    "wgrad": "weight gradient",
}
