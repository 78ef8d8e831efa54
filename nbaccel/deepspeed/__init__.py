"""DeepSpeed: configuration, ZeRO, advisor.

Its names are imported when they are first used: neither torch nor DeepSpeed is looked at before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbaccel.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from nbaccel.deepspeed.auto_values import Resolved, resolve_auto
    from nbaccel.deepspeed.checking import Checked, check_config
    from nbaccel.deepspeed.environment import deepspeed_environment
    from nbaccel.deepspeed.strategy.plugin import DeepSpeedPlugin
    from nbaccel.deepspeed.training_facts import TrainingFacts
    from nbaccel.deepspeed.zero_config import ZeroConfig
    from nbaccel.deepspeed.zero_memory import estimate_memory

__all__ = [
    "Checked",
    "DeepSpeedPlugin",
    "Resolved",
    "TrainingFacts",
    "ZeroConfig",
    "check_config",
    "deepspeed_environment",
    "estimate_memory",
    "resolve_auto",
]

__getattr__ = lazy_names(
    __name__,
    {
        "Checked": "nbaccel.deepspeed.checking",
        "DeepSpeedPlugin": "nbaccel.deepspeed.strategy.plugin",
        "Resolved": "nbaccel.deepspeed.auto_values",
        "TrainingFacts": "nbaccel.deepspeed.training_facts",
        "ZeroConfig": "nbaccel.deepspeed.zero_config",
        "check_config": "nbaccel.deepspeed.checking",
        "deepspeed_environment": "nbaccel.deepspeed.environment",
        "estimate_memory": "nbaccel.deepspeed.zero_memory",
        "resolve_auto": "nbaccel.deepspeed.auto_values",
    },
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
