"""From a plugin's configuration, with its "auto" values, to the one an engine is made with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from nbaccel.abc.place import Place
from nbaccel.abc.standins import DummyOptim, DummyScheduler
from nbaccel.config import RunConfig
from nbaccel.config.dotted import value_at
from nbaccel.deepspeed.auto import resolve_auto
from nbaccel.deepspeed.checking import check_config
from nbaccel.deepspeed.config import ZERO
from nbaccel.deepspeed.facts import TrainingFacts
from nbaccel.deepspeed.kinds import AUTO
from nbaccel.deepspeed.strategy.plugin import DeepSpeedPlugin
from nbaccel.errors import ConfigError
from nbaccel.plan.plan import Choice
from nbaccel.plan.training import Asked

__all__ = ["Settled", "check_parts", "settle", "stage_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settled:
    """What an engine is made with.

    Attributes:
        settings: DeepSpeed's configuration, checked, without ``"auto"``.
        choices: What was filled in, each with its reason.
        warnings: What will work and may disappoint.
    """

    settings: dict[str, Any]
    choices: tuple[Choice, ...]
    warnings: tuple[str, ...]


def settle(
    config: dict[str, Any],
    plugin: DeepSpeedPlugin,
    asked: Asked,
    place: Place,
    model: nn.Module,
    optimizer: Any,
    scheduler: Any,
    loaders: Iterable[Any],
) -> Settled:
    """Fill in and check a configuration.

    Args:
        config: A DeepSpeed configuration, with ``"auto"`` values.
        plugin: What else the user asked of DeepSpeed.
        asked: What he asked of the Accelerator.
        place: This process among the others.
        model: The model.
        optimizer: Its optimizer or what stands for it; None for none.
        scheduler: The same of its schedule.
        loaders: Data loaders, shared out already.

    Returns:
        The settings.

    Raises:
        ConfigError: They are wrong, or contradict the run; all mistakes.
    """
    micro = _micro_batch(loaders, smallest=plugin.is_train_batch_min)
    facts = TrainingFacts(
        world_size=place.world_size,
        micro_batch_size=micro,
        accumulation_steps=asked.accumulation_steps,
        mixed_precision=asked.mixed_precision,
        total_steps=_total_steps(scheduler, place, asked),
        learning_rate=_peak_rate(config, optimizer),
    )
    settings, choices = _with_a_batch_size(_with_gathering(config), micro)
    resolved = resolve_auto(
        settings,
        facts=facts,
        model=model,
        optimizer=optimizer if isinstance(optimizer, DummyOptim) else None,
        scheduler=scheduler if isinstance(scheduler, DummyScheduler) else None,
    )
    run = RunConfig.model_validate({"device": place.device.type})
    checked = check_config(resolved.config, world_size=place.world_size, run=run)
    return Settled(
        settings=checked.config.to_dict(),
        choices=(*choices, *resolved.choices),
        warnings=checked.warnings,
    )


def _micro_batch(loaders: Iterable[Any], *, smallest: bool) -> int | None:
    sizes = [size for loader in loaders if isinstance(size := loader.batch_size, int)]
    if not sizes:
        return None
    return min(sizes) if smallest else max(sizes)


def _total_steps(scheduler: Any, place: Place, asked: Asked) -> int | None:
    """A loop of several processes makes so many fewer steps."""
    if not isinstance(scheduler, DummyScheduler) or scheduler.total_num_steps is None:
        return None
    shared = 1 if asked.split_batches else place.world_size
    return math.ceil(scheduler.total_num_steps / shared)


def _peak_rate(config: Mapping[str, Any], optimizer: Any) -> float | None:
    """What the file's schedule warms up to where it leaves that to the code's own optimizer."""
    if value_at(config, "scheduler.params.warmup_max_lr") != AUTO:
        return None
    found = getattr(optimizer, "defaults", {}).get("lr")
    return None if found is None else float(found)


def _with_gathering(settings: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed's own `save_16bit_model` writes nothing at stage 3 unless it is told to."""
    zero = settings.get(ZERO)
    key = "stage3_gather_16bit_weights_on_model_save"
    if not isinstance(zero, dict) or zero.get("stage") != 3 or key in zero:
        return settings
    return {**settings, ZERO: {**zero, key: True}}


