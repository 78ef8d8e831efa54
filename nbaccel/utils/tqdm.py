"""A progress bar that only one process of a node shows."""

from __future__ import annotations

from typing import Any

from tqdm import auto

from nbaccel.train import distributed

__all__ = ["tqdm"]


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """A progress bar of ``tqdm`` that only process 0 of each node shows, unless all are to."""
    if main_process_only and distributed.local_rank() != 0:
        kwargs["disable"] = True
    return auto.tqdm(*args, **kwargs)
