"""From a plugin's configuration, with its "auto" values, to the one an engine is made with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from nbaccel.base.errors import ConfigError
from nbaccel.config.given_values import value_at
from nbaccel.deepspeed.auto_values import Resolved, resolve_auto
from nbaccel.deepspeed.checking import check_config
from nbaccel.deepspeed.strategy.plugin import DeepSpeedPlugin
from nbaccel.deepspeed.training_facts import TrainingFacts
from nbaccel.deepspeed.zero_config import AUTO, ZERO
from nbaccel.plan.contracts.training import DummyOptim, DummyScheduler, Place, TrainingRequest
from nbaccel.plan.launch_plan import Choice


def resolve_config(
    given_config: dict[str, Any],
    plugin: DeepSpeedPlugin,
    asked_settings: TrainingRequest,
    place: Place,
    model: nn.Module,
    optimizer: Any,
    scheduler: Any,
    loaders: Iterable[Any],
) -> Resolved:
    """Fill in and check a configuration."""
    micro_batch = _micro_batch(loaders, takes_smallest=plugin.is_train_batch_min)
    facts = TrainingFacts(
        world_size=place.world_size,
        micro_batch_size=micro_batch,
        accumulation_steps=asked_settings.accumulation_steps,
        mixed_precision=asked_settings.mixed_precision,
        total_steps=_total_steps(scheduler, place, asked_settings),
        learning_rate=_schedule_peak_rate(given_config, optimizer),
    )
    config_settings, choices = _with_a_batch_size(_with_gathering(given_config), micro_batch)
    resolved_config = resolve_auto(
        config_settings,
        facts=facts,
        model=model,
        optimizer=optimizer if isinstance(optimizer, DummyOptim) else None,
        scheduler=scheduler if isinstance(scheduler, DummyScheduler) else None,
    )
    # The check needs the device alone: all else that a run decides has been filled in by now.
    checked = check_config(
        resolved_config.config, world_size=place.world_size, device=place.device.type
    )
    return Resolved(checked.config, (*choices, *resolved_config.choices), checked.warnings)


def _micro_batch(data_loaders: Iterable[Any], *, takes_smallest: bool) -> int | None:
    # All prepared loaders count, since nothing says which of them is the training's. One with a
    # batch sampler of the user's own may have None.
    sizes = [loader.batch_size for loader in data_loaders if isinstance(loader.batch_size, int)]
    if not sizes:
        return None
    return min(sizes) if takes_smallest else max(sizes)


def _total_steps(scheduler: Any, place: Place, settings: TrainingRequest) -> int | None:
    """The schedule's steps in one process: each takes its share of the batches."""
    if not isinstance(scheduler, DummyScheduler) or scheduler.total_num_steps is None:
        return None
    processes = 1 if settings.split_batches else place.world_size
    return math.ceil(scheduler.total_num_steps / processes)


def _schedule_peak_rate(config: Mapping[str, Any], optimizer: Any) -> float | None:
    """The rate to which the file's schedule warms up where the file leaves it to the optimizer."""
    if value_at(config, "scheduler.params.warmup_max_lr") != AUTO:
        return None
    optimizer_defaults = getattr(optimizer, "defaults", {}).get("lr")
    return None if optimizer_defaults is None else float(optimizer_defaults)


def _with_gathering(settings: dict[str, Any]) -> dict[str, Any]:
    """Without this key DeepSpeed's `save_16bit_model` writes nothing at stage 3."""
    section = settings.get(ZERO)
    key = "stage3_gather_16bit_weights_on_model_save"
    if not isinstance(section, dict) or section.get("stage") != 3 or key in section:
        return settings
    # A new dictionary: the given one is the plugin's, which keeps what the user wrote.
    return {**settings, ZERO: {**section, key: True}}


def _with_a_batch_size(
    settings: dict[str, Any], micro_batch: int | None
) -> tuple[dict[str, Any], tuple[Choice, ...]]:
    """A batch size, which DeepSpeed requires, though only its counters and logs use it."""
    key = "train_micro_batch_size_per_gpu"
    total_batch = settings.get("train_batch_size", AUTO)
    if micro_batch is not None or settings.get(key, AUTO) != AUTO or total_batch != AUTO:
        return settings, ()
    reason = "no loader was prepared before; DeepSpeed only counts samples by it"
    return {**settings, key: 1}, (Choice(key, 1, reason),)


# ------------------------------------------------------------------------- what goes together


def check_parts(
    settings: dict[str, Any],
    models: Sequence[nn.Module],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
) -> None:
    """Refuse optimizers and schedules that the file and the code both have, or neither."""
    part_mistakes = []
    are_dummies = [isinstance(optimizer, DummyOptim) for optimizer in optimizers]
    if optimizers and not models:
        part_mistakes.append(
            f"prepare got {len(optimizers)} optimizer(s) and no model: DeepSpeed puts both in "
            "one engine, and the optimizer alone would train nothing. Prepare them in one call."
        )
    if settings.get("optimizer") and not all(are_dummies):
        part_mistakes.append(
            "The DeepSpeed configuration has an optimizer "
            f"({_type_of(settings['optimizer'])}), and prepare got one of torch. Only one "
            "can train. Leave it out of the configuration, or prepare "
            "nbaccel.utils.DummyOptim(model.parameters())."
        )
    if any(are_dummies) and not settings.get("optimizer"):
        part_mistakes.append(
            f"prepare got {sum(are_dummies)} DummyOptim, and the DeepSpeed configuration has no "
            "optimizer that it could stand for. Add one there, or prepare one of torch."
        )
    part_mistakes += _schedule_mistakes(settings, schedulers, some_dummy=any(are_dummies))
    if part_mistakes:
        raise ConfigError(*part_mistakes)


def _schedule_mistakes(
    settings: dict[str, Any], schedulers: Sequence[Any], *, some_dummy: bool
) -> list[str]:
    mistakes = []
    for scheduler in schedulers:
        is_dummy = isinstance(scheduler, DummyScheduler)
        makes_schedule = is_dummy and scheduler.lr_scheduler_callable is not None
        if settings.get("scheduler") and (not is_dummy or makes_schedule):
            mistakes.append(
                "The DeepSpeed configuration has a schedule "
                f"({_type_of(settings['scheduler'])}), and prepare got "
                f"{type(scheduler).__name__}. Only one can set the learning rate. Leave it out "
                "of the configuration, or prepare nbaccel.utils.DummyScheduler."
            )
        elif is_dummy and not makes_schedule and not settings.get("scheduler"):
            mistakes.append(
                f"prepare got a DummyScheduler(total_num_steps={scheduler.total_num_steps}), and "
                "the DeepSpeed configuration has no schedule that it could stand for. Add one "
                "there, or give lr_scheduler_callable."
            )
        # The real optimizer is made inside `initialize`, from the file, after this schedule.
        elif some_dummy and not is_dummy:
            mistakes.append(
                f"prepare got a {type(scheduler).__name__} of an optimizer that is a DummyOptim: "
                "it would set the learning rate of nothing. Give "
                "DummyScheduler(lr_scheduler_callable=...)."
            )
    return mistakes


def _type_of(section: Any) -> Any:
    return section.get("type") if isinstance(section, dict) else section
