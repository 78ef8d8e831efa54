"""Engines of several processes whose Accelerator is gone: ended before the next one is made.

In a live worker a cell that prepares is run again, perhaps with another model. The engine before
would stay for ever: hooks on its gradients are held by torch's C++ side, where Python's garbage
collector does not see that nobody else refers to them.
"""

from __future__ import annotations

from collections.abc import Mapping

from nbaccel.deepspeed.strategy.drive import Drive
from nbaccel.deepspeed.teardown import forget_modules

__all__ = ["add", "end"]

_ORPHANS: list[Drive] = []


def add(drives: Mapping[int, Drive]) -> None:
    """Note engines without an Accelerator, which alone could train them.

    They are not ended at once: a cell may still look at what they have.

    Args:
        drives: What drives them.
    """
    _ORPHANS.extend(drives.values())


def end() -> None:
    """Destroy them; each process does so for itself."""
    while _ORPHANS:
        _ORPHANS.pop().end(None)
    forget_modules()
