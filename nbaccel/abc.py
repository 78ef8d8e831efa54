"""What a backend of another package implements, as such packages import it.

`nbaccel.abc.device` and its siblings are importable, too.
"""

import sys
from types import ModuleType

from nbaccel.base.public_names import hand_on
from nbaccel.plan.contracts import device, host_engine, training
from nbaccel.plan.contracts.device import Device as Device
from nbaccel.plan.contracts.host_engine import Engine as Engine
from nbaccel.plan.contracts.training import (
    Bundle as Bundle,
    ModelShards as ModelShards,
    Place as Place,
    Precision as Precision,
    PrecisionSettings as PrecisionSettings,
    ShardedCheckpoints as ShardedCheckpoints,
    ShardReader as ShardReader,
    Strategy as Strategy,
)

hand_on(globals())

_PARTS = {
    "asking": ("Said", "SaidBySettings", "Source", "Wanted"),
    "bundle": ("Bundle",),
    "place": ("Place",),
    "precision": ("Precision", "PrecisionSettings"),
    "shards": ("Piece", "Remembered", "ShardReader", "remember"),
    "standins": ("DummyOptim", "DummyScheduler"),
    "strategy": ("ModelShards", "ShardedCheckpoints", "Strategy"),
}
"""Modules that other packages import, and their names."""

for _name, _names in _PARTS.items():
    _part = ModuleType(f"{__name__}.{_name}", __doc__)
    vars(_part).update({name: getattr(training, name) for name in _names}, __all__=list(_names))
    sys.modules[_part.__name__] = globals()[_name] = _part
# The same module objects, so that a class has one identity whichever way it was imported.
sys.modules[f"{__name__}.device"] = device
sys.modules[f"{__name__}.engine"] = host_engine
