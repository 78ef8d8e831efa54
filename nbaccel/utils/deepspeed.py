"""What code for DeepSpeed imports besides its plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbaccel.base.errors import ConfigError
from nbaccel.base.unsupported_names import DEEPSPEED_INTERNALS, missing_name_of
from nbaccel.plan import registry
from nbaccel.plan.contracts.training import DummyOptim, DummyScheduler

if TYPE_CHECKING:
    from nbaccel.deepspeed.strategy.plugin import DeepSpeedPlugin
else:
    DeepSpeedPlugin = registry.plugin_class("DeepSpeedPlugin")

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

DeepSpeedEngineWrapper = missing_name_of("DeepSpeedEngineWrapper", DEEPSPEED_INTERNALS, __name__)
DeepSpeedOptimizerWrapper = missing_name_of(
    "DeepSpeedOptimizerWrapper", DEEPSPEED_INTERNALS, __name__
)
DeepSpeedSchedulerWrapper = missing_name_of(
    "DeepSpeedSchedulerWrapper", DEEPSPEED_INTERNALS, __name__
)
HfDeepSpeedConfig = missing_name_of("HfDeepSpeedConfig", DEEPSPEED_INTERNALS, __name__)
map_pytorch_optim_to_deepspeed = missing_name_of(
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
