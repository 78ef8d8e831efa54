"""``TrainingPlan``: what an `Accelerator` will do in this process, with the reason for each choice.

A launch's plan (`plan.plan`) says which processes there will be; this one says what each of them
does with a model. It is made of facts that the caller found out, so nothing here touches a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from nbaccel.base.errors import ConfigError
from nbaccel.config import Fp8Config
from nbaccel.config.capabilities import (
    DEVICES,
    PRECISIONS,
    STRATEGIES,
    Fp8Choice,
    StrategyRow,
    device_row,
    strategy_fits,
    strategy_row,
)
from nbaccel.plan.contracts.asking import Source, Wanted
from nbaccel.plan.launch_plan import Choice, choices_table
from nbaccel.plan.precision_choice import (
    choose_fp8,
    fp8_choices,
    fp8_mistakes,
    fp8_warnings,
    precision_mistakes,
    precision_warnings,
    refused_strategy,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRequest:
    """The settings given in a call, a configuration or the environment.

    Attributes:
        mixed_precision: The precision by name.
        precision_source: Its source: an argument, the environment, a `RunConfig`, or a default.
        accumulation_steps: Batches for one optimizer step.
        accumulation_source: Its source.
        strategy: The requested strategy; None goes by the number of processes.
        fp8: Which library computes in 8 bits, and how; None where it was not given.
        device: The row of the requested device; empty takes what there is.
        split_batches: Whether a loader's batch is cut up, or every process gets whole ones.
    """

    mixed_precision: str = "no"
    precision_source: Source = "default"
    accumulation_steps: int = 1
    accumulation_source: Source = "default"
    strategy: Wanted | None = None
    fp8: Fp8Config | None = None
    device: str = ""
    split_batches: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessFacts:
    """Facts about this process.

    Attributes:
        device: The row of its device: ``cpu`` or ``cuda``, for example.
        device_name: The device as torch writes it.
        world_size: Processes in total.
        rank: Number of this one.
        backend: Process group backend; empty where there is no group.
        can_join: Whether a process group exists or can be made: one process without a launcher
            has nothing to make it from.
        compute_capability: Of the GPU, if it is one.
    """

    device: str
    device_name: str
    world_size: int = 1
    rank: int = 0
    backend: str = ""
    can_join: bool = True
    compute_capability: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingPlan:
    """What an `Accelerator` will do.

    Attributes:
        device: The row of the device.
        strategy: The row of the strategy.
        mixed_precision: The row of the precision.
        accumulation_steps: Batches for one optimizer step.
        num_processes: Processes in total.
        choices: Every decision with its reason.
        warnings: What works but may not do what is expected.
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
        row = strategy_row(self.strategy)
        text = "float32" if self.mixed_precision == "no" else self.mixed_precision
        parts = [
            row.headline or row.name,
            f"on {self.device.upper()}",
            text,
        ]
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
        return choices_table(self.headline(), self.choices, self.warnings)

    def __str__(self) -> str:
        return self.explain()


