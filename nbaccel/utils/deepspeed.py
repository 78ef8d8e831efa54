"""What code for DeepSpeed imports beside its plugin."""

from __future__ import annotations

from typing import Any

from nbaccel._later import DEEPSPEED_INTERNALS, later
from nbaccel.abc.standins import DummyOptim, DummyScheduler
from nbaccel.deepspeed.strategy.plugin import DeepSpeedPlugin
from nbaccel.errors import ConfigError

__all__ = [
    "DeepSpeedEngineWrapper",
    "DeepSpeedOptimizerWrapper",
    "DeepSpeedPlugin",
    "DeepSpeedSchedulerWrapper",
    "DummyOptim",
    "DummyScheduler",
    "HfDeepSpeedConfig",
    "get_active_deepspeed_plugin",
    "map_pytorch_optim_to_deepspeed",
]

DeepSpeedEngineWrapper = later("DeepSpeedEngineWrapper", DEEPSPEED_INTERNALS, __name__)
DeepSpeedOptimizerWrapper = later("DeepSpeedOptimizerWrapper", DEEPSPEED_INTERNALS, __name__)
DeepSpeedSchedulerWrapper = later("DeepSpeedSchedulerWrapper", DEEPSPEED_INTERNALS, __name__)
HfDeepSpeedConfig = later("HfDeepSpeedConfig", DEEPSPEED_INTERNALS, __name__)
map_pytorch_optim_to_deepspeed = later(
    "map_pytorch_optim_to_deepspeed", DEEPSPEED_INTERNALS, __name__
)


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
