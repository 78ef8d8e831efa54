"""The environment variables from which a worker's training code reads the run's settings.

They are Accelerate's, so that its `Accelerator`, the `Trainer` of transformers and nbaccel's
`Accelerator` read the same. The variables of a worker's place are in `Topology`.
"""

from __future__ import annotations

import base64
import json

from nbaccel.config.capabilities import precision_row, strategy_row
from nbaccel.config.deepspeed_document import engine_config
from nbaccel.config.plugin_settings import dynamo_variables, fsdp_variables
from nbaccel.config.run_config import RunConfig

ACTIVATION_CHECKPOINTING = "NBACCEL_ACTIVATION_CHECKPOINTING"
"""Accelerate has a variable for it with FSDP only."""
FOLDER_VARIABLE = "NBACCEL_RESUME"
"""The folder in which a stopped launch keeps what the next one goes on with."""
MOST_STEPS_VARIABLE = "NBACCEL_MOST_STEPS"
"""After how many steps a launch ends that only measures its speed."""
STRATEGY_VARIABLE = "NBACCEL_STRATEGY"
"""It has the name in ``RunConfig.strategy``, unless that is ``auto``."""


def run_variables(run_config: RunConfig) -> dict[str, str]:
    """The variables of a run's settings for training, without the precision."""
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
        # As text, not as a file, which might be removed, and needs a folder that all nodes can
        # read.
        config_json = json.dumps(engine_config(run_config))
        encoded_config = base64.urlsafe_b64encode(config_json.encode()).decode()
        launch_variables["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = encoded_config
    if run_config.fsdp is not None:
        launch_variables |= fsdp_variables(run_config.fsdp)
    if run_config.dynamo is not None:
        launch_variables |= dynamo_variables(run_config.dynamo)
    # Last: who names a variable means that one.
    return launch_variables | (run_config.variables or {})
