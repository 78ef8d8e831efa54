"""The fastest settings that fit: by the advisor, or by estimates alone where it is not there."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nbaccel._optional import is_installed
from nbaccel._origin import install_line
from nbaccel.capabilities import strategy_row
from nbaccel.config import RunConfig, dotted
from nbaccel.config.engine import BATCH_SIZES, engine_config
from nbaccel.deepspeed.advisor.ladder import Step, ladder
from nbaccel.deepspeed.config import ZERO
from nbaccel.deepspeed.decided import nvme_folders
from nbaccel.errors import ConfigError
from nbaccel.notebook.picker.memory import Yardstick
from nbaccel.notebook.picker.opens import filled_in
from nbaccel.plan import Plan, resolve
from nbaccel.strategies import gradient_checkpointing
from nbaccel.units import format_bytes

__all__ = ["Suggester", "Suggestion", "refusal_of"]


@dataclass(frozen=True, slots=True)
class Suggestion:
    """What to take.

    Attributes:
        config: The settings.
        headline: What they are, in one line.
        remarks: What is worth knowing.
    """

    config: RunConfig
    headline: str
    remarks: tuple[str, ...] = ()


def refusal_of(module: Any, plan: Plan | None) -> str:
    """Why nothing can be suggested.

    Args:
        module: The model; None where there is none.
        plan: What is chosen comes to; None where it cannot be run here.

    Returns:
        A clause; empty where something can.
    """
    if module is None:
        return "give the model, configure(model, sample_batch)"
    return "" if plan is not None else "this machine cannot serve what is chosen"


class Suggester:
    """Finds settings for one model.

    Args:
        yardstick: Measures them.
    """

    def __init__(self, yardstick: Yardstick) -> None:
        self._yardstick = yardstick
        # Asked once: the answer is looked for in all modules.
        self._recomputes = gradient_checkpointing.checkpoints_gradients(yardstick.model)

    def suggest(self, config: RunConfig) -> Suggestion:
        """The fastest settings that fit, with the precision and processes that are chosen.

        Args:
            config: What is chosen.

        Returns:
            The suggestion.

        Raises:
            ConfigError: Nothing fits.
        """
        if is_installed(strategy_row("deepspeed").library):
            return self._by_advisor(config)
        return self._by_estimates(config)

    def remedy(self, config: RunConfig) -> str:
        """What would fit, without trying anything: estimates take milliseconds.

        Args:
            config: What is chosen, and does not fit.

        Returns:
            A sentence.
        """
        for step, candidate in self._steps(config):
            if candidate is not None and self._lacking(candidate) == 0:
                return f"{_name(step)} would fit: press Suggest."
        smaller = "a smaller batch, " if self._yardstick.sample_batch is not None else ""
        return f"Nothing on the ladder fits: take {smaller}more devices, or a smaller model."

    def _by_advisor(self, config: RunConfig) -> Suggestion:
        from nbaccel.advising import advise

        plan = resolve(config, self._yardstick.inventory)
        advice = advise(
            self._yardstick.model,
            self._yardstick.sample_batch,
            config=self._base(config) or None,
            num_processes=plan.num_processes,
            num_nodes=config.num_nodes,
            nvme_path=_folder(config),
            precision={"no": "fp32", "fp8": "bf16"}.get(
                config.mixed_precision, config.mixed_precision
            ),
            inventory=self._yardstick.inventory,
        )
        chosen = advice.chosen
        if chosen is None or chosen.config is None:
            raise ConfigError(
                f"{advice.headline()}. Training would run out of memory with {config}. "
                "Use a smaller batch, more devices, or a smaller model."
            )
        settings = copy.deepcopy(dict(chosen.config))
        beside_the_point = ["Activations are not in it"]  # the verdict says it
        if "optimizer" not in (config.deepspeed or {}):
            settings.pop("optimizer", None)  # it is the code's own
            beside_the_point.append("torch_adam")
        batch, steps = chosen.batch_size, chosen.accumulation_steps
        settings = {key: value for key, value in settings.items() if key not in BATCH_SIZES}
        remarks = [
            text for text in advice.warnings if not any(part in text for part in beside_the_point)
        ]
        if steps > 1 and steps != (config.gradient_accumulation_steps or 1):
            remarks.append(f"Give your data loader batch_size={batch}: {steps} make a step.")
        headline = f"Suggested: {advice.headline()}"
        found = self._with(config, chosen.step, settings, steps if steps > 1 else None)
        return Suggestion(found, headline, tuple(remarks))

    def _by_estimates(self, config: RunConfig) -> Suggestion:
        for step, candidate in self._steps(config):
            if candidate is not None and self._lacking(candidate) == 0:
                headline = f"Suggested: {_name(step)}: fits by estimate"
                missing = f"DeepSpeed is not installed: {install_line('deepspeed')}"
                return Suggestion(candidate, headline, (missing,) if step.stage else ())
        least = min(
            (self._lacking(candidate) for _, candidate in self._steps(config) if candidate),
            default=0,
        )
        raise ConfigError(
            f"Nothing fits: the leanest way lacks {format_bytes(least)}. Training would run out of "
            f"memory with {config}. Use a smaller batch, more devices, or a smaller model."
        )

    def _steps(self, config: RunConfig) -> Iterator[tuple[Step, RunConfig | None]]:
        """The ladder, each rung as settings; None for one that cannot be had."""
        on = self._recomputes
        can = gradient_checkpointing.can_checkpoint_gradients(self._yardstick.model)
        for step in ladder(has_switch=can, is_on=on):
            if (step.gradient_checkpointing and not (can or on)) or (
                step.uses_nvme and _folder(config) is None
            ):
                continue
            if step.stage and config.mixed_precision not in strategy_row("deepspeed").precisions:
                continue
            yield step, self._with(config, step, self._base(config), None)

    def _lacking(self, config: RunConfig) -> int:
        plan = resolve(config, self._yardstick.inventory)
        yardstick = self._yardstick
        settings = filled_in(
            engine_config(config), config, plan, yardstick.model, yardstick.sample_batch
        ).config
        return yardstick.need(config, plan, settings).lacking

    def _with(
        self, config: RunConfig, step: Step, settings: dict[str, Any], accumulation: int | None
    ) -> RunConfig:
        model_has_it = step.gradient_checkpointing and not self._recomputes
        changes: dict[str, Any] = {"activation_checkpointing": model_has_it}
        if accumulation is not None:
            changes["gradient_accumulation_steps"] = accumulation
        if not step.stage:
            return config.changed(zero_stage=None, deepspeed=None, **changes)
        settings = copy.deepcopy(settings)
        for half in ("fp16", "bf16"):
            section = settings.get(half)
            if isinstance(section, dict):  # the run says it
                section.pop("enabled", None)
                if not section or section == {"auto_cast": True}:
                    del settings[half]
        zero = settings.setdefault(ZERO, {})
        zero.pop("stage", None)
        for name, place in (
            ("offload_optimizer", step.offload_optimizer),
            ("offload_param", step.offload_param),
        ):
            if place != "none" and name not in zero:
                zero[name] = {"device": place}
                if place == "nvme":
                    zero[name]["nvme_path"] = _folder(config)
        return config.changed(zero_stage=step.stage, deepspeed=settings, **changes)

    def _base(self, config: RunConfig) -> dict[str, Any]:
        """What was chosen beside what the ladder decides."""
        settings: dict[str, Any] = copy.deepcopy(dict(config.deepspeed or {}))
        for name in ("offload_optimizer", "offload_param"):
            dotted.drop(settings, f"{ZERO}.{name}")
        return settings


def _folder(config: RunConfig) -> str | None:
    return next(map(str, nvme_folders(config.deepspeed)), None)


def _name(step: Step) -> str:
    also = ", gradient checkpointing" if step.stage and step.gradient_checkpointing else ""
    return f"{step.name[:1].upper()}{step.name[1:]}{also}"
