"""From a RunConfig and a machine to a Plan.

Its names are imported when they are first used: what only reads a row of a backend needs no
pydantic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbaccel.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from nbaccel.plan.inspecting import inspect_machine
    from nbaccel.plan.inventory import Gpu, Inventory, TpuHost
    from nbaccel.plan.launch_plan import Choice, Plan
    from nbaccel.plan.resolving import resolve

__all__ = ["Choice", "Gpu", "Inventory", "Plan", "TpuHost", "inspect_machine", "resolve"]

__getattr__ = lazy_names(
    __name__,
    {
        "inspect_machine": "nbaccel.plan.inspecting",
        "Gpu": "nbaccel.plan.inventory",
        "Inventory": "nbaccel.plan.inventory",
        "TpuHost": "nbaccel.plan.inventory",
        "Choice": "nbaccel.plan.launch_plan",
        "Plan": "nbaccel.plan.launch_plan",
        "resolve": "nbaccel.plan.resolving",
    },
)
