"""What code for DeepSpeed imports besides its plugin."""

from __future__ import annotations

from typing import Any

from nbaccel.base.errors import ConfigError
from nbaccel.base.public_names import name_own
from nbaccel.plan.contracts.training import (
    DummyOptim as DummyOptim,
    DummyScheduler as DummyScheduler,
)
from nbaccel.utils.dataclasses import DeepSpeedPlugin as DeepSpeedPlugin


def get_active_deepspeed_plugin(state: Any) -> Any:
    """The plugin that the next `prepare` goes by.

    Args:
        state: ``accelerator.state``.

    Raises:
        ConfigError: The accelerator has none.
    """
    if state.deepspeed_plugin is None:
        raise ConfigError(
            f"get_active_deepspeed_plugin finds none in a run of type {state.distributed_type}: "
            "nothing is sharded by DeepSpeed. Give Accelerator(deepspeed_plugin=...)."
        )
    return state.deepspeed_plugin


name_own(globals(), "DeepSpeedPlugin", "DummyOptim", "DummyScheduler")
