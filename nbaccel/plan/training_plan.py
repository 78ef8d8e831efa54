"""``TrainingPlan``: what an `Accelerator` will do, and why; first the rules of precisions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from nbaccel.base.errors import ConfigError
from nbaccel.config import Fp8Config, capabilities as rows
from nbaccel.config.capability_rows import DeviceRow, Fp8Choice, Fp8Row, PrecisionRow, StrategyRow
from nbaccel.config.text_forms import changed_settings
from nbaccel.plan.contracts.training import Source, TrainingRequest, Wanted
from nbaccel.plan.launch_plan import Choice, choices_table

HISTORY_SETTINGS = ("interval", "amax_history_len", "amax_compute_algo")
"""Settings of ``Fp8Config`` that delayed scaling alone reads."""


def precision_mistakes(
    precision: PrecisionRow, fp8: Fp8Choice, device: DeviceRow, gpus: Mapping[str, tuple[int, int]]
) -> Iterator[str]:
    """Why a device does not train in a precision; `gpus` are compute capabilities by name."""
    name = precision.name
    row = fp8.row or precision
    old_gpus = {gpu: version for gpu, version in gpus.items() if version < row.refused_below}
    if fp8.problem:
        yield (
            f'mixed_precision="{name}" is not available here: {fp8.problem}. Training would fail '
            'before its first step. Install it, give fp8 another backend, or give "bf16".'
        )
    elif not rows.computes_in(device, row):
        reason = dict(device.refused).get(name, f"it needs {row.needs}")
        best = "".join(f'"{trained}" or ' for trained in device.precisions[-1:])
        remedy = 'fp8={"backend": "native"}, which emulates it, or ' if fp8.row else ""
        yield (
            f'mixed_precision="{name}" is not supported on {device.name}: {reason}. Give {remedy}'
            f'{best}"no", or another device.'
        )
    elif old_gpus:
        emulation = '"native" as fp8 backend, which emulates it, ' if fp8.row else ""
        yield (
            f'mixed_precision="{name}" needs {row.needs}: got {_described(old_gpus)}. '
            f'Training would fail in its first step. Give {emulation}"bf16", "fp16" or "no".'
        )


def precision_warnings(
    precision: PrecisionRow, device: DeviceRow, gpus: Mapping[str, tuple[int, int]]
) -> Iterator[str]:
    """What makes a precision that works slow."""
    if reason := dict(device.slow).get(precision.name):
        yield (
            f'mixed_precision="{precision.name}" on {device.name} is slow: {reason}. '
            '"bf16" is faster there, "no" is exact.'
        )
    imitators = {g: version for g, version in gpus.items() if version < precision.imitated_below}
    if imitators:
        yield (
            f'mixed_precision="{precision.name}" is only imitated by {_described(imitators)}. Use '
            '"fp16".'
        )


def _described(gpus: Mapping[str, tuple[int, int]]) -> str:
    return ", ".join(f"{name} of {_dotted(capability)}" for name, capability in gpus.items())


def recipe_of(fp8: Fp8Config, row: Fp8Row) -> str:
    """The way to find scales: the one asked for, or the library's default; empty: it has none."""
    return fp8.recipe if fp8.recipe != "auto" else next(iter(row.recipes), "")


def fp8_choices(settings: Fp8Config, choice: Fp8Choice) -> Iterator[Choice]:
    """What the plan says of it."""
    if choice.row is None:
        return
    yield Choice("fp8.backend", choice.row.name, choice.reason)
    if recipe := recipe_of(settings, choice.row):
        reason = "the backend's default" if settings.recipe == "auto" else "asked for"
        yield Choice("fp8.recipe", recipe, reason)
    if "opt_level" in choice.row.settings:
        yield Choice("fp8.opt_level", settings.opt_level, _LEVELS[settings.opt_level])


_LEVELS = {
    "O1": "weights in scaled FP16, their gradients in FP8: 11 bytes per parameter with AdamW",
    "O2": "also moments in FP8 and FP16: 6 bytes per parameter with AdamW",
}


