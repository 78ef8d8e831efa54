"""What a backend of another package implements, as such packages import it.

`nbaccel.abc.device` and its siblings are importable, too: the modules of `nbaccel.plan.contracts`.
"""

import sys

from nbaccel.plan.contracts import (
    asking,
    bundle,
    device,
    host_engine,
    place,
    precision,
    shards,
    standins,
    strategy,
)
from nbaccel.plan.contracts.bundle import Bundle
from nbaccel.plan.contracts.device import Device
from nbaccel.plan.contracts.host_engine import Engine
from nbaccel.plan.contracts.place import Place
from nbaccel.plan.contracts.precision import Precision, PrecisionSettings
from nbaccel.plan.contracts.shards import ShardReader
from nbaccel.plan.contracts.strategy import ShardedCheckpoints, Strategy

__all__ = [
    "Bundle",
    "Device",
    "Engine",
    "Place",
    "Precision",
    "PrecisionSettings",
    "ShardReader",
    "ShardedCheckpoints",
    "Strategy",
]

# The same module objects, so that a class has one identity whichever way it was imported.
for _module in (asking, bundle, device, place, precision, shards, standins, strategy):
    sys.modules[f"{__name__}.{_module.__name__.rpartition('.')[2]}"] = _module
sys.modules[f"{__name__}.engine"] = host_engine
