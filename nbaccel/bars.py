"""Progress bars that leave no thread behind."""

from __future__ import annotations

from tqdm import tqdm

__all__ = ["Bar"]


class Bar(tqdm):  # type: ignore[type-arg]
    """tqdm's bar without the thread that watches over all bars of a process.

    That thread outlives the bar, and a fork of a notebook with a thread has to be warned of.
    """

    monitor_interval = 0
