"""The user's settings, and what may combine; names are imported when they are first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbaccel.base.public_names import lazy_names, names_handed_on

if TYPE_CHECKING:
    from nbaccel.config.config_files import (
        LoadedConfig as LoadedConfig,
        default_config_path as default_config_path,
        load_config_file as load_config_file,
    )
    from nbaccel.config.fp8 import Fp8Config as Fp8Config
    from nbaccel.config.run_config import (
        Configured as Configured,
        RunConfig as RunConfig,
        run_config_of as run_config_of,
    )

_HOMES = names_handed_on(__file__)
__all__ = list(_HOMES)
__getattr__ = lazy_names(__name__, _HOMES)
