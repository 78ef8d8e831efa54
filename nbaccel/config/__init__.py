"""The description of a run: the user's settings."""

from __future__ import annotations

from nbaccel.config.fp8 import Fp8Config
from nbaccel.config.run_config import Configured, RunConfig, run_config_of

__all__ = ["Configured", "Fp8Config", "RunConfig", "run_config_of"]
