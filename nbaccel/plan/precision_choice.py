"""What computes in a precision, in 8 bits above all, and whether it fits the device.

Both plans ask here: that of a launch, before a process starts, and that of an `Accelerator`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from nbaccel.config import Fp8Config
from nbaccel.config.capabilities import (
    FP8_RECIPE_CAPABILITIES,
    DeviceRow,
    Fp8Choice,
    Fp8Row,
    PrecisionRow,
    StrategyRow,
    computes_in,
    fp8_backend,
)
from nbaccel.plan.launch_plan import Choice

HISTORY_SETTINGS = ("interval", "amax_history_len", "amax_compute_algo")
"""Settings of ``Fp8Config`` that delayed scaling alone reads."""


def precision_mistakes(
    precision: PrecisionRow,
    fp8: Fp8Choice,
    device: DeviceRow,
    gpus: Mapping[str, tuple[int, int]],
) -> Iterator[str]:
    """Why a device does not train in a precision; `gpus` are compute capabilities by name."""
    name = precision.name
    row = fp8.row or precision
    old_gpus = {
        gpu: capability for gpu, capability in gpus.items() if capability < row.refused_below
    }
    if fp8.problem:
        yield (
            f'mixed_precision="{name}" is not available here: {fp8.problem}. '
            "Training would fail before its first step. Install it, give fp8 another backend, or "
            'give "bf16".'
        )
    elif not row.path:
        yield (
            f'mixed_precision="{name}" is not supported in this version, which computes nothing in '
            'it. Training would silently go on in float32. Give "bf16" or "no".'
        )
    elif device.precisions and not computes_in(device, row):
        reason = dict(device.refused).get(name, f"it needs {row.needs}")
        remedy = f'"{device.precisions[-1]}" or "no", or another device'
        if fp8.row is not None:
            remedy = f'fp8={{"backend": "native"}}, which emulates it, or {remedy}'
        yield (
            f'mixed_precision="{name}" is not supported on {device.name}: {reason}. Training would '
            f"fail in its first step. Give {remedy}."
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
    imitating = {
        g: capability for g, capability in gpus.items() if capability < precision.imitated_below
    }
    if imitating:
        yield (
            f'mixed_precision="{precision.name}" is only imitated by {_described(imitating)}: it '
            'saves no time. "fp16" is fast there.'
        )


def _described(gpus: Mapping[str, tuple[int, int]]) -> str:
    return ", ".join(f"{name} of {_dotted(capability)}" for name, capability in gpus.items())


def choose_fp8(
    fp8: Fp8Config | None, device: DeviceRow, compute_capability: tuple[int, int] | None
) -> Fp8Choice:
    """The library that computes."""
    return fp8_backend("" if fp8 is None else fp8.backend, device, compute_capability)


def recipe_of(fp8: Fp8Config, row: Fp8Row) -> str:
    """The way to find scales: the one asked for, or the library's default; empty: it has none."""
    return fp8.recipe if fp8.recipe != "auto" else next(iter(row.recipes), "")


def fp8_choices(fp8: Fp8Config | None, choice: Fp8Choice) -> Iterator[Choice]:
    """What the plan says of it."""
    if choice.row is None:
        return
    settings = fp8 or Fp8Config()
    yield Choice("fp8.backend", choice.row.name, choice.reason)
    if recipe := recipe_of(settings, choice.row):
        reason = "the backend's default" if settings.recipe == "auto" else "asked for"
        yield Choice("fp8.recipe", recipe, reason)
    if "opt_level" in choice.row.settings:
        yield Choice("fp8.opt_level", settings.opt_level, _LEVELS[settings.opt_level])


_LEVELS = {
    "O1": "weights in scaled FP16, their gradients in FP8: 11 bytes per parameter with AdamW",
    "O2": "also moments in FP8 and FP16: 6 bytes per parameter with AdamW",
    "O3": "weights in FP8, moments and masters divided over the processes",
}


