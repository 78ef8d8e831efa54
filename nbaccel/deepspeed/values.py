"""Values of the parameters by which DeepSpeed makes an optimizer and a schedule.

DeepSpeed hands them on as they stand: a learning rate that is text fails in the first step, and one
below zero trains away from the goal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nbaccel.config.mistakes import closest, shown
from nbaccel.deepspeed.kinds import AUTO

__all__ = ["value_mistakes"]


@dataclass(frozen=True)
class _Rule:
    """What a parameter must be.

    Attributes:
        holds: Whether a value is right.
        must: What it must be, after "must be".
        do: The remedy.
    """

    holds: Callable[[Any], bool]
    must: str
    do: str


def _is_number(value: Any) -> bool:
    right = isinstance(value, (int, float)) and not isinstance(value, bool)
    return right and math.isfinite(value)


def _from_zero(value: Any) -> bool:
    return _is_number(value) and value >= 0


def _rates(value: Any) -> bool:
    """One for all parameter groups, or one for each."""
    each = value if isinstance(value, list) else [value]
    return bool(each) and all(map(_from_zero, each))


def _betas(value: Any) -> bool:
    pair = isinstance(value, list) and len(value) == 2
    return pair and all(_is_number(beta) and 0 <= beta < 1 for beta in value)


def _steps(value: Any) -> bool:
    return _is_number(value) and value == int(value) and value > 0


_RATE = _Rule(_rates, "a number of at least 0", "Give for example 3e-5")
_SMALL = _Rule(_from_zero, "a number of at least 0", "Give for example 1e-8")
_DECAY = _Rule(_from_zero, "a number of at least 0", "Give for example 0.01, or leave it out")
_STEPS = _Rule(
    _steps, "a whole number above 0", "Give for example 1000 (1 where there is no warm-up)"
)
_BETAS = _Rule(_betas, "two numbers from 0 to below 1", "Give for example [0.9, 0.999]")
_SHAPES = ("log", "linear")
_SHAPE = _Rule(lambda value: value in _SHAPES, "one of log, linear", "Give one of them")

_RULES: dict[str, dict[str, _Rule]] = {
    "optimizer": {
        "lr": _RATE,
        "betas": _BETAS,
        "eps": _SMALL,
        "weight_decay": _DECAY,
        "momentum": _SMALL,
    },
    "scheduler": {
        "warmup_min_lr": _RATE,
        "warmup_max_lr": _RATE,
        "warmup_num_steps": _STEPS,
        "total_num_steps": _STEPS,
        "warmup_type": _SHAPE,
        "cycle_min_lr": _RATE,
        "cycle_max_lr": _RATE,
        "lr_range_test_min_lr": _RATE,
    },
}


def value_mistakes(section: str, params: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the values of an optimizer's or a schedule's parameters.

    Args:
        section: ``optimizer`` or ``scheduler``.
        params: Its ``params``.

    Yields:
        A message each.
    """
    for name, rule in _RULES[section].items():
        value = params.get(name)
        if value is None or value == AUTO or rule.holds(value):
            continue
        yield (
            f"{section}.params.{name} must be {rule.must}: got {shown(value)}. DeepSpeed hands it "
            f"on as it stands, and training would fail or go astray. {_advice(value, rule)}"
        )


def _advice(value: Any, rule: _Rule) -> str:
    near = closest(value, _SHAPES) if rule is _SHAPE and isinstance(value, str) else ""
    return near.lstrip() or f"{rule.do}."
