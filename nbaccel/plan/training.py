"""``TrainingPlan``: what an `Accelerator` will do in this process, with the reason for each choice.

A launch's plan (`plan.plan`) says which processes there will be; this one says what each of them
does with a model. It is made of facts that the caller found out, so nothing here touches a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from nbaccel.capabilities import PRECISIONS, device_row
from nbaccel.errors import ConfigError
from nbaccel.plan.plan import Choice, table

__all__ = ["Asked", "Found", "TrainingPlan", "plan_training"]

Source = Literal["argument", "environment", "config", "default"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What the user said, wherever he said it.

    Attributes:
        mixed_precision: The precision by name.
        precision_source: Who said so: an argument, the environment, a `RunConfig`, or nobody.
        accumulation_steps: Batches for one optimizer step.
        accumulation_source: Who said so.
        fsdp: Whether models are to be sharded by torch.
        zero_stage: ZeRO stage at which DeepSpeed is to shard them; None leaves it out.
        cpu: Whether the CPU was asked for.
        split_batches: Whether a loader's batch is cut up, or every process gets whole ones.
    """

    mixed_precision: str = "no"
    precision_source: Source = "default"
    accumulation_steps: int = 1
    accumulation_source: Source = "default"
    fsdp: bool = False
    zero_stage: int | None = None
    cpu: bool = False
    split_batches: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What this process is.

    Attributes:
        device: Type of its device: ``cpu`` or ``cuda``.
        device_name: The device as torch writes it.
        world_size: Processes in total.
        rank: Number of this one.
        backend: Process group backend; empty where there is no group.
        can_meet: Whether a process group exists or can be made: one process without a launcher
            has nothing to make it from.
        compute_capability: Of the GPU, if it is one.
    """

    device: str
    device_name: str
    world_size: int = 1
    rank: int = 0
    backend: str = ""
    can_meet: bool = True
    compute_capability: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingPlan:
    """What an `Accelerator` will do.

    Attributes:
        device: Type of the device.
        strategy: ``single``, ``ddp``, ``fsdp`` or ``deepspeed``.
        mixed_precision: ``no``, ``fp16``, ``bf16`` or ``fp8``.
        accumulation_steps: Batches for one optimizer step.
        num_processes: Processes in total.
        choices: Every decision with its reason.
        warnings: What will work and may disappoint.
    """

    device: str
    strategy: str
    mixed_precision: str
    accumulation_steps: int
    num_processes: int
    choices: tuple[Choice, ...] = field(default=())
    warnings: tuple[str, ...] = field(default=())

    def headline(self) -> str:
        """The plan in one line."""
        what = {
            "single": "one process",
            "ddp": "data parallel",
            "fsdp": "fully sharded",
            "deepspeed": "DeepSpeed",
        }
        precision = "float32" if self.mixed_precision == "no" else self.mixed_precision
        parts = [what.get(self.strategy, self.strategy), f"on {self.device.upper()}", precision]
        if self.num_processes > 1:
            parts.insert(1, f"{self.num_processes} processes")
        if self.accumulation_steps > 1:
            parts.append(f"{self.accumulation_steps} batches per step")
        return ", ".join(parts)

    def explain(self) -> str:
        """The plan as a table: what, value, why; warnings under it.

        Returns:
            Text for a fixed-width font.
        """
        return table(self.headline(), self.choices, self.warnings)

    def __str__(self) -> str:
        return self.explain()


def plan_training(asked: Asked, found: Found) -> TrainingPlan:
    """Decide how models will be trained in this process.

    Args:
        asked: What the user said.
        found: What this process is.

    Returns:
        The plan.

    Raises:
        ConfigError: The precision is unknown, or the device cannot do it.
    """
    strategy = _strategy(asked, found)
    choices = (
        Choice("device", found.device_name, _why_device(asked, found)),
        Choice("num_processes", found.world_size, _why_count(found)),
        strategy,
        Choice("mixed_precision", asked.mixed_precision, _why_precision(asked)),
        Choice(
            "gradient_accumulation_steps",
            asked.accumulation_steps,
            _by(asked.accumulation_source, "every batch is a step, as nothing was asked"),
        ),
        Choice(
            "batches",
            "split" if asked.split_batches else "whole",
            "each process gets its slice of every batch"
            if asked.split_batches
            else f"each process gets whole batches: {found.world_size} x batch_size per step",
        ),
    )
    return TrainingPlan(
        device=found.device,
        strategy=str(strategy.value),
        mixed_precision=asked.mixed_precision,
        accumulation_steps=asked.accumulation_steps,
        num_processes=found.world_size,
        choices=choices,
        warnings=(*_judge_precision(asked.mixed_precision, found), *_not_sharded(asked, found)),
    )


def _strategy(asked: Asked, found: Found) -> Choice:
    if asked.zero_stage is not None:
        why = f"a DeepSpeedPlugin or zero_stage was given: ZeRO stage {asked.zero_stage}"
        return Choice("strategy", "deepspeed", why)
    if asked.fsdp and found.can_meet:
        return Choice("strategy", "fsdp", "an fsdp_plugin was given: torch's fully_shard")
    if found.world_size > 1:
        return Choice("strategy", "ddp", f"{found.world_size} processes, each with a whole model")
    return Choice("strategy", "single", "there are no other processes")


def _not_sharded(asked: Asked, found: Found) -> Iterator[str]:
    if asked.fsdp and not found.can_meet:
        yield (
            "fsdp_plugin has no effect: this process was started without a launcher, so models are "
            "trained whole. Use notebook_launcher or torchrun to shard them."
        )


def _why_device(asked: Asked, found: Found) -> str:
    if asked.cpu:
        return "the CPU was asked for"
    return "a GPU was found" if found.device == "cuda" else "no GPU was found"


def _why_count(found: Found) -> str:
    if found.world_size == 1:
        return "started without a launcher, or with one worker"
    return f"from the process group ({found.backend}); this is process {found.rank}"


def _why_precision(asked: Asked) -> str:
    if asked.mixed_precision == "no" and asked.precision_source == "environment":
        return "float32, as the launcher asked for nothing else"
    return _by(asked.precision_source, "float32, as nothing was asked")


def _by(source: Source, otherwise: str) -> str:
    return {
        "argument": "asked for",
        "config": "from the configuration",
        "environment": "from the environment (the launcher's request)",
        "default": otherwise,
    }[source]


def _judge_precision(value: str, found: Found) -> Iterator[str]:
    """Refuse what cannot be done; yield what may disappoint."""
    known = [row.name for row in PRECISIONS]
    if value not in known:
        raise ConfigError(
            f"mixed_precision={value!r} is unknown: nothing says in which format to compute. "
            f"Give one of {', '.join(known)}."
        )
    row = device_row(found.device)
    precision = next(item for item in PRECISIONS if item.name == value)
    capability = found.compute_capability or (99, 0)
    if value not in row.precisions or capability < precision.refused_below:
        raise ConfigError(
            f'mixed_precision="{value}" cannot be had on {found.device_name}: it needs '
            f'{precision.needs}. Training would fail in its first step. Give "bf16" or "no".'
        )
    slow = dict(row.slow)
    if value in slow:
        yield f'mixed_precision="{value}" on {row.name} is slow: {slow[value]}.'
    if capability < precision.imitated_below:
        yield f'mixed_precision="{value}" is only imitated by this GPU: it saves no time.'
