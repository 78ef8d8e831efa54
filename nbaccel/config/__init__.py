"""The user's settings, and what may combine.

Its names are imported when they are first used: what only reads a row of a backend needs no
pydantic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbaccel.base.lazy_names import lazy_names

if TYPE_CHECKING:
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

__getattr__ = lazy_names(
    __name__,
    {
        "AccelerateFile": "nbaccel.config.accelerate_yaml",
        "read_accelerate_yaml": "nbaccel.config.accelerate_yaml",
        "LoadedConfig": "nbaccel.config.config_files",
        "default_config_path": "nbaccel.config.config_files",
        "load_config_file": "nbaccel.config.config_files",
        "Fp8Config": "nbaccel.config.fp8",
        "Configured": "nbaccel.config.run_config",
        "RunConfig": "nbaccel.config.run_config",
        "run_config_of": "nbaccel.config.run_config",
    },
)