def _with_a_batch_size(
    settings: dict[str, Any], micro: int | None
) -> tuple[dict[str, Any], tuple[Choice, ...]]:
    """DeepSpeed insists on a batch size, though only its own counters and logs use it."""
    key = "train_micro_batch_size_per_gpu"
    total = settings.get("train_batch_size", AUTO)
    if micro is not None or settings.get(key, AUTO) != AUTO or total != AUTO:
        return settings, ()
    why = "no loader was prepared before; DeepSpeed counts samples by it, nothing else"
    return {**settings, key: 1}, (Choice(key, 1, why),)


# ------------------------------------------------------------------------- what goes together


def check_parts(
    settings: dict[str, Any],
    models: Sequence[nn.Module],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
) -> None:
    """Refuse optimizers and schedules that the file and the code both have, or neither.

    Args:
        settings: The configuration.
        models: Models of one call of `prepare`.
        optimizers: Theirs.
        schedulers: Theirs.

    Raises:
        ConfigError: What does not go together; all of it.
    """
    mistakes = []
    dummies = [isinstance(optimizer, DummyOptim) for optimizer in optimizers]
    if optimizers and not models:
        mistakes.append(
            f"prepare got {len(optimizers)} optimizer(s) and no model: DeepSpeed puts both in one "
            "engine, and the optimizer alone would train nothing. Prepare them in one call."
        )
    if settings.get("optimizer") and not all(dummies):
        mistakes.append(
            f"The DeepSpeed configuration has an optimizer ({_type(settings['optimizer'])}), and "
            "prepare got one of torch. Only one can train. Leave it out of the configuration, or "
            "prepare nbaccel.utils.DummyOptim(model.parameters())."
        )
    if any(dummies) and not settings.get("optimizer"):
        mistakes.append(
            f"prepare got {sum(dummies)} DummyOptim, and the DeepSpeed configuration has no "
            "optimizer that it could stand for. Add one there, or prepare one of torch."
        )
    mistakes += _schedules(settings, schedulers, some_dummy=any(dummies))
    if mistakes:
        raise ConfigError(*mistakes)


def _schedules(
    settings: dict[str, Any], schedulers: Sequence[Any], *, some_dummy: bool
) -> list[str]:
    mistakes = []
    for scheduler in schedulers:
        dummy = isinstance(scheduler, DummyScheduler)
        makes = dummy and scheduler.lr_scheduler_callable is not None
        if settings.get("scheduler") and (not dummy or makes):
            mistakes.append(
                f"The DeepSpeed configuration has a schedule ({_type(settings['scheduler'])}), and "
                f"prepare got {type(scheduler).__name__}. Only one can set the learning rate. "
                "Leave it out of the configuration, or prepare nbaccel.utils.DummyScheduler."
            )
        elif dummy and not makes and not settings.get("scheduler"):
            mistakes.append(
                f"prepare got a DummyScheduler(total_num_steps={scheduler.total_num_steps}), and "
                "the DeepSpeed configuration has no schedule that it could stand for. Add one "
                "there, or give lr_scheduler_callable."
            )
        elif some_dummy and not dummy:
            mistakes.append(
                f"prepare got a {type(scheduler).__name__} of an optimizer that is a DummyOptim: "
                "it would set the learning rate of nothing. Give "
                "DummyScheduler(lr_scheduler_callable=...)."
            )
    return mistakes


def _type(section: Any) -> Any:
    return section.get("type") if isinstance(section, dict) else section


def stage_of(settings: dict[str, Any]) -> int:
    """The ZeRO stage of a configuration without ``"auto"``."""
    return int(settings.get(ZERO, {}).get("stage", 0))