def fp8_mistakes(
    settings: Fp8Config, row: Fp8Row, capability: tuple[int, int] | None
) -> Iterator[str]:
    """What a library cannot do, as messages."""
    recipe = recipe_of(settings, row)
    lowest, above = rows.FP8_RECIPE_CAPABILITIES.get(recipe, ((0, 0), (99, 0)))
    if row.recipes and recipe not in row.recipes:
        yield (
            f"fp8.recipe={recipe!r} is not one that {row.name} has: scales would be found in "
            f"another way. Give one of {', '.join(row.recipes)}, or another backend."
        )
    # A GPU without FP8 emulates, which any recipe allows.
    elif capability is not None and not (lowest <= capability < above or capability < (8, 9)):
        bound = f" and below {_dotted(above)}" if above < (99, 0) else ""
        yield (
            f"fp8.recipe={recipe!r} needs a GPU of compute capability {_dotted(lowest)} or "
            f'newer{bound}; this one has {_dotted(capability)}. Give recipe="{row.recipes[0]}".'
        )
    if settings.fp8_format == "E5M2" and "fp8_format" in row.settings:
        yield (
            "fp8.fp8_format='E5M2' has two bits of mantissa for inputs and weights, in which "
            "models do not train. Give HYBRID, which keeps E5M2 for gradients, or E4M3."
        )


def fp8_warnings(
    settings: Fp8Config, row: Fp8Row, device: DeviceRow, compute_capability: tuple[int, int] | None
) -> Iterator[str]:
    """What works but may not do what is expected."""
    recipe = recipe_of(settings, row)
    has_no_history = "delayed" in row.recipes and recipe != "delayed"
    for name, value in changed_settings(settings).items():
        if name not in ("backend", *row.settings):
            yield f"fp8.{name}={value!r} has no effect: {row.name} does not read it."
        if has_no_history and name in HISTORY_SETTINGS:
            yield f"fp8.{name}={value!r} has no effect with recipe={recipe!r}: it has no history."
    if is_emulated(row, compute_capability):
        yield (
            f"fp8 is emulated on {device.name}, which has no 8-bit products: training computes "
            'what it would on a newer GPU, more slowly than in "bf16".'
        )


def is_emulated(row: Fp8Row, compute_capability: tuple[int, int] | None) -> bool:
    """Whether products are computed in another format on a device."""
    return (compute_capability or (0, 0)) < row.emulated_below


def unfit_precision(
    what: str, strategy: StrategyRow, precision: PrecisionRow, choice: Fp8Choice, level: str
) -> str:
    """Why a strategy does not train in a precision; empty where it does."""
    if rows.strategy_fits(strategy, choice.row or precision):
        return ""
    backend = f" (backend {choice.row.name!r})" if choice.row else ""
    reason = f"{strategy.name} trains in {', '.join(strategy.precisions)} alone"
    if choice.row is not None and "opt_level" in choice.row.settings:
        reason = (
            f"MS-AMP's level {level} scales each weight, and {strategy.name} cuts weights into "
            "flat pieces"
        )
    return (
        f"{what} is not supported with mixed_precision={precision.name!r}{backend}: {reason}. Use "
        "'bf16', or leave one of them out."
    )


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessFacts:
    """Facts about this process."""

    device: str  # the row of its device: ``cpu`` or ``cuda``, for example
    device_name: str  # the device as torch writes it
    world_size: int = 1  # processes in total
    rank: int = 0  # number of this one
    backend: str = ""  # process group backend; empty where there is no group
    # Whether there is a process group, or a launcher to make one from.
    can_join: bool = True
    compute_capability: tuple[int, int] | None = None  # of the GPU, if it is one


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
    choices: tuple[Choice, ...] = ()
    warnings: tuple[str, ...] = ()

    def headline(self) -> str:
        """The plan in one line."""
        row = rows.strategy_row(self.strategy)
        text = "float32" if self.mixed_precision == "no" else self.mixed_precision
        parts = [row.headline or row.name, f"on {self.device.upper()}", text]
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
    strategy = rows.strategy_row(str(strategy_choice.value))
    fp8_choice = _fp8_choice(asked, found)
    count_reason = f"from the process group ({found.backend}); this is process {found.rank}"
    if found.world_size == 1:
        count_reason = "started without a launcher, or with one worker"
    batches_reason = f"each process gets whole batches: {found.world_size} x batch_size per step"
    if asked.split_batches:
        batches_reason = "each process gets its slice of every batch"
    all_choices = (
        Choice("device", found.device_name, _device_reason(asked, found)),
        Choice("num_processes", found.world_size, count_reason),
        strategy_choice,
        Choice("mixed_precision", asked.mixed_precision, _precision_reason(asked)),
        *fp8_choices(asked.fp8 or Fp8Config(), fp8_choice),
        Choice(
            "gradient_accumulation_steps",
            asked.accumulation_steps,
            _source_text(asked.accumulation_source, "every batch is a step, as nothing was asked"),
        ),
        Choice("batches", "split" if asked.split_batches else "whole", batches_reason),
    )
    return TrainingPlan(
        device=found.device,
        strategy=strategy.name,
        mixed_precision=asked.mixed_precision,
        accumulation_steps=asked.accumulation_steps,
        num_processes=found.world_size,
        choices=all_choices,
        warnings=(
            *_judge_precision(asked, found, strategy, fp8_choice),
            *_effect_warnings(asked.strategy, found),
        ),
    )


