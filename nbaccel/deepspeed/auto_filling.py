"""``"auto"`` filled in as far as it is decided, for a form and an estimate, which go on without."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from nbaccel.base.errors import ConfigError
from nbaccel.config import RunConfig, nested_keys
from nbaccel.config.field_rules import mistakes_in
from nbaccel.deepspeed.auto_values import Resolved, UndecidedKey, resolve_auto
from nbaccel.deepspeed.training_facts import TrainingFacts
from nbaccel.deepspeed.zero_config import auto_keys, old_forms
from nbaccel.memory.settings_form import FilledConfig
from nbaccel.plan.launch_plan import Choice

_FILLED_LATER = {
    "train_micro_batch_size_per_gpu": "filled in by prepare, from your data loader",
    "train_batch_size": "filled in by prepare, from your data loader",
}


def resolve_decided(
    settings: Mapping[str, Any],
    *,
    facts: TrainingFacts,
    run: RunConfig | None,
    model: object | None,
) -> tuple[Resolved, dict[str, str]]:
    """A configuration without the keys that nothing decides, and the reason of each of those."""
    remaining, _ = old_forms(copy.deepcopy(dict(settings)))
    reasons: dict[str, str] = {}
    # A failed attempt names all keys that nothing decides; without them the others are decided.
    while True:
        try:
            return resolve_auto(remaining, facts=facts, run=run, model=model), reasons
        except ConfigError as error:
            undecided = [one for one in mistakes_in(error) if isinstance(one, UndecidedKey)]
            # Other mistakes would be found again in each attempt.
            if not undecided:
                raise
        for mistake in undecided:
            nested_keys.drop_at(remaining, mistake.path)
            reasons[mistake.path] = mistake.reason


def filled_in(
    document: dict[str, Any], run: RunConfig, facts: TrainingFacts, model: Any
) -> FilledConfig:
    """Fill in ``"auto"`` where the run, the model or the batch decides it."""
    try:
        resolved, reasons = resolve_decided(document, facts=facts, run=run, model=model)
    except ConfigError as error:
        return FilledConfig(document, (Choice("DeepSpeed", "refused", error.mistakes[0]),))
    # Written into the given document, which keeps the order and form in which the user wrote it.
    filled = copy.deepcopy(document)
    decided = resolved.config.to_dict()
    for key in auto_keys(document):
        if key not in reasons:
            nested_keys.put_at(filled, key, nested_keys.value_at(decided, key))
    later = [Choice(key, "auto", _FILLED_LATER.get(key, text)) for key, text in reasons.items()]
    return FilledConfig(filled, (*resolved.choices, *later))
