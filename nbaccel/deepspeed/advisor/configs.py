"""The DeepSpeed configuration of a step of the ladder."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

from nbaccel.config.engine import BATCH_SIZES
from nbaccel.deepspeed.advisor.ladder import Step
from nbaccel.deepspeed.auto import resolve_auto
from nbaccel.deepspeed.facts import TrainingFacts, hidden_size
from nbaccel.deepspeed.shape import Shape
from nbaccel.errors import ConfigError

__all__ = ["LOWERED", "LOWERED_KEYS", "Recipe", "batch_of"]

_ZERO = "zero_optimization"
_ALIGNED = 2**20  # elements: swap buffers are a multiple of it
_SMALLEST_BUCKET = 2**16
LOWERED = (10**8, 10**7)
"""What `LOWERED_KEYS` are set to, one after the other, where DeepSpeed's 1e9 needs too much."""
LOWERED_KEYS = ("sub_group_size", "stage3_max_live_parameters", "stage3_max_reuse_distance")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What all configurations of a ladder have in common.

    Attributes:
        base: What the user gave; kept wherever the ladder does not decide.
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
        self, step: Step, batch_size: int, accumulation_steps: int, *, at_once: int | None = None
    ) -> dict[str, Any]:
        """The configuration, with nothing left to ``"auto"``.

        Args:
            step: The step of the ladder.
            batch_size: Samples of a process in one forward pass.
            accumulation_steps: Forward passes of an optimizer step.
            at_once: Elements that ZeRO-3 updates and gathers at once, where the user said nothing
                of it; None leaves it to DeepSpeed.

        Returns:
            What ``deepspeed.initialize`` takes.

        Raises:
            ConfigError: The base has an ``"auto"`` that nothing decides.
        """
        settings = {k: copy.deepcopy(v) for k, v in self.base.items() if k not in BATCH_SIZES}
        settings["train_micro_batch_size_per_gpu"] = batch_size
        settings["gradient_accumulation_steps"] = accumulation_steps
        settings.setdefault("optimizer", {"type": self.optimizer})
        settings[_ZERO] = self._zero(step, at_once)
        if self.precision != "fp32":
            section = settings.setdefault(self.precision, {})
            section["enabled"] = True
            if self.precision == "fp16":
                section.setdefault("auto_cast", True)
        facts = TrainingFacts(
            world_size=self.world_size,
            micro_batch_size=batch_size,
            accumulation_steps=accumulation_steps,
            mixed_precision="no" if self.precision == "fp32" else self.precision,
        )
        return resolve_auto(settings, facts=facts, model=self.model).config.to_dict()

    def _zero(self, step: Step, at_once: int | None) -> dict[str, Any]:
        given = copy.deepcopy(self.base.get(_ZERO) or {})
        offload = {
            name: self._offload(name, place, given.pop(name, None))
            for name, place in (
                ("offload_optimizer", step.offload_optimizer),
                ("offload_param", step.offload_param),
            )
        }
        zero = {**given, "stage": step.stage}
        zero |= {name: section for name, section in offload.items() if section}
        if step.stage:
            zero.setdefault("reduce_bucket_size", self._bucket("auto"))
        if step.stage == 3:
            zero.setdefault("stage3_prefetch_bucket_size", self._bucket("auto"))
            zero.setdefault("stage3_param_persistence_threshold", self._bucket("auto", least=0))
            zero.setdefault("stage3_gather_16bit_weights_on_model_save", True)
            if at_once is not None:  # a group has one parameter at least
                least = max(at_once, max(self.shape.sizes, default=self.shape.largest_layer))
                for key in LOWERED_KEYS:
                    zero.setdefault(key, least)
        return zero

    def _bucket(self, word: str, *, least: int = _SMALLEST_BUCKET) -> str | int:
        """What transformers' rule decides by the model's width, or enough for its largest layer."""
        if hidden_size(self.model)[0] is not None:
            return word
        return max(least, min(self.shape.largest_layer, int(5e8))) if least else 10**5

    def _offload(self, name: str, place: str, given: Any) -> dict[str, Any]:
        if place == "none":
            return {}
        section = {**(given if isinstance(given, dict) else {}), "device": place}
        section.setdefault("pin_memory", self.pin_memory)
        if place == "nvme":
            section["nvme_path"] = self.nvme_path
            if name == "offload_param":  # each buffer must hold the largest parameter
                largest = max(self.shape.sizes, default=self.shape.largest_layer)
                section.setdefault("buffer_size", -(-largest // _ALIGNED) * _ALIGNED)
        else:
            section.pop("nvme_path", None)
        return section


def batch_of(base: dict[str, Any], *, samples: int | None, world_size: int) -> tuple[int, int]:
    """The batch that one optimizer step is to see of each process.

    Args:
        base: What the user gave.
        samples: Samples in his batch; None where there is none.
        world_size: Processes in all.

    Returns:
        Samples of one forward pass, and forward passes of one optimizer step.

    Raises:
        ConfigError: The sizes do not multiply out.
    """
    total, micro, steps = (
        value if isinstance(value := base.get(key), int) and value > 0 else None
        for key in BATCH_SIZES
    )
    if micro is not None and samples is not None and micro != samples:
        raise ConfigError(
            f"train_micro_batch_size_per_gpu={micro}, and sample_batch has {samples} samples: "
            "one of them would silently beat the other. Leave the first out, or cut the batch."
        )
    each = micro or samples or 1
    if total is None:
        return each, steps or 1
    if samples is None and micro is None and steps is None and total % world_size == 0:
        return total // world_size, 1
    if total % (each * world_size) or steps not in (None, total // (each * world_size)):
        raise ConfigError(
            f"train_batch_size={total} is not {each} samples * {steps or 'some'} accumulated * "
            f"{world_size} processes: no step could see it. Leave train_batch_size out."
        )
    return each, total // (each * world_size)