def _strategy_choice(strategy: Wanted | None, found: ProcessFacts) -> Choice:
    if strategy is not None and _takes_effect(strategy, found):
        row = rows.strategy_row(strategy.strategy)
        if problem := unfit_count(row, strategy.what, found.world_size):
            raise ConfigError(problem)
        return Choice("strategy", row.name, strategy.reason)
    word = "one" if found.world_size == 1 else "several"
    device = rows.device_row(found.device)
    defaults = (row for row in rows.STRATEGIES if row.is_default and row.processes == word)
    row = next(row for row in defaults if rows.strategy_fits(row, device))
    return Choice("strategy", row.name, row.default_reason.format(world_size=found.world_size))


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
    return found.can_join or not rows.strategy_row(strategy.strategy).needs_group


def _effect_warnings(strategy: Wanted | None, found: ProcessFacts) -> Iterator[str]:
    if strategy is not None and not _takes_effect(strategy, found):
        yield (
            f"{strategy.what} has no effect: this process was started without a launcher, so "
            "models are trained whole. Use notebook_launcher or torchrun to shard them."
        )


def _device_reason(asked: TrainingRequest, found: ProcessFacts) -> str:
    device = rows.device_row(found.device)
    if asked.device == device.name:
        return f"the {device.noun} was asked for"
    if device == rows.DEVICES[0]:
        return "no GPU was found"
    # Without a word of what it is: a dry run of torch_xla has a device and no chip.
    return f"this process computes on {found.device_name}"


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
    if asked.mixed_precision not in (row.name for row in rows.PRECISIONS if row.has_backends):
        return Fp8Choice()
    backend = "auto" if asked.fp8 is None else asked.fp8.backend
    return rows.fp8_backend(backend, rows.device_row(found.device), found.compute_capability)


def _judge_precision(
    asked: TrainingRequest, found: ProcessFacts, strategy: StrategyRow, fp8: Fp8Choice
) -> Iterator[str]:
    rows_by_name = {row.name: row for row in rows.PRECISIONS}
    if asked.mixed_precision not in rows_by_name:
        raise ConfigError(
            f"mixed_precision={asked.mixed_precision!r} is unknown: nothing says in which format "
            f"to compute. Give one of {', '.join(rows_by_name)}."
        )
    device = rows.device_row(found.device)
    precision = rows_by_name[asked.mixed_precision]
    capability = found.compute_capability
    gpus = {f"this GPU ({found.device_name})": capability} if capability else {}
    if mistakes := tuple(precision_mistakes(precision, fp8, device, gpus)):
        raise ConfigError(*mistakes)
    settings = asked.fp8 or Fp8Config()
    what = f'strategy="{strategy.name}"'
    if problem := unfit_precision(what, strategy, precision, fp8, settings.opt_level):
        raise ConfigError(problem)
    if fp8.row is not None:
        if wrong := [*fp8_mistakes(settings, fp8.row, capability)]:
            raise ConfigError(*wrong)
        yield from fp8_warnings(settings, fp8.row, device, capability)
    yield from precision_warnings(precision, device, gpus)
