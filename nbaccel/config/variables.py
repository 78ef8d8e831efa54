"""The environment variables by which a worker's training code learns what was asked for.

They are Accelerate's, so that its `Accelerator`, the `Trainer` of transformers and nbaccel's own
read the same. A worker's place among the others is `Topology`'s.
"""

from __future__ import annotations

import base64
import json

from nbaccel.config.engine import engine_config
from nbaccel.config.run import RunConfig

__all__ = ["ACTIVATION_CHECKPOINTING", "run_variables"]

ACTIVATION_CHECKPOINTING = "NBACCEL_ACTIVATION_CHECKPOINTING"
"""Accelerate has a variable for it with FSDP only."""


def run_variables(run: RunConfig) -> dict[str, str]:
    """What a run says of training, beside the precision.

    Args:
        run: What the user said.

    Returns:
        Names and values; nothing where nothing was said.
    """
    found: dict[str, str] = {}
    if run.gradient_accumulation_steps is not None:
        found["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = str(run.gradient_accumulation_steps)
    if run.activation_checkpointing:
        found[ACTIVATION_CHECKPOINTING] = "1"
    if run.mixed_precision == "fp8" and run.fp8 is not None:
        found |= run.fp8.variables()
    if run.uses_deepspeed:
        found["ACCELERATE_USE_DEEPSPEED"] = "true"
        found["ACCELERATE_DEEPSPEED_ZERO_STAGE"] = str(run.zero_stage or 0)
    if run.deepspeed is not None:
        # As text, not as a file: it can be lost by nobody, and needs no folder that all can read.
        text = json.dumps(engine_config(run))
        encoded = base64.urlsafe_b64encode(text.encode()).decode()
        found["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = encoded
    return found
