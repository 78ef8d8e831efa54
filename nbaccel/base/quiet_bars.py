"""Progress bars that leave no thread behind."""

from __future__ import annotations

from tqdm import tqdm


class Bar(tqdm):  # type: ignore[type-arg]
    """tqdm's bar without the thread that watches over all bars of a process.

    That thread outlives the bar, and nbaccel warns of threads before it forks a notebook.
    """

    monitor_interval = 0