def fp8_mistakes(
    fp8: Fp8Config | None,
    row: Fp8Row,
    compute_capability: tuple[int, int] | None,
    *,
    world_size: int,
) -> Iterator[str]:
    """What a library cannot do, as messages."""
    settings = fp8 or Fp8Config()
    recipe = recipe_of(settings, row)
    if row.recipes and recipe not in row.recipes:
        yield (
            f"fp8.recipe={recipe!r} is not one that {row.name} has: scales would be found in "
            f"another way. Give one of {', '.join(row.recipes)}, or another backend."
        )
    elif not _gpu_has(recipe, compute_capability):
        lowest, above = FP8_RECIPE_CAPABILITIES[recipe]
        bound = f" and below {_dotted(above)}" if above < (99, 0) else ""
        yield (
            f"fp8.recipe={recipe!r} needs a GPU of compute capability {_dotted(lowest)} or newer"
            f"{bound}; this one has {_dotted(compute_capability or (0, 0))}. Its first product "
            f'would fail. Give recipe="{row.recipes[0]}".'
        )
    if settings.fp8_format == "E5M2" and "fp8_format" in row.settings:
        yield (
            "fp8.fp8_format='E5M2' has two bits of mantissa for inputs and weights: models do not "
            "train in it, and TransformerEngine refuses it. Give HYBRID, which keeps E5M2 for "
            "gradients, or E4M3."
        )
    if settings.opt_level == "O3" and "opt_level" in row.settings and world_size == 1:
        yield (
            "fp8.opt_level='O3' divides the optimizer's state over several processes, as ZeRO "
            'does, and this is one process. Give opt_level="O2", or num_processes=2 or more.'
        )


def fp8_warnings(
    fp8: Fp8Config | None,
    row: Fp8Row,
    device: DeviceRow,
    compute_capability: tuple[int, int] | None,
) -> Iterator[str]:
    """What works but may not do what is expected."""
    settings = fp8 or Fp8Config()
    for field_name, field_info in Fp8Config.model_fields.items():
        value = getattr(settings, field_name)
        is_read = field_name == "backend" or field_name in row.settings
        if not is_read and value != field_info.default:
            yield f"fp8.{field_name}={value!r} has no effect: {row.name} does not read it."
    if "delayed" in row.recipes and recipe_of(settings, row) != "delayed":
        for field_name in HISTORY_SETTINGS:
            value = getattr(settings, field_name)
            if value != Fp8Config.model_fields[field_name].default:
                yield (
                    f"fp8.{field_name}={value!r} has no effect with "
                    f"recipe={recipe_of(settings, row)!r}: only delayed scaling has a history."
                )
    if is_emulated(row, compute_capability):
        yield (
            f"fp8 is emulated on {device.name}, which has no 8-bit products: training computes "
            'what it would on a newer GPU, more slowly than in "bf16".'
        )


def is_emulated(row: Fp8Row, compute_capability: tuple[int, int] | None) -> bool:
    """Whether products are computed in another format on a device."""
    return (compute_capability or (0, 0)) < row.emulated_below


def refused_strategy(fp8: Fp8Config | None, row: Fp8Row, strategy: StrategyRow) -> str:
    """Why a strategy does not train with a library, as a sentence; empty where no more is known."""
    if strategy.name in row.strategies or "opt_level" not in row.settings:
        return ""
    level = (fp8 or Fp8Config()).opt_level
    return (
        f"MS-AMP's level {level} keeps each weight under a scale of its own, and {strategy.name} "
        "cuts weights into flat pieces. O3 without it divides the optimizer's state over the "
        "processes by itself."
    )


def _gpu_has(recipe: str, compute_capability: tuple[int, int] | None) -> bool:
    if compute_capability is None or recipe not in FP8_RECIPE_CAPABILITIES:
        return True
    lowest, above = FP8_RECIPE_CAPABILITIES[recipe]
    # A GPU without FP8 emulates, which any recipe allows.
    return lowest <= compute_capability < above or compute_capability < (8, 9)


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
