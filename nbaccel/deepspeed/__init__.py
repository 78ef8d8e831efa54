"""DeepSpeed: configuration, ZeRO, advisor.

Its names are imported when they are first used: neither torch nor DeepSpeed is looked at before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbaccel.base.public_names import lazy_names, names_handed_on

if TYPE_CHECKING:
    from nbaccel.deepspeed.auto_values import (
        Resolved as Resolved,
        TrainingFacts as TrainingFacts,
        resolve_auto as resolve_auto,
    )
    from nbaccel.deepspeed.checking import Checked as Checked, check_config as check_config
    from nbaccel.deepspeed.environment import deepspeed_environment as deepspeed_environment
    from nbaccel.deepspeed.plugin import DeepSpeedPlugin as DeepSpeedPlugin
    from nbaccel.deepspeed.zero_config import ZeroConfig as ZeroConfig
    from nbaccel.deepspeed.zero_memory import estimate_memory as estimate_memory

_HOMES = names_handed_on(__file__)
__all__ = list(_HOMES)
__getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
