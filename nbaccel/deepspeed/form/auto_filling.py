"""A DeepSpeed configuration of a form, with ``"auto"`` filled in as far as it is decided."""

from __future__ import annotations

import copy
from typing import Any

from nbaccel.base.errors import ConfigError
from nbaccel.config import RunConfig, nested_keys
from nbaccel.config.field_rules import mistakes_in
from nbaccel.deepspeed.auto_values import UndecidedKey, resolve_auto
from nbaccel.deepspeed.training_facts import TrainingFacts
from nbaccel.deepspeed.zero_config import auto_keys
from nbaccel.memory.settings_form import FilledConfig
from nbaccel.plan import Plan
from nbaccel.plan.launch_plan import Choice

_FILLED_LATER = {
    "train_micro_batch_size_per_gpu": "filled in by prepare, from your data loader",
    "train_batch_size": "filled in by prepare, from your data loader",
}


def filled_in(
    config_settings: dict[str, Any],
    run_config: RunConfig,
    launch_plan: Plan | None,
    module: Any,
    sample_batch: Any,
) -> FilledConfig:
    """Fill in ``"auto"`` where the run, the model or the batch decides it."""
    world_size = 1 if launch_plan is None else launch_plan.world_size
    facts = TrainingFacts(
        world_size=world_size,
        micro_batch_size=_samples_of_batch(config_settings, sample_batch),
        accumulation_steps=run_config.gradient_accumulation_steps,
    )
    remaining_settings = copy.deepcopy(config_settings)
    later_reasons = dict[str, str]()
    resolved_config = None
    # Each failed attempt names the keys that nothing decides; without them the others are decided.
    while resolved_config is None:
        try:
            resolved_config = resolve_auto(
                remaining_settings, facts=facts, run=run_config, model=module
            )
        except ConfigError as error:
            undecided_mistakes = [
                found_mistake
                for found_mistake in mistakes_in(error)
                if isinstance(found_mistake, UndecidedKey)
            ]
            # Other mistakes would be found again in each attempt.
            if not undecided_mistakes:
                return FilledConfig(
                    config_settings, (Choice("DeepSpeed", "refused", error.mistakes[0]),)
                )
            for undecided_mistake in undecided_mistakes:
                auto_key = undecided_mistake.path
                nested_keys.drop_at(remaining_settings, auto_key)
                later_reasons[auto_key] = _FILLED_LATER.get(auto_key, undecided_mistake.reason)
    # Written into the given document, which keeps the order and form in which the user wrote it.
    filled_config = copy.deepcopy(config_settings)
    decided_settings = resolved_config.config.to_dict()
    for auto_key in auto_keys(config_settings):
        if auto_key not in later_reasons:
            nested_keys.put_at(
                filled_config, auto_key, nested_keys.value_at(decided_settings, auto_key)
            )
    later_choices = tuple(
        Choice(auto_key, "auto", later_reason) for auto_key, later_reason in later_reasons.items()
    )
    return FilledConfig(filled_config, (*resolved_config.choices, *later_choices))


def _samples_of_batch(settings: dict[str, Any], sample_batch: Any) -> int | None:
    if sample_batch is None or isinstance(settings.get("train_micro_batch_size_per_gpu"), int):
        return None
    # Imported here, because it imports torch, which a form without a batch does not need.
    from nbaccel.memory.activations import num_samples

    return num_samples(sample_batch)
