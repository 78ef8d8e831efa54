"""From a RunConfig and a machine to a Plan."""

from __future__ import annotations

from nbaccel.plan.inspecting import inspect_machine
from nbaccel.plan.inventory import Gpu, Inventory, TpuHost
from nbaccel.plan.launch_plan import Choice, Plan
from nbaccel.plan.resolve import resolve

__all__ = ["Choice", "Gpu", "Inventory", "Plan", "TpuHost", "inspect_machine", "resolve"]
