"""The fastest settings that fit: by the advisor, or by estimates alone where it is missing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nbaccel.config import RunConfig
from nbaccel.errors import ConfigError
from nbaccel.notebook.picker.choices import settings_forms
from nbaccel.notebook.picker.memory_model import MemoryModel
from nbaccel.plan import Plan, resolve
from nbaccel.strategies import gradient_checkpointing
from nbaccel.strategies.settings_form import Suggestion
from nbaccel.units import format_bytes

__all__ = ["Suggester", "refusal_of"]


def refusal_of(module: Any, plan: Plan | None) -> str:
    """Why nothing can be suggested.

    Args:
        module: The model; None where there is none.
        plan: The plan of the chosen settings; None where it cannot be run here.

    Returns:
        A clause; empty where something can.
    """
    if module is None:
        return "give the model, configure(model, sample_batch)"
    return "" if plan is not None else "this machine cannot serve what is chosen"


class Suggester:
    """Finds settings for one model.

    Args:
        memory_model: Measures them.
    """

    def __init__(self, memory_model: MemoryModel) -> None:
        self._memory_model = memory_model
        # Once, because it searches all modules of the model.
        self._recomputes = gradient_checkpointing.checkpoints_gradients(memory_model.model)

    def suggest(self, config: RunConfig) -> Suggestion:
        """The fastest settings that fit, with the precision and processes that are chosen.

        Args:
            config: The chosen settings.

        Returns:
            The suggestion.

        Raises:
            ConfigError: Nothing fits.
        """
        plan = resolve(config, self._memory_model.inventory)
        for settings_form in settings_forms():
            suggestion = settings_form.advised(
                config,
                plan,
                self._memory_model.model,
                self._memory_model.sample_batch,
                checkpoints=self._recomputes,
                inventory=self._memory_model.inventory,
            )
            if suggestion is not None:
                return suggestion
        return self._by_estimates(config)

    def remedy(self, config: RunConfig) -> str:
        """Settings that would fit, by estimates alone, which take milliseconds.

        Args:
            config: The chosen settings, which do not fit.

        Returns:
            A sentence.
        """
        for candidate_name, candidate_config in self._candidates(config):
            if self._lacking(candidate_config) == 0:
                return f"{candidate_name} would fit: press Suggest."
        batch_remedy = "a smaller batch, " if self._memory_model.sample_batch is not None else ""
        return f"Nothing on the ladder fits: take {batch_remedy}more devices, or a smaller model."

    def _by_estimates(self, config: RunConfig) -> Suggestion:
        # They come fastest first, so the first that fits is the one to suggest.
        for candidate_name, candidate_config in self._candidates(config):
            if self._lacking(candidate_config) == 0:
                chosen_forms = (
                    settings_form
                    for settings_form in settings_forms()
                    if settings_form.is_chosen(candidate_config)
                )
                missing_libraries = tuple(
                    filter(None, (settings_form.missing_library for settings_form in chosen_forms))
                )
                return Suggestion(
                    candidate_config,
                    f"Suggested: {candidate_name}: fits by estimate",
                    missing_libraries,
                )
        least_lacking = min(
            (self._lacking(candidate_config) for _, candidate_config in self._candidates(config))
        )
        raise ConfigError(
            f"Nothing fits: the leanest way lacks {format_bytes(least_lacking)}. Training would "
            f"run out of memory with {config}. Use a smaller batch, more devices, or a smaller "
            "model."
        )

    def _candidates(self, config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
        """Ways to train, the fastest first, each with its name."""
        can_recompute = self._recomputes
        can_checkpoint = gradient_checkpointing.can_checkpoint_gradients(self._memory_model.model)
        # Without ZeRO and recomputation first: what needs neither is the fastest.
        replicated_config = config.changed(
            zero_stage=None, deepspeed=None, activation_checkpointing=False
        )
        yield "As it is", replicated_config
        if can_checkpoint and not can_recompute:
            yield "Gradient checkpointing", replicated_config.changed(activation_checkpointing=True)
        for settings_form in settings_forms():
            yield from settings_form.leaner(
                config, can_checkpoint=can_checkpoint, checkpoints=can_recompute
            )

    def _lacking(self, config: RunConfig) -> int:
        memory_model = self._memory_model
        plan = resolve(config, memory_model.inventory)
        chosen_form = next(
            (chosen_form for chosen_form in settings_forms() if chosen_form.is_chosen(config)), None
        )
        strategy_document = None
        if chosen_form is not None:
            strategy_document = chosen_form.filled_in(
                config, plan, memory_model.model, memory_model.sample_batch
            ).config
        return memory_model.need(config, plan, chosen_form, strategy_document or {}).lacking
