"""Google TPUs: what this host has of them, and what a launch needs to know before it starts.

``chips`` reads the machine and says what is odd, ``drivers`` chooses between torch_tpu and
torch_xla. Neither imports a driver or touches its runtime.
"""

from __future__ import annotations

from nbaccel.devices.tpu.chips import count_chips
from nbaccel.devices.tpu.device import TpuDevice

__all__ = ["TpuDevice", "count_chips"]
