"""``DeepSpeedForm``: what pickers offer of DeepSpeed: keys as choices, ways to train, their memory.

Keys and their descriptions come from `ZeroConfig`. Here are the order of the first ones, and their
labels.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from nbaccel.base.errors import ConfigError
from nbaccel.base.optional_packages import install_line, is_installed
from nbaccel.base.units import first_few
from nbaccel.config import RunConfig
from nbaccel.config.capabilities import fp8_backend, precision_row, strategy_fits, strategy_row
from nbaccel.config.deepspeed_document import engine_config
from nbaccel.config.field_rules import refuse_mistakes, rule_of
from nbaccel.config.given_values import drop_at, put_at, value_at
from nbaccel.deepspeed import zero_config, zero_memory
from nbaccel.deepspeed.auto_values import AUTO_KEYS, TrainingFacts, resolve_decided
from nbaccel.deepspeed.checking import check_config, combination_mistakes
from nbaccel.deepspeed.schema import deepspeed_schema, misspelt_keys
from nbaccel.deepspeed.zero_config import ZERO, ZeroConfig, auto_keys
from nbaccel.deepspeed.zero_memory import OPTIMIZER_PLACE, PARAM_PLACE
from nbaccel.memory.estimate import MemoryEstimate, Shape
from nbaccel.memory.settings_form import (
    ChoiceOption,
    Edit,
    FilledConfig,
    Setting,
    StatePlacement,
    TrainingWay,
)
from nbaccel.plan import Inventory, Plan
from nbaccel.plan.launch_plan import Choice

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
_DEFAULTS = {
    **zero_memory.DEFAULTS,
    f"{ZERO}.allgather_bucket_size": 500_000_000,
    "gradient_clipping": 1.0,
}
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
        section="" if key in _LABELS else _SECTIONS.get(place, place),
        kind="one-of" if options else rule.value_kind,
        options=options,
        run_field="deepspeed",
        strategy_key=key,
        default=_DEFAULTS.get(key),
        takes_auto=key in AUTO_KEYS,
        may_be_open=True,
        docs_link=_DOCS_PAGE,
    )


FORM_PLACEMENTS = (
    StatePlacement(1),
    StatePlacement(2),
    StatePlacement(2, "cpu"),
    StatePlacement(3),
    StatePlacement(3, "cpu"),
    StatePlacement(3, "cpu", "cpu"),
    StatePlacement(3, "nvme", "nvme"),
)
"""Those that a form shows."""
_PLACE_WORDS = {"cpu": "the CPU", "nvme": "disk"}
_LOWERED = (10**8, 10**7)  # for `LOWERED_KEYS`, where DeepSpeed's 1e9 needs too much
LOWERED_KEYS = ("sub_group_size", "stage3_max_live_parameters", "stage3_max_reuse_distance")
_USUAL_BUCKET = 5 * 10**8  # DeepSpeed's, reserved on a GPU for any model
_LEAST_BUCKET = 2**16  # A smaller one would mean a collective for few gradients
_BUCKETS = {
    1: ("reduce_bucket_size", "allgather_bucket_size"),
    2: ("reduce_bucket_size", "allgather_bucket_size"),
    3: ("reduce_bucket_size", "stage3_prefetch_bucket_size"),
}
_ALIGNED_ELEMENTS = 2**20  # swap buffers are a multiple of it


def put_place(settings: dict[str, Any], key: str, place: str | None, folder: str = "") -> bool:
    """Say where something is kept, with the folder that only a disk has; whether it is new."""
    section = key.rpartition(".")[0]
    is_left = place in (None, "", "none")
    if is_left or isinstance(value_at(settings, section), str):
        drop_at(settings, section)
    if is_left:
        return False
    put_at(settings, key, place)
    path_key = f"{section}.nvme_path"
    if place != "nvme":
        drop_at(settings, path_key)
    elif not value_at(settings, path_key):
        put_at(settings, path_key, folder)
        return True
    return False


def engine_refusal(config: RunConfig) -> str:
    """Why DeepSpeed's engine cannot train a run: a clause; empty where it can."""
    if missing := DeepSpeedForm().missing_library:
        return missing
    precision = precision_row(config.mixed_precision)
    asked = "" if config.fp8 is None else config.fp8.backend
    backend = fp8_backend(asked).row if precision.has_backends else None
    if strategy_fits(strategy_row("deepspeed"), backend or precision):
        return ""
    name = f" by the backend {backend.name}" if backend else ""
    return f"DeepSpeed's engine does not train in {config.mixed_precision}{name}"


