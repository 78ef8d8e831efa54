"""From a RunConfig and a machine to a Plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbaccel.base.public_names import lazy_names, names_handed_on

if TYPE_CHECKING:
    from nbaccel.plan.inspecting import inspect_machine as inspect_machine
    from nbaccel.plan.inventory import Gpu as Gpu, Inventory as Inventory, TpuHost as TpuHost
    from nbaccel.plan.launch_plan import Choice as Choice, Plan as Plan
    from nbaccel.plan.resolving import resolve as resolve

_HOMES = names_handed_on(__file__)
__all__ = list(_HOMES)
__getattr__ = lazy_names(__name__, _HOMES)
