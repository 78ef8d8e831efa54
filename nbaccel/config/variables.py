"""The environment variables by which a worker's training code learns what was asked for.

They are Accelerate's, so that its `Accelerator`, the `Trainer` of transformers and nbaccel's own
read the same. A worker's place among the others is `Topology`'s.
"""

from __future__ import annotations

import base64
import json

from nbaccel.capabilities import precision_row, strategy_row
from nbaccel.config.engine import engine_config
from nbaccel.config.run_config import RunConfig

__all__ = ["ACTIVATION_CHECKPOINTING", "STRATEGY_VARIABLE", "run_variables"]

ACTIVATION_CHECKPOINTING = "NBACCEL_ACTIVATION_CHECKPOINTING"
"""Accelerate has a variable for it with FSDP only."""
STRATEGY_VARIABLE = "NBACCEL_STRATEGY"
"""It has the name in ``RunConfig.strategy``, unless that is ``auto``."""


def run_variables(run_config: RunConfig) -> dict[str, str]:
    """What a run says of training, beside the precision.

    Args:
        run_config: What the user said.

    Returns:
        Names and values; nothing where nothing was said.
    """
    launch_variables: dict[str, str] = {}
    if run_config.gradient_accumulation_steps is not None:
        launch_variables["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = str(
            run_config.gradient_accumulation_steps
        )
    if run_config.activation_checkpointing:
        launch_variables[ACTIVATION_CHECKPOINTING] = "1"
    if run_config.strategy != "auto":
        launch_variables |= {
            STRATEGY_VARIABLE: run_config.strategy,
            **dict(strategy_row(run_config.strategy).variables),
        }
    if run_config.fp8 is not None and precision_row(run_config.mixed_precision).has_backends:
        launch_variables |= run_config.fp8.variables()
    if run_config.uses_deepspeed:
        launch_variables["ACCELERATE_USE_DEEPSPEED"] = "true"
        launch_variables["ACCELERATE_DEEPSPEED_ZERO_STAGE"] = str(run_config.zero_stage or 0)
    if run_config.deepspeed is not None:
        # As text, not as a file: it can be lost by nobody, and needs no folder that all can read.
        config_json = json.dumps(engine_config(run_config))
        encoded_config = base64.urlsafe_b64encode(config_json.encode()).decode()
        launch_variables["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = encoded_config
    return launch_variables
