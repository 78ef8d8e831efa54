"""nbaccel: train on every chip of this machine, from a notebook cell.

The names below are imported when they are first used: ``import nbaccel`` costs nothing, torch
is not even looked at.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbaccel.config import RunConfig
    from nbaccel.errors import (
        ConfigError,
        LaunchTimeout,
        NbaccelError,
        PrecisionMismatch,
        WorkerDied,
        WorkerFailed,
    )
    from nbaccel.launchers import debug_launcher, notebook_launcher, shutdown
    from nbaccel.plan.inventory import Inventory, inspect_machine
    from nbaccel.plan.plan import Choice, Plan
    from nbaccel.plan.resolve import resolve
    from nbaccel.topology import Topology

__version__ = "0.1.0"

__all__ = [
    "Choice",
    "ConfigError",
    "Inventory",
    "LaunchTimeout",
    "NbaccelError",
    "Plan",
    "PrecisionMismatch",
    "RunConfig",
    "Topology",
    "WorkerDied",
    "WorkerFailed",
    "__version__",
    "debug_launcher",
    "inspect_machine",
    "notebook_launcher",
    "resolve",
    "shutdown",
]

_HOMES = {
    "nbaccel.config": ("RunConfig",),
    "nbaccel.errors": (
        "ConfigError",
        "LaunchTimeout",
        "NbaccelError",
        "PrecisionMismatch",
        "WorkerDied",
        "WorkerFailed",
    ),
    "nbaccel.launchers": ("debug_launcher", "notebook_launcher", "shutdown"),
    "nbaccel.plan": ("Choice", "Inventory", "Plan", "inspect_machine", "resolve"),
    "nbaccel.topology": ("Topology",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value  # the next use finds it without coming here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
