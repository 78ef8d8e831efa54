"""From a RunConfig and a machine to a Plan.

Its names are imported when they are first used: what only reads a row of a backend needs no
pydantic.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbaccel.plan.inspecting import inspect_machine
    from nbaccel.plan.inventory import Gpu, Inventory, TpuHost
    from nbaccel.plan.launch_plan import Choice, Plan
    from nbaccel.plan.resolving import resolve

__all__ = ["Choice", "Gpu", "Inventory", "Plan", "TpuHost", "inspect_machine", "resolve"]

_HOMES = {
    "inspect_machine": "nbaccel.plan.inspecting",
    "Gpu": "nbaccel.plan.inventory",
    "Inventory": "nbaccel.plan.inventory",
    "TpuHost": "nbaccel.plan.inventory",
    "Choice": "nbaccel.plan.launch_plan",
    "Plan": "nbaccel.plan.launch_plan",
    "resolve": "nbaccel.plan.resolving",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
