"""What a configuration leaves open, filled in as far as something decides it already."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from nbaccel.config import RunConfig, dotted
from nbaccel.deepspeed.auto import resolve_auto
from nbaccel.deepspeed.facts import TrainingFacts
from nbaccel.deepspeed.reading import auto_keys
from nbaccel.errors import ConfigError
from nbaccel.plan import Plan
from nbaccel.plan.plan import Choice

__all__ = ["Opens", "filled_in"]

_LATER = {
    "train_micro_batch_size_per_gpu": "filled in by prepare, from your data loader",
    "train_batch_size": "filled in by prepare, from your data loader",
}


@dataclass(frozen=True, slots=True)
class Opens:
    """A DeepSpeed configuration, filled in.

    Attributes:
        config: With ``"auto"`` where only the training decides; None without DeepSpeed.
        choices: Each key that was or will be filled in, with its reason.
    """

    config: dict[str, Any] | None
    choices: tuple[Choice, ...] = ()


def filled_in(
    settings: dict[str, Any] | None,
    run: RunConfig,
    plan: Plan | None,
    module: Any,
    sample_batch: Any,
) -> Opens:
    """Fill in ``"auto"`` where the run, the model or the batch decides it.

    Args:
        settings: A DeepSpeed configuration; None without DeepSpeed.
        run: How it will be run.
        plan: What that comes to; None where it cannot be run here.
        module: The model; None where there is none.
        sample_batch: What one process calls it with, or None.

    Returns:
        The configuration, and what was decided.
    """
    if settings is None:
        return Opens(None)
    world = 1 if plan is None else plan.world_size
    facts = TrainingFacts(
        world_size=world,
        micro_batch_size=_samples(settings, sample_batch),
        accumulation_steps=run.gradient_accumulation_steps,
    )
    rest, later = copy.deepcopy(settings), dict[str, str]()
    found = None
    while found is None:
        try:
            found = resolve_auto(rest, facts=facts, run=run, model=module)
        except ConfigError as error:
            undecided = [key for key in auto_keys(rest) if _is_about(key, error)]
            if not undecided:
                return Opens(settings, (Choice("DeepSpeed", "refused", error.mistakes[0]),))
            for key in undecided:
                dotted.drop(rest, key)
                later[key] = _LATER.get(key, _reason(key, error))
    config = copy.deepcopy(settings)
    decided = found.config.to_dict()
    for key in auto_keys(settings):
        if key not in later:
            dotted.put(config, key, dotted.value_at(decided, key))
    more = tuple(Choice(key, "auto", reason) for key, reason in later.items())
    return Opens(config, (*found.choices, *more))


def _samples(settings: dict[str, Any], sample_batch: Any) -> int | None:
    if sample_batch is None or isinstance(settings.get("train_micro_batch_size_per_gpu"), int):
        return None
    from nbaccel.deepspeed.batches import num_samples

    return num_samples(sample_batch)


def _is_about(key: str, error: ConfigError) -> bool:
    return any(text.startswith(f'{key}="auto"') for text in error.mistakes)


def _reason(key: str, error: ConfigError) -> str:
    """What decides it later: the clause between the colon and the stop."""
    text = next(text for text in error.mistakes if text.startswith(f'{key}="auto"'))
    return text.partition(": ")[2].partition(". ")[0] or text
