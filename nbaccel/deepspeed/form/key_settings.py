"""Each key of a DeepSpeed configuration as a choice: its name, its meaning, its unit.

Nothing is listed twice: keys and descriptions come from `ZeroConfig`. Here are the order of the
first ones, their labels, and the units of numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from nbaccel.config import RunConfig
from nbaccel.config.field_rules import rule_of
from nbaccel.deepspeed.auto_values import AUTO_KEYS
from nbaccel.deepspeed.zero_config import ZERO, ZERO_KEYS, ZeroConfig, section_of
from nbaccel.memory.settings_form import ChoiceOption, Setting

OPTIMIZER_PLACE = f"{ZERO}.offload_optimizer.device"
PARAM_PLACE = f"{ZERO}.offload_param.device"
OVERLAP = f"{ZERO}.overlap_comm"

COMMON = (
    "zero_stage",
    OPTIMIZER_PLACE,
    f"{ZERO}.offload_optimizer.nvme_path",
    PARAM_PLACE,
    f"{ZERO}.offload_param.nvme_path",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "activation_checkpointing",
    OVERLAP,
    f"{ZERO}.reduce_bucket_size",
    f"{ZERO}.allgather_bucket_size",
    f"{ZERO}.stage3_prefetch_bucket_size",
    "optimizer.type",
    "scheduler.type",
)
EVERYDAY = (
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "activation_checkpointing",
    f"{ZERO}.offload_optimizer.nvme_path",
    f"{ZERO}.offload_param.nvme_path",
)
LABELS = {
    "zero_stage": "ZeRO stage",
    OPTIMIZER_PLACE: "Optimizer state on",
    PARAM_PLACE: "Parameters on",
    f"{ZERO}.offload_optimizer.nvme_path": "Folder for optimizer state",
    f"{ZERO}.offload_param.nvme_path": "Folder for parameters",
    "train_micro_batch_size_per_gpu": "Batch per process",
    "gradient_clipping": "Gradient clipping",
    OVERLAP: "Overlap communication",
    f"{ZERO}.reduce_bucket_size": "Reduce bucket",
    f"{ZERO}.allgather_bucket_size": "All-gather bucket",
    f"{ZERO}.stage3_prefetch_bucket_size": "Prefetch bucket",
    "optimizer.type": "Optimizer",
    "scheduler.type": "Scheduler",
}
# For descriptions that say how to write the value, while a form has the values to choose from.
MEANINGS = {
    "zero_stage": "What each process holds only a shard of.",
    "optimizer.type": "Which optimizer, and whether DeepSpeed makes it.",
    "scheduler.type": "Which learning rate schedule, and whether DeepSpeed makes it.",
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
# For numbers whose unit does not follow from the word "elements" in their description.
UNIT_OF = {
    "aio.block_size": "bytes",
    "checkpoint.writer.io_buffer_size": "bytes",
    "train_batch_size": "samples",
    "train_micro_batch_size_per_gpu": "samples",
    "comet.samples_log_interval": "samples",
    "steps_per_print": "steps",
    "flops_profiler.profile_step": "steps",
    "fp16.loss_scale_window": "steps",
    "fp16.initial_scale_power": "powers of two",
    "gradient_clipping": "norm",
    "aio.intra_op_parallelism": "threads",
    "aio.queue_depth": "requests",
    f"{ZERO}.offload_optimizer.buffer_count": "buffers",
    f"{ZERO}.offload_param.buffer_count": "buffers",
    f"{ZERO}.zero_hpz_partition_size": "ranks",
    "sequence_parallel_size": "ranks",
}
# DeepSpeed's defaults, here because the form works without it; a test compares them with the
# library.
DEFAULTS = {
    "gradient_clipping": 1.0,
    OVERLAP: None,  # true at stage 3 only
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
    ChoiceOption(None, "off", "Every process holds the whole model: plain data-parallel training."),
    ChoiceOption(0, "0", "DeepSpeed's engine, nothing in shards."),
    ChoiceOption(1, "1", "Shards the optimizer."),
    ChoiceOption(2, "2", "Shards optimizer and gradients."),
    ChoiceOption(3, "3", "Shards optimizer, gradients and weights."),
)
PLACES = (
    ChoiceOption(None, "device", "On the device that computes."),
    ChoiceOption("cpu", "CPU", "In host memory: slower, and room on the device."),
    ChoiceOption("nvme", "NVMe", "In files on a fast disk: slowest, and the most room (stage 3)."),
)
OPTIMIZERS = ("AdamW", "Adam", "Lion", "Adagrad", "Muon", "SGD")
SCHEDULES = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest")
FROM_CODE = ChoiceOption(None, "in the code", "The training code makes it.")
_DOCS_PAGE = "https://www.deepspeed.ai/docs/config-json/"
# Headings of that page, by the first part of a key.
_DOCS_HEADINGS = {
    "train_batch_size": "batch-size-related-parameters",
    "train_micro_batch_size_per_gpu": "batch-size-related-parameters",
    "optimizer": "optimizer-parameters",
    "scheduler": "scheduler-parameters",
    "gradient_clipping": "gradient-clipping",
    "fp16": "fp16-training-options",
    "bf16": "bfloat16-training-options",
    "zero_optimization": "zero-optimizations-for-fp16-training",
    "aio": "asynchronous-io",
    "flops_profiler": "flops-profiler",
    "activation_checkpointing": "activation-checkpointing",
}


def key_settings() -> Iterator[Setting]:
    """The stage, then every key of a DeepSpeed configuration."""
    stage = RunConfig.model_fields["zero_stage"]
    yield Setting(
        name="zero_stage",
        label=LABELS["zero_stage"],
        meaning=_meaning_of_key("zero_stage", stage),
        panel="zero",
        kind="one-of",
        options=STAGES,
        run_field="zero_stage",
        strategy_key=f"{ZERO}.stage",
        docs_link=_docs_link(f"{ZERO}.stage"),
    )
    yield from _of_section(ZeroConfig, "")


def _of_section(model: type[BaseModel], section_path: str) -> Iterator[Setting]:
    # Settings of the run, which has choices for them elsewhere in the form.
    run_keys = {f"{ZERO}.stage", "gradient_accumulation_steps", "fp16.enabled", "bf16.enabled"}
    for name, field in model.model_fields.items():
        # `ZeroConfig` has the keys of `zero_optimization` as fields of its top level.
        section_place = ZERO if not section_path and name in ZERO_KEYS else section_path
        key_path = f"{section_place}.{name}" if section_place else name
        inner_section = section_of(field)
        if inner_section is not None:
            yield from _of_section(inner_section, key_path)
        elif name != "extra" and key_path not in run_keys:
            yield _of_key(key_path, section_place, field)


def _of_key(key_path: str, place: str, model_field: FieldInfo) -> Setting:
    field_rule = rule_of(model_field)
    special_options = {
        OPTIMIZER_PLACE: PLACES,
        PARAM_PLACE: PLACES,
        "optimizer.type": (
            FROM_CODE,
            *(ChoiceOption(field_name, field_name) for field_name in OPTIMIZERS),
        ),
        "scheduler.type": (
            FROM_CODE,
            *(ChoiceOption(field_name, field_name) for field_name in SCHEDULES),
        ),
    }
    key_options = special_options.get(key_path, ())
    if field_rule.allowed and not key_options:
        key_options = (
            ChoiceOption(None, "default"),
            *(ChoiceOption(allowed_word, allowed_word) for allowed_word in field_rule.allowed),
        )
    key_meaning = _meaning_of_key(key_path, model_field)
    unit = "elements" if "element" in key_meaning.lower() else ""
    return Setting(
        name=key_path,
        label=_label_of_key(key_path),
        meaning=key_meaning,
        unit=UNIT_OF.get(key_path, unit),
        panel="zero",
        section="" if key_path in COMMON else SECTIONS[place],
        kind="one-of" if key_options else field_rule.value_kind,
        options=key_options,
        run_field="deepspeed",
        strategy_key=key_path,
        default=DEFAULTS.get(key_path),
        takes_auto=key_path in AUTO_KEYS,
        may_be_open=True,
        docs_link=_docs_link(key_path),
    )


def _docs_link(path: str) -> str:
    heading = _DOCS_HEADINGS.get(path.partition(".")[0], "")
    return f"{_DOCS_PAGE}#{heading}" if heading else _DOCS_PAGE


def _meaning_of_key(path: str, field: FieldInfo) -> str:
    """Its description; a form has an empty field for Python's None."""
    return MEANINGS.get(path) or (field.description or "").replace("; None ", "; empty ")


def _label_of_key(path: str) -> str:
    last_part = path.rpartition(".")[2]
    return LABELS.get(path, last_part.replace("_", " ").capitalize())
