"""In which number format to train, as the hardware allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nbaccel.capabilities import precision_row
from nbaccel.deepspeed.facts import made_in
from nbaccel.errors import ConfigError
from nbaccel.plan.inventory import Gpu

__all__ = ["Precision", "choose_precision"]

_KNOWN = ("auto", "fp32", "bf16", "fp16")
_NAMES = {"no": "fp32", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """What was chosen.

    Attributes:
        name: ``fp32``, ``bf16`` or ``fp16``.
        reason: Why, in one clause.
        warning: What may disappoint; empty for nothing.
    """

    name: str
    reason: str
    warning: str = ""


def choose_precision(
    asked: str, *, config: Mapping[str, Any], model: Any, gpus: Sequence[Gpu]
) -> Precision:
    """Choose the number format of the forward and backward pass.

    Args:
        asked: ``auto``, or the format that is wanted.
        config: A DeepSpeed configuration; a format that it turns on is taken.
        model: The model: what it was trained in before matters for fp16.
        gpus: Those that will be used; none means the CPU.

    Returns:
        The choice.

    Raises:
        ConfigError: There is no such format, or the configuration says another one.
    """
    wanted = _NAMES.get(asked, asked)
    if wanted not in _KNOWN:
        raise ConfigError(
            f"precision={asked!r} is none that DeepSpeed trains in: got {asked!r}. "
            f"Give one of {', '.join(_KNOWN)}."
        )
    written = next((name for name in ("bf16", "fp16") if _enabled(config, name)), None)
    if written is not None and wanted not in ("auto", written):
        raise ConfigError(
            f"precision={asked!r} and {written}.enabled=true in the configuration are two "
            "formats, and one would silently beat the other. Leave one of them out."
        )
    chosen = Precision(name=wanted, reason="asked for")
    if written is not None:
        chosen = Precision(name=written, reason="by the configuration")
    elif wanted == "auto":
        chosen = _by_gpus(gpus) if gpus else _by_cpu(model)
    return _warned(chosen, model)


def _by_gpus(gpus: Sequence[Gpu]) -> Precision:
    row = precision_row("bf16")
    weak = [gpu for gpu in gpus if gpu.compute_capability < row.imitated_below]
    if not weak:
        return Precision(name="bf16", reason=f"{gpus[0].name} computes in it")
    return Precision(name="fp16", reason=f"{weak[0].name} only imitates bf16")


def _by_cpu(model: Any) -> Precision:
    if any(p.is_floating_point() and p.element_size() == 2 for p in model.parameters()):
        return Precision(name="bf16", reason="the model is in 16 bit, and CPUs train in no fp16")
    if _cpu_has_bf16():
        return Precision(name="bf16", reason="this CPU has instructions for it")
    return Precision(name="fp32", reason="this CPU has no instructions for bf16")


def _cpu_has_bf16() -> bool:
    import torch.cpu

    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in checks)


def _warned(chosen: Precision, model: Any) -> Precision:
    before = made_in(model)
    if chosen.name != "fp16" or before != "bfloat16":
        return chosen
    warning = (
        f"The model was trained in {before} and will be trained in fp16, whose largest "
        "number is 65504: losses may become NaN. Where they do, train in fp32, or on a GPU of "
        "compute capability 8.0 or newer in bf16."
    )
    return Precision(name=chosen.name, reason=chosen.reason, warning=warning)


def _enabled(config: Mapping[str, Any], name: str) -> bool:
    section = config.get(name)
    return isinstance(section, Mapping) and section.get("enabled") is True
