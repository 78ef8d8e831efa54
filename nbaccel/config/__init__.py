"""The user's settings, and what may combine."""

from __future__ import annotations

from nbaccel.config.accelerate_yaml import AccelerateFile, read_accelerate_yaml
from nbaccel.config.config_files import LoadedConfig, default_config_path, load_config_file
from nbaccel.config.fp8 import Fp8Config
from nbaccel.config.run_config import Configured, RunConfig, run_config_of

__all__ = [
    "AccelerateFile",
    "Configured",
    "Fp8Config",
    "LoadedConfig",
    "RunConfig",
    "default_config_path",
    "load_config_file",
    "read_accelerate_yaml",
    "run_config_of",
]
