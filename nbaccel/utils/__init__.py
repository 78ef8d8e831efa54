"""Functions that training code uses besides an `Accelerator`, under the names Accelerate has.

The collectives here work on the process group of this process, with or without an `Accelerator`.
Names of parts that are still to come can be imported and say so when they are used.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

from nbaccel.base.unsupported_names import missing_names_of
from nbaccel.utils import (
    ao,
    constants,
    dataclasses,
    deepspeed,
    environment,
    fsdp_utils,
    imports,
    launch,
    memory,
    modeling,
    offload,
    operations,
    other,
    random,
    transformer_engine,
    versions,
)
from nbaccel.utils.ao import *
from nbaccel.utils.constants import *
from nbaccel.utils.dataclasses import *
from nbaccel.utils.deepspeed import *
from nbaccel.utils.environment import *
from nbaccel.utils.fsdp_utils import *
from nbaccel.utils.imports import *
from nbaccel.utils.launch import *
from nbaccel.utils.memory import *
from nbaccel.utils.modeling import *
from nbaccel.utils.offload import *
from nbaccel.utils.operations import *
from nbaccel.utils.other import *
from nbaccel.utils.random import *
from nbaccel.utils.tqdm import tqdm as tqdm
from nbaccel.utils.transformer_engine import *
from nbaccel.utils.versions import *

if not TYPE_CHECKING:  # star imports hand on what they name
    __all__ = ["tqdm"]
    for _module in (
        *(ao, constants, dataclasses, deepspeed, environment, fsdp_utils, imports, launch),
        *(memory, modeling, offload, operations, other, random, transformer_engine, versions),
    ):
        __all__ += _module.__all__

    # Modules of which nothing is here: their names alone.
    for _name in ("bnb", "megatron_lm", "torch_xla"):
        _module = ModuleType(f"{__name__}.{_name}", "Names of a part that is still to come.")
        _missing = missing_names_of(_module.__name__)
        vars(_module).update(_missing, __all__=list(_missing))
        sys.modules[_module.__name__] = _module
        globals().update(_missing, **{_name: _module})
        __all__ += list(_missing)