def plan_training(asked: TrainingRequest, found: ProcessFacts) -> TrainingPlan:
    """Decide how models will be trained in this process."""
    strategy_choice = _strategy_choice(asked.strategy, found)
    fp8_choice = _fp8_choice(asked, found)
    all_choices = (
        Choice("device", found.device_name, _device_reason(asked, found)),
        Choice("num_processes", found.world_size, _count_reason(found)),
        strategy_choice,
        Choice("mixed_precision", asked.mixed_precision, _precision_reason(asked)),
        *fp8_choices(asked.fp8, fp8_choice),
        Choice(
            "gradient_accumulation_steps",
            asked.accumulation_steps,
            _source_text(asked.accumulation_source, "every batch is a step, as nothing was asked"),
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
        strategy=str(strategy_choice.value),
        mixed_precision=asked.mixed_precision,
        accumulation_steps=asked.accumulation_steps,
        num_processes=found.world_size,
        choices=all_choices,
        warnings=(
            *_judge_precision(asked, found, strategy_row(str(strategy_choice.value)), fp8_choice),
            *_effect_warnings(asked.strategy, found),
        ),
    )


def _strategy_choice(strategy: Wanted | None, found: ProcessFacts) -> Choice:
    if strategy is not None and _takes_effect(strategy, found):
        row = strategy_row(strategy.strategy)
        if problem := unfit_count(row, strategy.what, found.world_size):
            raise ConfigError(problem)
        return Choice("strategy", row.name, strategy.reason)
    word = "one" if found.world_size == 1 else "several"
    row = next(
        default_row
        for default_row in STRATEGIES
        if default_row.is_default
        and default_row.processes == word
        and strategy_fits(default_row, device_row(found.device))
    )
    reason = row.default_reason.format(world_size=found.world_size)
    return Choice("strategy", row.name, reason)


def unfit_count(row: StrategyRow, what: str, world_size: int) -> str:
    """Why a strategy does not train so many processes."""
    if row.processes in ("", "one" if world_size == 1 else "several"):
        return ""
    processes_text = "one process" if world_size == 1 else f"{world_size} processes"
    remedy_text = "num_processes=2 or more" if world_size == 1 else "num_processes=1"
    return (
        f"{what} is not supported with {processes_text}: {row.name} means that {row.meaning}. Give "
        f"{remedy_text}, or leave {what} out."
    )


def _takes_effect(strategy: Wanted, found: ProcessFacts) -> bool:
    # A strategy that shards needs a group, which a process without a launcher cannot make.
    return found.can_join or not strategy_row(strategy.strategy).needs_group


def _effect_warnings(strategy: Wanted | None, found: ProcessFacts) -> Iterator[str]:
    if strategy is not None and not _takes_effect(strategy, found):
        yield (
            f"{strategy.what} has no effect: this process was started without a "
            "launcher, so models are trained whole. Use notebook_launcher or torchrun to shard "
            "them."
        )


def _device_reason(asked: TrainingRequest, found: ProcessFacts) -> str:
    device = device_row(found.device)
    if asked.device == device.name:
        return f"the {device.noun} was asked for"
    if device == DEVICES[0]:
        return "no GPU was found"
    # Without a word of what it is: a dry run of torch_xla has a device and no chip.
    return f"this process computes on {found.device_name}"


def _count_reason(found: ProcessFacts) -> str:
    if found.world_size == 1:
        return "started without a launcher, or with one worker"
    return f"from the process group ({found.backend}); this is process {found.rank}"


def _precision_reason(asked: TrainingRequest) -> str:
    if asked.mixed_precision == "no" and asked.precision_source == "environment":
        return "float32, as the launcher asked for nothing else"
    return _source_text(asked.precision_source, "float32, as nothing was asked")


def _source_text(source: Source, default_text: str) -> str:
    return {
        "argument": "asked for",
        "config": "from the configuration",
        "environment": "from the environment (the launcher's request)",
        "default": default_text,
    }[source]


def _fp8_choice(asked: TrainingRequest, found: ProcessFacts) -> Fp8Choice:
    """The library that computes; none where the precision is one of torch's own."""
    row = {row.name: row for row in PRECISIONS}.get(asked.mixed_precision)
    if row is None or not row.has_backends:
        return Fp8Choice()
    return choose_fp8(asked.fp8, device_row(found.device), found.compute_capability)


def _judge_precision(
    asked: TrainingRequest, found: ProcessFacts, strategy: StrategyRow, fp8: Fp8Choice
) -> Iterator[str]:
    """Refuse what is not supported; yield warnings."""
    precision_name = asked.mixed_precision
    rows_by_name = {row.name: row for row in PRECISIONS}
    if precision_name not in rows_by_name:
        raise ConfigError(
            f"mixed_precision={precision_name!r} is unknown: nothing says in which format to "
            f"compute. Give one of {', '.join(rows_by_name)}."
        )
    device = device_row(found.device)
    precision_choice = rows_by_name[precision_name]
    capability = found.compute_capability
    gpus = {f"this GPU ({found.device_name})": capability} if capability else {}
    if mistakes := tuple(precision_mistakes(precision_choice, fp8, device, gpus)):
        raise ConfigError(*mistakes)
    computing_row = fp8.row or precision_choice
    if not strategy_fits(strategy, computing_row):
        own_reason = fp8.row and refused_strategy(asked.fp8, fp8.row, strategy)
        raise ConfigError(
            f'mixed_precision="{precision_name}" is not supported with the strategy '
            f"{strategy.name!r}{_backend_text(fp8)}, which trains in "
            f"{', '.join(strategy.precisions)}. {own_reason or _FAILS_EARLY} "
            'Give "bf16" or "no".'
        )
    if fp8.row is not None:
        recipe_mistakes = [
            *fp8_mistakes(asked.fp8, fp8.row, found.compute_capability, world_size=found.world_size)
        ]
        if recipe_mistakes:
            raise ConfigError(*recipe_mistakes)
        yield from fp8_warnings(asked.fp8, fp8.row, device, found.compute_capability)
    yield from precision_warnings(precision_choice, device, gpus)


_FAILS_EARLY = "Training would fail in its first step."


def _backend_text(fp8: Fp8Choice) -> str:
    return f" by the backend {fp8.row.name!r}" if fp8.row is not None else ""
