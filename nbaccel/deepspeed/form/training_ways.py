"""The ways to train with DeepSpeed: ZeRO's stages, with what can leave the device."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from nbaccel.base.optional_packages import install_line, is_installed
from nbaccel.config import RunConfig
from nbaccel.config.capabilities import fp8_backend, precision_row, strategy_fits, strategy_row
from nbaccel.config.given_values import drop_at, put_at, value_at
from nbaccel.deepspeed.zero_config import ZERO
from nbaccel.deepspeed.zero_memory import (
    OPTIMIZER_PLACE,
    PARAM_PLACE,
    largest_parameter,
    nvme_folders,
)
from nbaccel.memory.model_size import Shape
from nbaccel.memory.settings_form import StatePlacement, TrainingWay

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
_LOWERED = (10**8, 10**7)
"""What `LOWERED_KEYS` are set to, one after the other, where DeepSpeed's 1e9 needs too much."""
LOWERED_KEYS = ("sub_group_size", "stage3_max_live_parameters", "stage3_max_reuse_distance")
_USUAL_BUCKET = 5 * 10**8
"""DeepSpeed's default, in elements; it is reserved on a GPU however small the model is."""
_LEAST_BUCKET = 2**16
"""A smaller one would mean a collective for few gradients."""
_BUCKETS = {
    1: ("reduce_bucket_size", "allgather_bucket_size"),
    2: ("reduce_bucket_size", "allgather_bucket_size"),
    3: ("reduce_bucket_size", "stage3_prefetch_bucket_size"),
}
_ALIGNED_ELEMENTS = 2**20  # swap buffers are a multiple of it


def missing_library() -> str:
    """What to install for DeepSpeed to train; empty where nothing is missing."""
    if is_installed("deepspeed"):
        return ""
    return f"DeepSpeed is not installed: {install_line('deepspeed')}"


def put_place(settings: dict[str, Any], key: str, place: str | None, folder: str = "") -> bool:
    """Say where something is kept, with the folder that only a disk has; whether it is new."""
    section = key.rpartition(".")[0]
    path_key = f"{section}.nvme_path"
    if place in (None, "", "none") or isinstance(value_at(settings, section), str):
        drop_at(settings, section)
    if place in (None, "", "none"):
        return False
    put_at(settings, key, place)
    if place != "nvme":
        drop_at(settings, path_key)
    elif not value_at(settings, path_key):
        put_at(settings, path_key, folder)
        return True
    return False


def engine_refusal(config: RunConfig) -> str:
    """Why DeepSpeed's engine cannot train a run: a clause; empty where it can."""
    row = strategy_row("deepspeed")
    if missing := missing_library():
        return missing
    if precision_row(config.mixed_precision).has_backends:
        backend = fp8_backend("" if config.fp8 is None else config.fp8.backend).row
        if backend is None or not strategy_fits(row, backend):
            name = "" if backend is None else f" by the backend {backend.name}"
            return f"DeepSpeed's engine does not train in fp8{name}"
    elif config.mixed_precision not in row.precisions:
        return f"DeepSpeed's engine does not train in {config.mixed_precision}"
    return ""


def training_ways(
    config: RunConfig,
    shape: Shape,
    *,
    on_host: bool,
    can_checkpoint: bool,
    placements: tuple[StatePlacement, ...] = FORM_PLACEMENTS,
) -> Iterator[TrainingWay]:
    """See :meth:`SettingsForm.ways`."""
    refusal = engine_refusal(config)
    folder = next(map(str, nvme_folders(config.deepspeed)), None)
    for placement in placements:
        # Where processes compute on the CPU, everything is in host memory anyway.
        if on_host and placement.leaves_device and not (placement.uses_disk and folder):
            continue
        way_refusal = refusal
        if placement.uses_disk and folder is None and not way_refusal:
            way_refusal = "needs a folder on a fast disk: give offload_optimizer.nvme_path"
        yield TrainingWay(
            name=name_of(placement),
            configs=_variants(config, placement, shape, folder, can_checkpoint=can_checkpoint),
            placement=placement,
            refusal=way_refusal,
        )


def name_of(placement: StatePlacement) -> str:
    """The name of a way to train: ``ZeRO-2, optimizer on the CPU``."""
    stage_name = f"ZeRO-{placement.divided}"
    if not placement.leaves_device:
        return stage_name
    if placement.optimizer == placement.parameters:
        return f"{stage_name}, all on {_PLACE_WORDS[placement.optimizer]}"
    places = (("optimizer", placement.optimizer), ("parameters", placement.parameters))
    left = [f"{part} on {_PLACE_WORDS[place]}" for part, place in places if place != "none"]
    return f"{stage_name}, {', '.join(left)}"


def _variants(
    config: RunConfig,
    placement: StatePlacement,
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
    for at_once in _LOWERED if placement.divided == 3 else ():
        if at_once < shape.total:
            lowered_config = _placed(config, placement, shape, folder, at_once=at_once)
            yield lowered_config.changed(**recomputes)


def _placed(
    config: RunConfig,
    placement: StatePlacement,
    shape: Shape,
    folder: str | None,
    *,
    at_once: int | None,
) -> RunConfig:
    """The run with that placement; what the user has written for it is kept."""
    settings: dict[str, Any] = copy.deepcopy(dict(config.deepspeed or {}))
    put_place(settings, OPTIMIZER_PLACE, placement.optimizer, folder or "")
    put_place(settings, PARAM_PLACE, placement.parameters, folder or "")
    zero_section = settings.setdefault(ZERO, {})
    zero_section.pop("stage", None)
    largest = largest_parameter(shape)
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
