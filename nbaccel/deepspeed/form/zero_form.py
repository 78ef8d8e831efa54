"""``DeepSpeedForm``: DeepSpeed's choices in the pickers."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nbaccel.base.errors import ConfigError
from nbaccel.config import RunConfig
from nbaccel.config.deepspeed_document import engine_config
from nbaccel.config.given_values import drop_at, put_at, value_at
from nbaccel.deepspeed.auto_values import resolve_decided
from nbaccel.deepspeed.combinations import combination_mistakes
from nbaccel.deepspeed.config_keys import misspelt_keys
from nbaccel.deepspeed.form.key_settings import COMMON, EVERYDAY, OVERLAP, key_settings
from nbaccel.deepspeed.form.training_ways import (
    engine_refusal,
    missing_library,
    name_of,
    put_place,
    training_ways,
)
from nbaccel.deepspeed.training_facts import TrainingFacts
from nbaccel.deepspeed.zero_config import ZERO, ZeroConfig, auto_keys, old_forms
from nbaccel.deepspeed.zero_memory import (
    OPTIMIZER_PLACE,
    PARAM_PLACE,
    estimate_memory,
    place_at_stage,
)
from nbaccel.memory.estimate import MemoryEstimate
from nbaccel.memory.model_size import Shape
from nbaccel.memory.settings_form import (
    Edit,
    FilledConfig,
    Setting,
    SettingsForm,
    StatePlacement,
    TrainingWay,
)
from nbaccel.plan import Inventory, Plan
from nbaccel.plan.launch_plan import Choice

_FEW_KEYS = 4  # enough to recognise a file
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


class DeepSpeedForm(SettingsForm):
    """The ZeRO stage, offloading, and every key that `ZeroConfig` names."""

    title = "ZeRO and DeepSpeed"
    file_name = "DeepSpeed JSON"
    not_chosen = "needs a ZeRO stage: without one DeepSpeed does not train"
    common = COMMON
    everyday = EVERYDAY

    def settings(self) -> Iterator[Setting]:
        """See :meth:`SettingsForm.settings`."""
        return key_settings()

    def key_of(self, field: str) -> str:
        """See :meth:`SettingsForm.key_of`."""
        return _KEY_OF_RUN_FIELD.get(field, "")

    def is_chosen(self, config: RunConfig) -> bool:
        """See :meth:`SettingsForm.is_chosen`."""
        return config.uses_deepspeed

    def document(self, config: RunConfig) -> dict[str, Any] | None:
        """See :meth:`SettingsForm.document`."""
        return engine_config(config)

    def value_of(self, config: RunConfig, setting: Setting) -> Any:
        """See :meth:`SettingsForm.value_of`."""
        if setting.name == "zero_stage":
            return config.zero_stage if config.uses_deepspeed else None
        # "none" and no key are one choice: on the device.
        if setting.name in _PLACE_CONTENTS:
            return _place_of(config, setting.name)
        return value_at(config.deepspeed, setting.strategy_key)

    def default_of(self, config: RunConfig, setting: Setting) -> Any:
        """See :meth:`SettingsForm.default_of`."""
        if setting.name == OVERLAP:
            return (config.zero_stage or 0) >= _STAGE_OF_PARAMETERS
        return setting.default

    def edited(
        self, config: RunConfig, setting: Setting, value: Any, *, before: RunConfig | None
    ) -> Edit:
        """See :meth:`SettingsForm.edited`."""
        if setting.name == "zero_stage":
            return _with_stage(config, value, (before and before.deepspeed) or {})
        if not config.uses_deepspeed:
            raise ConfigError(
                f"{setting.name}={value!r} is for DeepSpeed, which is off, and would have no "
                "effect. Choose a ZeRO stage first."
            )
        return _with_key(config, setting.name, value)

    def check(self, config: RunConfig, device: str) -> None:
        """See :meth:`SettingsForm.check`."""
        settings = ZeroConfig.from_dict(engine_config(config) or {})
        # What the device cannot do is asked of DeepSpeed, which takes seconds to import: that is
        # checked when the run is launched.
        if texts := [*combination_mistakes(settings)]:
            raise ConfigError(*texts)

    def option_refusal(self, config: RunConfig, setting: Setting, value: Any) -> str:
        """See :meth:`SettingsForm.option_refusal`."""
        stage = config.zero_stage
        if value is None:
            return ""
        if setting.name == "zero_stage":
            return engine_refusal(config)
        if setting.name not in _PLACE_CONTENTS:
            return ""
        if not config.uses_deepspeed or stage is None:
            return _NO_STAGE
        # DeepSpeed would ignore the setting below that stage.
        needed = 3 if setting.name == PARAM_PLACE or value == "nvme" else 1
        words = "stage 1 or higher" if needed == 1 else "stage 3"
        return f"needs ZeRO {words}: the stage is {stage}" if stage < needed else ""

    def setting_refusal(self, config: RunConfig, setting: Setting) -> str:
        """See :meth:`SettingsForm.setting_refusal`."""
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
        if key.startswith(f"{ZERO}.offload_optimizer."):
            return "" if _place_of(config, OPTIMIZER_PLACE) else "optimizer state is on the device"
        if key.startswith(f"{ZERO}.offload_param."):
            return "" if _place_of(config, PARAM_PLACE) else "parameters are on the device"
        return ""

    def is_shown(self, config: RunConfig, setting: Setting) -> bool:
        """See :meth:`SettingsForm.is_shown`: folders mean something where something is on disk."""
        section, _, name = setting.name.rpartition(".")
        return name != "nvme_path" or _place_of(config, f"{section}.device") == "nvme"

    def filled_in(
        self, config: RunConfig, plan: Plan | None, module: Any, sample_batch: Any
    ) -> FilledConfig:
        """See :meth:`SettingsForm.filled_in`."""
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
        # Written into the document itself, which keeps the order and form that the user wrote.
        filled = copy.deepcopy(document)
        decided = resolved.config.to_dict()
        for key in auto_keys(document):
            if key not in reasons:
                put_at(filled, key, value_at(decided, key))
        later = [Choice(key, "auto", _FILLED_LATER.get(key, why)) for key, why in reasons.items()]
        return FilledConfig(filled, (*resolved.choices, *later))

    def batch_size(self, document: Mapping[str, Any]) -> int | None:
        """See :meth:`SettingsForm.batch_size`."""
        size = document.get("train_micro_batch_size_per_gpu")
        return size if isinstance(size, int) else None

    def estimate(self, shape: Shape, document: Mapping[str, Any], **inputs: Any) -> MemoryEstimate:
        """See :meth:`SettingsForm.estimate`."""
        return estimate_memory(shape, document, **inputs)

    @property
    def missing_library(self) -> str:
        """See :meth:`SettingsForm.missing_library`."""
        return missing_library()

    def ways(
        self, config: RunConfig, shape: Shape, *, on_host: bool, can_checkpoint: bool
    ) -> Iterator[TrainingWay]:
        """See :meth:`SettingsForm.ways`."""
        return training_ways(config, shape, on_host=on_host, can_checkpoint=can_checkpoint)

    def way_of(self, config: RunConfig) -> str:
        """See :meth:`SettingsForm.way_of`."""
        places = (
            value_at(config.deepspeed, place_key) or "none"
            for place_key in (OPTIMIZER_PLACE, PARAM_PLACE)
        )
        return name_of(StatePlacement(config.zero_stage or 0, *places))

    def read(
        self, settings: Mapping[str, Any], config: RunConfig, inventory: Inventory
    ) -> tuple[RunConfig, tuple[str, ...]]:
        """See :meth:`SettingsForm.read`."""
        if self.missing_library:
            remarks: tuple[str, ...] = (
                "DeepSpeed is not installed: keys were compared with those that nbaccel knows, "
                "which are not all.",
            )
            document = _checked_without_library(settings).to_dict()
        else:
            # Imported here, since a form is also used where DeepSpeed is not installed.
            from nbaccel.deepspeed.checking import check_config

            checked_config = check_config(
                settings, inventory=inventory, allow_auto=True, check_tools=False, run=config
            )
            remarks = checked_config.warnings
            document = checked_config.config.to_dict()
            _refuse_other_files(settings)
        return config.changed(deepspeed=document), remarks

    def is_document(self, settings: Mapping[str, Any]) -> bool:
        """See :meth:`SettingsForm.is_document`."""
        return set(settings) == {"gradient_accumulation_steps"}


def _with_stage(
    run_config: RunConfig, stage: int | None, earlier_settings: Mapping[str, Any]
) -> Edit:
    """A run with another ZeRO stage."""
    if stage is None:
        return Edit(run_config.changed(zero_stage=None, deepspeed=None))
    # Turning DeepSpeed off and on again must not lose what was set before.
    settings = copy.deepcopy(
        dict((run_config.deepspeed or {}) if run_config.uses_deepspeed else earlier_settings)
    )
    remarks: tuple[str, ...] = ()
    for key, content in _PLACE_CONTENTS.items():
        place = value_at(settings, key) or "none"
        possible = place_at_stage(key, place, stage)
        if possible != place:
            put_place(settings, key, possible)
            target = "the CPU" if possible == "cpu" else "the device"
            remarks += (f"Place of {content}: {target}, as stage {stage} cannot use {place}.",)
    return Edit(run_config.changed(zero_stage=stage, deepspeed=settings), remarks)


def _with_key(config: RunConfig, key: str, value: Any) -> Edit:
    """A run with another value for a key of DeepSpeed."""
    settings = copy.deepcopy(dict(config.deepspeed or {}))
    remarks: tuple[str, ...] = ()
    part = key.partition(".")[0]
    if key in _PLACE_CONTENTS:
        # DeepSpeed requires a folder, and a form must not hold a run that would be refused.
        folder = str(Path.cwd() / "nvme_offload")
        if put_place(settings, key, value, folder):
            remarks = (
                f"Files of {_PLACE_CONTENTS[key]} go to {folder}: change it to a fast disk.",
            )
    elif value in (None, ""):
        drop_at(settings, key)
        if key in _STAND_INS:  # without a type its parameters have no meaning
            settings.pop(part, None)
    else:
        put_at(settings, key, value)
        if key in _STAND_INS:
            remarks = (
                f"DeepSpeed makes the {part}: give prepare a {_STAND_INS[key]} in its place.",
            )
    return Edit(config.changed(deepspeed=settings), remarks)


def _place_of(config: RunConfig, place_key: str) -> str | None:
    """Where something is offloaded to; None where it is not."""
    place: str | None = value_at(config.deepspeed, place_key)
    return None if place == "none" else place


def _refuse_other_files(settings: Mapping[str, Any]) -> None:
    """Refuse a file of which DeepSpeed would ignore everything: a model's, for example."""
    from nbaccel.deepspeed.schema import deepspeed_schema

    key_schema = deepspeed_schema()
    if settings and not key_schema.sections[""] & {str(key) for key in settings}:
        first_keys = ", ".join(itertools.islice(map(str, settings), _FEW_KEYS))
        raise ConfigError(
            f"DeepSpeed {key_schema.version} has none of these keys, and RunConfig has none of "
            f"these settings: {first_keys}{', …' if len(settings) > _FEW_KEYS else ''}. They would "
            'be ignored. Give a DeepSpeed configuration, {"zero_optimization": {"stage": 2}} for '
            "example, or a RunConfig."
        )


def _checked_without_library(settings: Mapping[str, Any]) -> ZeroConfig:
    """A configuration whose values are right, and whose keys are not nearly those known here."""
    todays_settings, _ = old_forms(settings)
    mistakes = list(misspelt_keys(todays_settings))
    try:
        config = ZeroConfig.from_dict(settings)
    except ConfigError as error:
        raise ConfigError(*mistakes, *error.args) from error
    if mistakes:
        raise ConfigError(*mistakes)
    return config
