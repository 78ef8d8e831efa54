"""The ways to train with DeepSpeed: ZeRO's stages, with what can leave the device."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nbaccel.config import RunConfig, nested_keys
from nbaccel.deepspeed.advisor.ladder import LOWERED, LOWERED_KEYS
from nbaccel.deepspeed.form.key_refusals import engine_refusal
from nbaccel.deepspeed.form.key_settings import OPTIMIZER_PLACE, PARAM_PLACE
from nbaccel.deepspeed.zero_config import ZERO
from nbaccel.deepspeed.zero_memory import nvme_folders
from nbaccel.memory.model_size import Shape
from nbaccel.memory.settings_form import TrainingWay
from nbaccel.memory.step_time import Traffic

__all__ = ["training_ways", "way_name"]

# Stage, place of the optimizer, place of parameters; the fastest first.
_PLACEMENTS = (
    (1, "none", "none"),
    (2, "none", "none"),
    (2, "cpu", "none"),
    (3, "none", "none"),
    (3, "cpu", "none"),
    (3, "cpu", "cpu"),
    (3, "nvme", "nvme"),
)
_PLACE_WORDS = {"cpu": "the CPU", "nvme": "disk"}
_PLACED_SECTIONS = ("offload_optimizer", "offload_param")
_USUAL_BUCKET = 5 * 10**8
"""DeepSpeed's default, in elements; it is reserved on a GPU however small the model is."""
_LEAST_ELEMENTS = 2**16
_BUCKETS = {
    1: ("reduce_bucket_size", "allgather_bucket_size"),
    2: ("reduce_bucket_size", "allgather_bucket_size"),
    3: ("reduce_bucket_size", "stage3_prefetch_bucket_size"),
}


@dataclass(frozen=True, slots=True)
class _Placement:
    stage: int
    optimizer: str
    parameters: str

    @property
    def leaves_device(self) -> bool:
        return (self.optimizer, self.parameters) != ("none", "none")

    @property
    def uses_disk(self) -> bool:
        return "nvme" in (self.optimizer, self.parameters)

    @property
    def name(self) -> str:
        stage_name = f"ZeRO-{self.stage}"
        if not self.leaves_device:
            return stage_name
        if self.optimizer == self.parameters:
            return f"{stage_name}, all on {_PLACE_WORDS[self.optimizer]}"
        left_parts = [
            f"{part_name} on {_PLACE_WORDS[place]}"
            for part_name, place in (
                ("optimizer", self.optimizer),
                ("parameters", self.parameters),
            )
            if place != "none"
        ]
        return f"{stage_name}, {', '.join(left_parts)}"


def training_ways(
    config: RunConfig, shape: Shape, *, on_host: bool, can_checkpoint: bool
) -> Iterator[TrainingWay]:
    """See :meth:`SettingsForm.ways`."""
    refusal = engine_refusal(config)
    nvme_folder = next(map(str, nvme_folders(config.deepspeed)), None)
    for placement in (_Placement(*parts) for parts in _PLACEMENTS):
        # Where processes compute on the CPU, everything is in host memory anyway.
        if on_host and placement.leaves_device and not (placement.uses_disk and nvme_folder):
            continue
        way_refusal = refusal
        if placement.uses_disk and nvme_folder is None and not way_refusal:
            way_refusal = "needs a folder on a fast disk: give offload_optimizer.nvme_path"
        yield TrainingWay(
            name=placement.name,
            configs=_variants(config, placement, shape, nvme_folder, can_checkpoint=can_checkpoint),
            traffic=Traffic(
                shards_parameters=placement.stage == 3,
                optimizer_place=placement.optimizer,
                parameter_place=placement.parameters,
            ),
            refusal=way_refusal,
        )


def way_name(config: RunConfig) -> str:
    """See :meth:`SettingsForm.way_of`."""
    places = (
        nested_keys.value_at(config.deepspeed, place_key) or "none"
        for place_key in (OPTIMIZER_PLACE, PARAM_PLACE)
    )
    return _Placement(config.zero_stage or 0, *places).name


def _variants(
    config: RunConfig,
    placement: _Placement,
    shape: Shape,
    folder: str | None,
    *,
    can_checkpoint: bool,
) -> Iterator[RunConfig]:
    """As it is, then with activations computed again, then with less gathered at once."""
    first_config = _placed(config, placement, shape, folder, at_once=None)
    yield first_config
    recomputes = {"activation_checkpointing": True} if can_checkpoint else {}
    if recomputes and not config.activation_checkpointing:
        yield first_config.changed(**recomputes)
    # Working on fewer elements at once costs little, and DeepSpeed's 1e9 much memory.
    for at_once in LOWERED if placement.stage == 3 else ():
        if at_once < shape.total:
            lowered_config = _placed(config, placement, shape, folder, at_once=at_once)
            yield lowered_config.changed(**recomputes)


def _placed(
    config: RunConfig,
    placement: _Placement,
    shape: Shape,
    folder: str | None,
    *,
    at_once: int | None,
) -> RunConfig:
    settings: dict[str, Any] = copy.deepcopy(dict(config.deepspeed or {}))
    zero_section = settings.setdefault(ZERO, {})
    zero_section.pop("stage", None)
    for section_name, place in zip(
        _PLACED_SECTIONS, (placement.optimizer, placement.parameters), strict=True
    ):
        given_section = zero_section.pop(section_name, None)
        if place == "none":
            continue
        # Details of the user's section are kept where the place is the same.
        kept_section = given_section if isinstance(given_section, dict) else {}
        zero_section[section_name] = {**kept_section, "device": place}
        if place == "nvme":
            zero_section[section_name].setdefault("nvme_path", folder or "")
        else:
            zero_section[section_name].pop("nvme_path", None)
    least_elements = max(shape.sizes, default=shape.largest_layer)
    if shape.trainable < _USUAL_BUCKET:
        for bucket_key in _BUCKETS[placement.stage]:
            zero_section.setdefault(bucket_key, max(_LEAST_ELEMENTS, shape.trainable))
    if at_once is not None:
        for lowered_key in LOWERED_KEYS:
            zero_section.setdefault(lowered_key, max(at_once, least_elements))
    return config.changed(
        strategy="auto", fsdp=None, zero_stage=placement.stage, deepspeed=settings
    )
