"""Functions that training code uses besides an `Accelerator`, under the names Accelerate has.

The collectives here work on the process group of this process, with or without an `Accelerator`.
Names of parts that are still to come can be imported and say so when they are used.
"""

from __future__ import annotations

import sys
from types import ModuleType

from nbaccel.base.public_names import missing_names_of
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

# Star imports hand on what they name. Not assigned to `__all__`, see `nbaccel.base.public_names`.
_names: list[str] = []
for _name in [name for name in sys.modules if name.startswith(f"{__name__}.")]:
    _names += vars(sys.modules[_name])["__all__"]

# Modules of which nothing is here: their names alone.
for _name in ("bnb", "megatron_lm", "torch_xla"):
    _absent = ModuleType(f"{__name__}.{_name}", "Names of a part that is still to come.")
    _missing = missing_names_of(_absent.__name__)
    vars(_absent).update(_missing, __all__=list(_missing))
    sys.modules[_absent.__name__] = _absent
    globals().update(_missing, **{_name: _absent})
    _names += _missing
globals()["__all__"] = _names
