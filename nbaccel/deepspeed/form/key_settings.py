"""Each key of a DeepSpeed configuration as a choice: its name, its meaning, its unit.

Nothing is listed twice: keys and descriptions come from `ZeroConfig`. Here are the order of the
first ones, with their labels.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic.fields import FieldInfo

from nbaccel.config.field_rules import rule_of
from nbaccel.deepspeed.auto_values import AUTO_KEYS
from nbaccel.deepspeed.zero_config import ZERO, config_fields, section_of
from nbaccel.deepspeed.zero_memory import DEFAULTS, OPTIMIZER_PLACE, PARAM_PLACE
from nbaccel.memory.settings_form import ChoiceOption, Setting

OVERLAP = f"{ZERO}.overlap_comm"
_LABELS = {
    "zero_stage": "ZeRO stage",
    OPTIMIZER_PLACE: "Optimizer state on",
    f"{ZERO}.offload_optimizer.nvme_path": "Folder for optimizer state",
    PARAM_PLACE: "Parameters on",
    f"{ZERO}.offload_param.nvme_path": "Folder for parameters",
    "train_micro_batch_size_per_gpu": "Batch per process",
    "gradient_accumulation_steps": "",  # a setting of the run, which has its own label
    "gradient_clipping": "Gradient clipping",
    "activation_checkpointing": "",
    OVERLAP: "Overlap communication",
    f"{ZERO}.reduce_bucket_size": "Reduce bucket",
    f"{ZERO}.allgather_bucket_size": "All-gather bucket",
    f"{ZERO}.stage3_prefetch_bucket_size": "Prefetch bucket",
    "optimizer.type": "Optimizer",
    "scheduler.type": "Scheduler",
}
COMMON = tuple(_LABELS)
EVERYDAY = (
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "activation_checkpointing",
    f"{ZERO}.offload_optimizer.nvme_path",
    f"{ZERO}.offload_param.nvme_path",
)
# For descriptions that say how to write the value, while a form has the values to choose from.
_MEANINGS = {
    "zero_stage": "What each process holds only a shard of.",
    "optimizer.type": "Which optimizer, and whether DeepSpeed makes it.",
    "scheduler.type": "Which learning rate schedule, and whether DeepSpeed makes it.",
}
_SECTIONS = {
    "": "Engine",
    ZERO: "ZeRO",
    f"{ZERO}.offload_optimizer": "Optimizer offload",
    f"{ZERO}.offload_param": "Parameter offload",
    "optimizer": "Optimizer",
    "scheduler": "Scheduler",
}
_UNITS = ("elements", "samples", "steps", "buffers", "ranks", "norm", "power of two")
"""A number's unit is the first of them that its description names."""
# Beside those on which memory depends; DeepSpeed's, and a test compares them with the library.
_DEFAULTS = {**DEFAULTS, f"{ZERO}.allgather_bucket_size": 500_000_000, "gradient_clipping": 1.0}
_STAGES = (
    ChoiceOption(None, "off", "Every process holds the whole model: plain data-parallel training."),
    ChoiceOption(0, "0", "DeepSpeed's engine, nothing in shards."),
    ChoiceOption(1, "1", "Shards the optimizer."),
    ChoiceOption(2, "2", "Shards optimizer and gradients."),
    ChoiceOption(3, "3", "Shards optimizer, gradients and weights."),
)
_PLACES = (
    ChoiceOption(None, "device", "On the device that computes."),
    ChoiceOption("cpu", "CPU", "In host memory: slower, and room on the device."),
    ChoiceOption("nvme", "NVMe", "In files on a fast disk: slowest, and the most room (stage 3)."),
)
_FROM_CODE = ChoiceOption(None, "in the code", "The training code makes it.")
_OPTIMIZERS = ("AdamW", "Adam", "Lion", "Adagrad", "Muon", "SGD")
_SCHEDULES = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest")
_OPTIONS = {
    OPTIMIZER_PLACE: _PLACES,
    PARAM_PLACE: _PLACES,
    "optimizer.type": (_FROM_CODE, *(ChoiceOption(name, name) for name in _OPTIMIZERS)),
    "scheduler.type": (_FROM_CODE, *(ChoiceOption(name, name) for name in _SCHEDULES)),
}
_DOCS_PAGE = "https://www.deepspeed.ai/docs/config-json/"
# Headings of that page, by the first part of a key.
_DOCS_HEADINGS = {
    "train_batch_size": "#batch-size-related-parameters",
    "train_micro_batch_size_per_gpu": "#batch-size-related-parameters",
    "optimizer": "#optimizer-parameters",
    "scheduler": "#scheduler-parameters",
    "gradient_clipping": "#gradient-clipping",
    "fp16": "#fp16-training-options",
    "bf16": "#bfloat16-training-options",
    ZERO: "#zero-optimizations-for-fp16-training",
}


def key_settings() -> Iterator[Setting]:
    """The stage, then every key of a DeepSpeed configuration."""
    yield Setting(
        name="zero_stage",
        label=_LABELS["zero_stage"],
        meaning=_MEANINGS["zero_stage"],
        panel="zero",
        kind="one-of",
        options=_STAGES,
        run_field="zero_stage",
        strategy_key=f"{ZERO}.stage",
        docs_link=_docs_link(ZERO),
    )
    # Settings of the run, which has choices for them elsewhere in the form.
    run_keys = {f"{ZERO}.stage", "gradient_accumulation_steps", "fp16.enabled", "bf16.enabled"}
    for place, name, field in config_fields():
        key = f"{place}.{name}".lstrip(".")
        if section_of(field) is None and key not in run_keys:
            yield _of_key(key, place, field)


def _of_key(key: str, place: str, field: FieldInfo) -> Setting:
    rule = rule_of(field)
    words = [ChoiceOption(word, word) for word in rule.allowed]
    options = _OPTIONS.get(key, (ChoiceOption(None, "default"), *words) if words else ())
    description = field.description or ""
    is_number = rule.value_kind in ("whole", "number")
    named_units = [unit for unit in _UNITS if is_number and unit in description.lower()]
    return Setting(
        name=key,
        label=_LABELS.get(key, key.rpartition(".")[2].replace("_", " ").capitalize()),
        meaning=_MEANINGS.get(key, description),
        unit=next(iter(named_units), ""),
        panel="zero",
        section="" if key in COMMON else _SECTIONS.get(place, place),
        kind="one-of" if options else rule.value_kind,
        options=options,
        run_field="deepspeed",
        strategy_key=key,
        default=_DEFAULTS.get(key),
        takes_auto=key in AUTO_KEYS,
        may_be_open=True,
        docs_link=_docs_link(key),
    )


def _docs_link(key: str) -> str:
    return _DOCS_PAGE + _DOCS_HEADINGS.get(key.partition(".")[0], "")
