"""The ladder: ways to need less memory, the fastest first, and the configuration of each step.

The order is that of the DeepSpeed guide of transformers (docs/source/en/deepspeed.md, "Select a
ZeRO stage": gradient checkpointing, ZeRO-2, ZeRO-2 with the optimizer offloaded, ZeRO-3, with
parameters offloaded, with both, then NVMe), which DeepSpeed's own documentation links to. The
batch comes last, since a smaller one computes less per step at every stage.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nbaccel.base.errors import ConfigError
from nbaccel.config.capabilities import precision_row
from nbaccel.config.deepspeed_document import BATCH_SIZES
from nbaccel.deepspeed.auto_values import resolve_auto
from nbaccel.deepspeed.training_facts import TrainingFacts, hidden_size, made_in
from nbaccel.memory.model_size import Shape
from nbaccel.plan.inventory import Gpu

__all__ = [
    "LOWERED",
    "LOWERED_KEYS",
    "LadderStep",
    "Recipe",
    "TrainingPrecision",
    "batch_of",
    "choose_precision",
    "halvings",
    "ladder",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class LadderStep:
    """One way to train, without the batch.

    Attributes:
        name: Its name in a table.
        stage: ZeRO stage.
        offload_optimizer: Where the optimizer is: ``none``, ``cpu``, ``nvme``.
        offload_param: Where parameters are while they are not used.
        gradient_checkpointing: Whether activations are computed again.
    """

    name: str
    stage: int = 0
    offload_optimizer: str = "none"
    offload_param: str = "none"
    gradient_checkpointing: bool = False

    @property
    def uses_nvme(self) -> bool:
        """Whether anything is on disk."""
        return "nvme" in (self.offload_optimizer, self.offload_param)


# Stage, place of the optimizer, place of parameters.
_BY_SPEED = (
    (2, "none", "none"),
    (2, "cpu", "none"),
    (3, "none", "none"),
    (3, "none", "cpu"),
    (3, "cpu", "cpu"),
    (3, "nvme", "cpu"),
    (3, "nvme", "nvme"),
)


def ladder(*, has_switch: bool, is_on: bool) -> Iterator[LadderStep]:
    """All steps, the fastest first."""
    yield LadderStep(name="as it is", gradient_checkpointing=is_on)
    if not is_on:
        yield LadderStep(name="gradient checkpointing", gradient_checkpointing=True)
    for stage, optimizer, parameter_place in _BY_SPEED:
        yield LadderStep(
            name=_step_name(stage, optimizer, parameter_place),
            stage=stage,
            offload_optimizer=optimizer,
            offload_param=parameter_place,
            gradient_checkpointing=has_switch or is_on,
        )


def halvings(batch_size: int, accumulation_steps: int) -> Iterator[tuple[int, int]]:
    """Smaller and smaller batches that make the same optimizer step."""
    while True:
        yield batch_size, accumulation_steps
        if batch_size % 2:
            return
        batch_size = batch_size // 2
        accumulation_steps = accumulation_steps * 2


def _step_name(stage: int, optimizer: str, parameter_place: str) -> str:
    words = {"cpu": "CPU", "nvme": "NVMe"}
    if optimizer == parameter_place and optimizer != "none":
        return f"ZeRO-{stage}, optimizer and parameters on {words[parameter_place]}"
    offloaded_parts = [
        f"{offloaded_part} on {words[offload_place]}"
        for offloaded_part, offload_place in (
            ("optimizer", optimizer),
            ("parameters", parameter_place),
        )
        if offload_place != "none"
    ]
    return ", ".join([f"ZeRO-{stage}", *offloaded_parts])


_ZERO_KEY = "zero_optimization"
_ALIGNED_ELEMENTS = 2**20  # elements: swap buffers are a multiple of it
# A smaller bucket would mean a collective for few gradients.
_SMALLEST_BUCKET = 2**16
LOWERED = (10**8, 10**7)
"""What `LOWERED_KEYS` are set to, one after the other, where DeepSpeed's 1e9 needs too much."""
LOWERED_KEYS = ("sub_group_size", "stage3_max_live_parameters", "stage3_max_reuse_distance")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What all configurations of a ladder have in common.

    Attributes:
        base: The user's configuration; kept wherever the ladder does not decide.
        model: The model.
        shape: Its size.
        precision: ``fp32``, ``bf16`` or ``fp16``.
        optimizer: The optimizer's name, where ``base`` has none.
        world_size: Processes in all.
        nvme_path: Folder on the fast disk; None where there is none.
        pin_memory: Whether offloaded tensors are page-locked.
    """

    model: Any
    shape: Shape
    precision: str
    optimizer: str
    world_size: int
    base: dict[str, Any] = field(default_factory=dict)
    nvme_path: str | None = None
    pin_memory: bool = False

    def config(
        self,
        ladder_step: LadderStep,
        batch_size: int,
        accumulation_steps: int,
        *,
        at_once: int | None = None,
    ) -> dict[str, Any]:
        """The configuration, with nothing left to ``"auto"``."""
        # Batch sizes are what the ladder changes: those of the file would contradict each rung.
        config_settings = {
            config_key: copy.deepcopy(config_value)
            for config_key, config_value in self.base.items()
            if config_key not in BATCH_SIZES
        }
        config_settings["train_micro_batch_size_per_gpu"] = batch_size
        config_settings["gradient_accumulation_steps"] = accumulation_steps
        config_settings.setdefault("optimizer", {"type": self.optimizer})
        config_settings[_ZERO_KEY] = self._zero(ladder_step, at_once)
        if self.precision != "fp32":
            config_section = config_settings.setdefault(self.precision, {})
            config_section["enabled"] = True
            if self.precision == "fp16":
                config_section.setdefault("auto_cast", True)
        facts = TrainingFacts(
            world_size=self.world_size,
            micro_batch_size=batch_size,
            accumulation_steps=accumulation_steps,
            mixed_precision="no" if self.precision == "fp32" else self.precision,
        )
        return resolve_auto(config_settings, facts=facts, model=self.model).config.to_dict()

    def _zero(self, step: LadderStep, at_once: int | None) -> dict[str, Any]:
        given_section = copy.deepcopy(self.base.get(_ZERO_KEY) or {})
        # Taken out of the user's section, and back with its details where the step offloads.
        offload_sections = {
            place_name: self._offload(
                place_name, offload_place, given_section.pop(place_name, None)
            )
            for place_name, offload_place in (
                ("offload_optimizer", step.offload_optimizer),
                ("offload_param", step.offload_param),
            )
        }
        zero_section = {**given_section, "stage": step.stage}
        zero_section |= {
            place_name: config_section
            for place_name, config_section in offload_sections.items()
            if config_section
        }
        if step.stage:
            zero_section.setdefault("reduce_bucket_size", self._bucket("auto"))
        if step.stage == 3:
            zero_section.setdefault("stage3_prefetch_bucket_size", self._bucket("auto"))
            zero_section.setdefault(
                "stage3_param_persistence_threshold", self._bucket("auto", least_bytes=0)
            )
            # Without it DeepSpeed's `save_16bit_model` writes nothing.
            zero_section.setdefault("stage3_gather_16bit_weights_on_model_save", True)
            if at_once is not None:  # a group has at least one parameter
                least_bytes = max(at_once, max(self.shape.sizes, default=self.shape.largest_layer))
                for config_key in LOWERED_KEYS:
                    zero_section.setdefault(config_key, least_bytes)
        return zero_section

    def _bucket(self, word: str, *, least_bytes: int = _SMALLEST_BUCKET) -> str | int:
        """The word "auto" where the model's width decides, else room for its largest layer."""
        if hidden_size(self.model)[0] is not None:
            return word
        return max(least_bytes, min(self.shape.largest_layer, int(5e8))) if least_bytes else 10**5

    def _offload(self, name: str, place: str, section: Any) -> dict[str, Any]:
        if place == "none":
            return {}
        config_section = {
            **(section if isinstance(section, dict) else {}),
            "device": place,
        }
        config_section.setdefault("pin_memory", self.pin_memory)
        if place == "nvme":
            config_section["nvme_path"] = self.nvme_path
            if name == "offload_param":  # each buffer must hold the largest parameter
                parameter = max(self.shape.sizes, default=self.shape.largest_layer)
                config_section.setdefault(
                    "buffer_size", -(-parameter // _ALIGNED_ELEMENTS) * _ALIGNED_ELEMENTS
                )
        else:
            config_section.pop("nvme_path", None)
        return config_section


def batch_of(settings: dict[str, Any], *, samples: int | None, world_size: int) -> tuple[int, int]:
    """The batch of each process in one optimizer step."""
    total_batch, micro_batch, steps = (
        batch_value
        if isinstance(batch_value := settings.get(config_key), int) and batch_value > 0
        else None
        for config_key in BATCH_SIZES
    )
    if micro_batch is not None and samples is not None and micro_batch != samples:
        raise ConfigError(
            f"train_micro_batch_size_per_gpu={micro_batch}, and sample_batch has {samples} "
            "samples: one of them would silently override the other. Leave the first out, or cut "
            "the batch."
        )
    sample_count = micro_batch or samples or 1
    if total_batch is None:
        return sample_count, steps or 1
    if samples is None and micro_batch is None and steps is None and total_batch % world_size == 0:
        return total_batch // world_size, 1
    if total_batch % (sample_count * world_size) or steps not in (
        None,
        total_batch // (sample_count * world_size),
    ):
        raise ConfigError(
            f"train_batch_size={total_batch} is not {sample_count} samples * "
            f"{steps or 'some'} accumulated * {world_size} processes: no step could "
            "have that size. Leave train_batch_size out."
        )
    return sample_count, total_batch // (sample_count * world_size)


_KNOWN_PRECISIONS = ("auto", "fp32", "bf16", "fp16")
_PRECISION_WORDS = {"no": "fp32", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingPrecision:
    """The number format that was chosen.

    Attributes:
        name: ``fp32``, ``bf16`` or ``fp16``.
        reason: Why, in one clause.
        warning: What may not work as expected; empty for nothing.
    """

    name: str
    reason: str
    warning: str = ""


def choose_precision(
    asked_precision: str, *, base_config: Mapping[str, Any], model: Any, device_units: Sequence[Gpu]
) -> TrainingPrecision:
    """Choose the number format of the forward and backward pass."""
    wanted_precision = _PRECISION_WORDS.get(asked_precision, asked_precision)
    if wanted_precision not in _KNOWN_PRECISIONS:
        raise ConfigError(
            f"precision={asked_precision!r} is no precision that DeepSpeed trains in. Give one of "
            f"{', '.join(_KNOWN_PRECISIONS)}."
        )
    written_precision = next(
        (
            format_name
            for format_name in ("bf16", "fp16")
            if _section_is_enabled(base_config, format_name)
        ),
        None,
    )
    if written_precision is not None and wanted_precision not in ("auto", written_precision):
        raise ConfigError(
            f"precision={asked_precision!r} and {written_precision}.enabled=true in the "
            "configuration are two formats, and one would silently override the other. Leave one "
            "of them out."
        )
    chosen_precision = TrainingPrecision(name=wanted_precision, reason="asked for")
    if written_precision is not None:
        chosen_precision = TrainingPrecision(name=written_precision, reason="by the configuration")
    elif wanted_precision == "auto":
        chosen_precision = _by_gpus(device_units) if device_units else _by_cpu(model)
    return _with_warning(chosen_precision, model)


def _by_gpus(device_units: Sequence[Gpu]) -> TrainingPrecision:
    bf16_row = precision_row("bf16")
    # One older GPU decides for all: the ranks of a run compute in one format.
    gpus = [
        device_unit
        for device_unit in device_units
        if device_unit.compute_capability < bf16_row.imitated_below
    ]
    if not gpus:
        return TrainingPrecision(name="bf16", reason=f"{device_units[0].name} computes in it")
    return TrainingPrecision(name="fp16", reason=f"{gpus[0].name} only imitates bf16")


def _by_cpu(model: Any) -> TrainingPrecision:
    # Such weights would have to be converted to be trained in float32.
    if any(
        parameter.is_floating_point() and parameter.element_size() == 2
        for parameter in model.parameters()
    ):
        return TrainingPrecision(
            name="bf16", reason="the model is in 16 bit, and CPUs do not train in fp16"
        )
    if _cpu_has_bf16():
        return TrainingPrecision(name="bf16", reason="this CPU has instructions for it")
    return TrainingPrecision(name="fp32", reason="this CPU has no instructions for bf16")


def _cpu_has_bf16() -> bool:
    import torch.cpu

    # Private functions of torch, and not in all of its versions; without them the answer is no.
    check_names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, check_name, lambda: False)() for check_name in check_names)


def _with_warning(chosen_precision: TrainingPrecision, model: Any) -> TrainingPrecision:
    model_precision = made_in(model)
    if chosen_precision.name != "fp16" or model_precision != "bfloat16":
        return chosen_precision
    text = (
        f"The model was trained in {model_precision} and will be trained in fp16, whose largest "
        "number is 65504: losses may become NaN. Where they do, train in fp32, or on a GPU of "
        "compute capability 8.0 or newer in bf16."
    )
    return TrainingPrecision(
        name=chosen_precision.name, reason=chosen_precision.reason, warning=text
    )


def _section_is_enabled(config: Mapping[str, Any], section_name: str) -> bool:
    section = config.get(section_name)
    return isinstance(section, Mapping) and section.get("enabled") is True
