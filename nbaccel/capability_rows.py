"""The records of which backends' tables are made, as other packages import them."""

from nbaccel.config.capability_rows import (
    DeviceRow,
    EngineRow,
    Fp8Choice,
    Fp8Row,
    PrecisionRow,
    StartMethodRow,
    StrategyRow,
)

__all__ = [
    "DeviceRow",
    "EngineRow",
    "Fp8Choice",
    "Fp8Row",
    "PrecisionRow",
    "StartMethodRow",
    "StrategyRow",
]