def name_of(placement: StatePlacement) -> str:
    """The name of a way to train: ``ZeRO-2, optimizer on the CPU``."""
    places = {"optimizer": placement.optimizer, "parameters": placement.parameters}
    if placement.leaves_device and placement.optimizer == placement.parameters:
        places = {"all": placement.optimizer}
    left = [f"{part} on {_PLACE_WORDS[place]}" for part, place in places.items() if place != "none"]
    return ", ".join([f"ZeRO-{placement.divided}", *left])


def _variants(
    config: RunConfig, placement: StatePlacement, shape: Shape, folder: str, *, can_checkpoint: bool
) -> Iterator[RunConfig]:
    """As it is, then with activations computed again, then with less gathered at once."""
    first_config = _placed(config, placement, shape, folder, at_once=None)
    yield first_config
    recomputes = {"activation_checkpointing": True} if can_checkpoint else {}
    if recomputes and not config.activation_checkpointing:
        yield first_config.changed(**recomputes)
    # Working on fewer elements at once costs little, and DeepSpeed's 1e9 much memory.
    for at_once in _LOWERED if placement.divided == 3 else ():
        if at_once < shape.total:
            yield _placed(config, placement, shape, folder, at_once=at_once).changed(**recomputes)


def _placed(
    config: RunConfig, placement: StatePlacement, shape: Shape, folder: str, *, at_once: int | None
) -> RunConfig:
    """The run with that placement; what the user has written for it is kept."""
    settings: dict[str, Any] = copy.deepcopy(dict(config.deepspeed or {}))
    put_place(settings, OPTIMIZER_PLACE, placement.optimizer, folder)
    put_place(settings, PARAM_PLACE, placement.parameters, folder)
    zero_section = settings.setdefault(ZERO, {})
    zero_section.pop("stage", None)
    largest = zero_memory.largest_parameter(shape)
    if placement.parameters == "nvme":  # each buffer must hold the largest parameter
        aligned = -(-largest // _ALIGNED_ELEMENTS) * _ALIGNED_ELEMENTS
        zero_section["offload_param"].setdefault("buffer_size", aligned)
    bucket = max(_LEAST_BUCKET, min(shape.largest_layer, _USUAL_BUCKET))
    for key in _BUCKETS.get(placement.divided, ()):
        zero_section.setdefault(key, bucket)
    for key in LOWERED_KEYS if at_once is not None else ():
        # A group has at least one parameter.
        zero_section.setdefault(key, max(at_once or 0, largest))
    return config.changed(
        strategy="auto", fsdp=None, zero_stage=placement.divided, deepspeed=settings
    )


_STAGE_OF_PARAMETERS = 3  # it shards the parameters, too
_PLACE_CONTENTS = {OPTIMIZER_PLACE: "optimizer state", PARAM_PLACE: "parameters"}
_STAND_INS = {"optimizer.type": "DummyOptim", "scheduler.type": "DummyScheduler"}
_NO_STAGE = "choose a ZeRO stage first"
_KEY_OF_RUN_FIELD = {
    "mixed_precision": "bf16.enabled, fp16.enabled",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
}
_FILLED_LATER = dict.fromkeys(
    ("train_micro_batch_size_per_gpu", "train_batch_size"),
    "filled in by prepare, from your data loader",
)


class DeepSpeedForm:
    """The ZeRO stage, offloading, and every key that `ZeroConfig` names."""

    title = "ZeRO and DeepSpeed"
    file_name = "DeepSpeed JSON"  # of the language that can be copied
    not_chosen = "needs a ZeRO stage: without one DeepSpeed does not train"
    common = tuple(_LABELS)  # names that come first, also of `RunConfig`
    everyday = (  # names that are shown as soon as DeepSpeed is taken
        *("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
        "activation_checkpointing",
        *zero_memory.NVME_PATHS,
    )

    def settings(self) -> Iterator[Setting]:
        yield Setting(
            name="zero_stage",
            label=_LABELS["zero_stage"],
            meaning=_MEANINGS["zero_stage"],
            panel="zero",
            kind="one-of",
            options=_STAGES,
            run_field="zero_stage",
            strategy_key=f"{ZERO}.stage",
            docs_link=_DOCS_PAGE,
        )
        # Settings of the run, which has choices for them elsewhere in the form.
        run_keys = {f"{ZERO}.stage", "gradient_accumulation_steps", "fp16.enabled", "bf16.enabled"}
        for place, name, field in zero_config.config_fields():
            key = f"{place}.{name}".lstrip(".")
            if zero_config.section_of(field) is None and key not in run_keys:
                yield _of_key(key, place, field)

    def key_of(self, field: str) -> str:
        """Where a setting of `RunConfig` lands in DeepSpeed's configuration."""
        return _KEY_OF_RUN_FIELD.get(field, "")

    def is_chosen(self, config: RunConfig) -> bool:
        return config.uses_deepspeed

    def document(self, config: RunConfig) -> dict[str, Any] | None:
        return engine_config(config)

    def value_of(self, config: RunConfig, setting: Setting) -> Any:
        if setting.name == "zero_stage":
            return config.zero_stage if config.uses_deepspeed else None
        # "none" and no key are one choice: on the device.
        if setting.name in _PLACE_CONTENTS:
            return _place_of(config, setting.name)
        return value_at(config.deepspeed, setting.strategy_key)

    def default_of(self, config: RunConfig, setting: Setting) -> Any:
        if setting.name == OVERLAP:
            return (config.zero_stage or 0) >= _STAGE_OF_PARAMETERS
        return setting.default

    def edited(
        self, config: RunConfig, setting: Setting, value: Any, *, before: RunConfig | None
    ) -> Edit:
        if setting.name == "zero_stage":
            return _with_stage(config, value, (before and before.deepspeed) or {})
        if not config.uses_deepspeed:
            raise ConfigError(
                f"{setting.name}={value!r} is for DeepSpeed, which is off. Choose a ZeRO stage "
                "first."
            )
        key = setting.name
        part = key.partition(".")[0]
        settings = copy.deepcopy(dict(config.deepspeed or {}))
        text = ""
        if key in _PLACE_CONTENTS:
            # DeepSpeed requires a folder, and a form must not hold a run that would be refused.
            folder = str(Path.cwd() / "nvme_offload")
            if put_place(settings, key, value, folder):
                text = f"Files of {_PLACE_CONTENTS[key]} go to {folder}: change it to a fast disk."
        elif value in (None, ""):
            drop_at(settings, key)
            if key in _STAND_INS:  # without a type its parameters have no meaning
                settings.pop(part, None)
        else:
            put_at(settings, key, value)
            if key in _STAND_INS:
                text = f"DeepSpeed makes the {part}: give prepare a {_STAND_INS[key]} in its place."
        return Edit(config.changed(deepspeed=settings), (text,) if text else ())

    def check(self, config: RunConfig, device: str) -> None:
        settings = ZeroConfig.from_dict(engine_config(config) or {})
        # What the device cannot do is asked of DeepSpeed, in seconds, when the run is launched.
        refuse_mistakes(combination_mistakes(settings))

    def option_refusal(self, config: RunConfig, setting: Setting, value: Any) -> str:
        """Why an option cannot be taken: a clause; empty where it can."""
        if value is None:
            return ""
        if setting.name == "zero_stage":
            return engine_refusal(config)
        if setting.name not in _PLACE_CONTENTS:
            return ""
        stage = config.zero_stage
        if not config.uses_deepspeed or stage is None:
            return _NO_STAGE
        # DeepSpeed would ignore the setting below that stage.
        needed = 3 if setting.name == PARAM_PLACE or value == "nvme" else 1
        words = "stage 1 or higher" if needed == 1 else "stage 3"
        return f"needs ZeRO {words}: the stage is {stage}" if stage < needed else ""

    def setting_refusal(self, config: RunConfig, setting: Setting) -> str:
        key = setting.name
        if key == "zero_stage":
            return ""
        if not config.uses_deepspeed or config.zero_stage is None:
            return _NO_STAGE
        # A place can be chosen at any stage: its options say what they need.
        if key in _PLACE_CONTENTS:
            return ""
        for_stage_3 = (f"{ZERO}.stage3_", f"{ZERO}.offload_param.")
        if key.startswith(for_stage_3) and config.zero_stage < _STAGE_OF_PARAMETERS:
            return f"for stage 3 only: the stage is {config.zero_stage}"
        for place_key, content in _PLACE_CONTENTS.items():
            section = place_key.removesuffix("device")
            if key.startswith(section) and not _place_of(config, place_key):
                return f"{content}: on the device"
        return ""

    def is_shown(self, config: RunConfig, setting: Setting) -> bool:
        """Whether a choice means anything: folders do where something is on disk."""
        section, _, name = setting.name.rpartition(".")
        return name != "nvme_path" or _place_of(config, f"{section}.device") == "nvme"

    def filled_in(
        self, config: RunConfig, plan: Plan | None, module: Any, sample_batch: Any
    ) -> FilledConfig:
        """Fill in ``"auto"`` where the run, the model or the batch decides it."""
        document = engine_config(config)
        if document is None:
            return FilledConfig(None)
        samples = None
        if sample_batch is not None and self.batch_size(document) is None:
            # Not at the top: it imports torch, which a form without a batch does not need.
            from nbaccel.memory.activations import num_samples

            samples = num_samples(sample_batch)
        facts = TrainingFacts(
            world_size=1 if plan is None else plan.world_size,
            micro_batch_size=samples,
            accumulation_steps=config.gradient_accumulation_steps,
        )
        try:
            resolved, reasons = resolve_decided(document, facts=facts, run=config, model=module)
        except ConfigError as error:
            return FilledConfig(document, (Choice("DeepSpeed", "refused", error.mistakes[0]),))
        # Into the document itself, which keeps the order and form that the user wrote.
        decided = resolved.config.to_dict()
        for key in (key for key in auto_keys(document) if key not in reasons):
            put_at(document, key, value_at(decided, key))
        later = [Choice(key, "auto", _FILLED_LATER.get(key, why)) for key, why in reasons.items()]
        return FilledConfig(document, (*resolved.choices, *later))

    def batch_size(self, document: Mapping[str, Any]) -> int | None:
        size = document.get("train_micro_batch_size_per_gpu")
        return size if isinstance(size, int) else None

    def estimate(self, shape: Shape, document: Mapping[str, Any], **inputs: Any) -> MemoryEstimate:
        return zero_memory.estimate_memory(shape, document, **inputs)

    @property
    def missing_library(self) -> str:
        if is_installed("deepspeed"):
            return ""
        return f"DeepSpeed is not installed: {install_line('deepspeed')}"

    def ways(
        self,
        config: RunConfig,
        shape: Shape,
        *,
        on_host: bool,
        can_checkpoint: bool,
        placements: tuple[StatePlacement, ...] = FORM_PLACEMENTS,
    ) -> Iterator[TrainingWay]:
        refusal = engine_refusal(config)
        folder = next(map(str, zero_memory.nvme_folders(config.deepspeed)), "")
        for placement in placements:
            # Where processes compute on the CPU, everything is in host memory anyway.
            if on_host and placement.leaves_device and not (placement.uses_disk and folder):
                continue
            way_refusal = refusal
            if placement.uses_disk and not (folder or refusal):
                way_refusal = "needs a folder on a fast disk: give offload_optimizer.nvme_path"
            yield TrainingWay(
                name=name_of(placement),
                configs=_variants(config, placement, shape, folder, can_checkpoint=can_checkpoint),
                placement=placement,
                refusal=way_refusal,
            )

    def way_of(self, config: RunConfig) -> str:
        places = (_place_of(config, key) or "none" for key in (OPTIMIZER_PLACE, PARAM_PLACE))
        return name_of(StatePlacement(config.zero_stage or 0, *places))

    def read(
        self, settings: Mapping[str, Any], config: RunConfig, inventory: Inventory
    ) -> tuple[RunConfig, tuple[str, ...]]:
        if self.missing_library:
            note = "DeepSpeed is not installed: of its keys only those of nbaccel's were compared."
            mistakes = [*misspelt_keys(zero_config.old_forms(settings)[0])]
            try:
                document = ZeroConfig.from_dict(settings).to_dict()
            except ConfigError as error:
                raise ConfigError(*mistakes, *error.args) from error
            refuse_mistakes(mistakes)
            return config.changed(deepspeed=document), (note,)
        checked = check_config(
            settings, inventory=inventory, allow_auto=True, check_tools=False, run=config
        )
        schema = deepspeed_schema()
        # DeepSpeed would ignore everything in such a file: a model's, for example.
        if settings and not schema.sections[""] & {*map(str, settings)}:
            raise ConfigError(
                f"DeepSpeed {schema.version} has none of these keys, and RunConfig has none of "
                f"these settings: {first_few([*map(str, settings)], 4)}. Give a configuration of "
                'DeepSpeed, {"zero_optimization": {"stage": 2}}, or a RunConfig.'
            )
        return config.changed(deepspeed=checked.config.to_dict()), checked.warnings

    def is_document(self, settings: Mapping[str, Any]) -> bool:
        """Whether settings whose names are all those of `RunConfig`, too, are DeepSpeed's."""
        return set(settings) == {"gradient_accumulation_steps"}


def _with_stage(config: RunConfig, stage: int | None, earlier: Mapping[str, Any]) -> Edit:
    """A run with another ZeRO stage."""
    if stage is None:
        return Edit(config.changed(zero_stage=None, deepspeed=None))
    # Turning DeepSpeed off and on again must not lose what was set before.
    settings = copy.deepcopy(dict((config.deepspeed or {}) if config.uses_deepspeed else earlier))
    remarks: tuple[str, ...] = ()
    for key, content in _PLACE_CONTENTS.items():
        place = value_at(settings, key) or "none"
        possible = zero_memory.place_at_stage(key, place, stage)
        if possible != place:
            put_place(settings, key, possible)
            target = "the CPU" if possible == "cpu" else "the device"
            remarks += (f"Place of {content}: {target}, as stage {stage} cannot use {place}.",)
    return Edit(config.changed(zero_stage=stage, deepspeed=settings), remarks)


def _place_of(config: RunConfig, place_key: str) -> str | None:
    """Where something is offloaded to; None where it is not."""
    place: str | None = value_at(config.deepspeed, place_key)
    return None if place == "none" else place
