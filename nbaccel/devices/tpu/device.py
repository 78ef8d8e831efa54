"""Google TPUs: detected, but not used by this version."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from nbaccel.abc.device import Device
from nbaccel.devices.tpu.chips import count_chips
from nbaccel.plan.inventory import Gpu
from nbaccel.units import count_noun

if TYPE_CHECKING:
    from nbaccel.plan.inventory import Inventory

__all__ = ["TpuDevice"]


class TpuDevice(Device):
    """TPU chips of this host; workers cannot compute on them yet."""

    name: ClassVar[str] = "tpu"
    torch_type: ClassVar[str] = "xla"
    after_fork: ClassVar[str] = "a forked worker hangs in its first XLA operation"

    def detect(self, environ: Mapping[str, str]) -> dict[str, Any]:
        """See :meth:`Device.detect`; by device files and the PCI bus."""
        return {"tpu_chips": count_chips(environ)}

    def units(self, inventory: Inventory) -> tuple[Gpu, ...]:
        """See :meth:`Device.units`."""
        chips = range(inventory.tpu_chips)
        return tuple(Gpu(index=index, name="TPU chip", kind=self.name) for index in chips)

    def refusal(self, inventory: Inventory) -> str:
        """See :meth:`Device.refusal`; always one."""
        num_chips = inventory.tpu_chips
        chips_text = (
            count_noun(num_chips, "TPU chip") if num_chips else "a machine without TPU chips"
        )
        return (
            f'device="tpu" cannot be served: got {chips_text}. This version of nbaccel detects '
            'TPUs and does not drive them. Give device="cpu", or "auto" to take what there is.'
        )

    def idle_reason(self, inventory: Inventory) -> str:
        """See :meth:`Device.idle_reason`."""
        return "this version of nbaccel has no TPU backend"

    def hazards(self) -> tuple[str, ...]:
        """See :meth:`Device.hazards`."""
        torch_xla = sys.modules.get("torch_xla")
        if torch_xla is None:
            return ()
        # There is no public way to ask without initialising it.
        core = getattr(torch_xla, "_XLAC", None)
        is_initialised = getattr(core, "_xla_runtime_is_initialized", None)
        if is_initialised is None:
            return ("torch_xla is imported, and this version cannot tell whether its runtime runs",)
        return ("the XLA runtime is initialised in the notebook",) if is_initialised() else ()
