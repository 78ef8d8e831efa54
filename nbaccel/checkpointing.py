"""Checkpoints of single objects, under the name by which Accelerate's users import them.

All that training needs, registered objects too, is saved by ``accelerator.save_state()``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nbaccel.train import checkpoint
from nbaccel.train.checkpoint import files

__all__ = ["load_custom_state", "save_custom_state"]


def save_custom_state(
    obj: Any, path: str | Path, index: int = 0, save_on_each_node: bool = False
) -> None:
    """Write an object's state to ``custom_checkpoint_<index>.pkl``, once per run, or per node."""
    from nbaccel.state import PartialState

    state = PartialState()
    if state.is_local_main_process if save_on_each_node else state.is_main_process:
        checkpoint.save(obj.state_dict(), _custom_state_file(path, index))


def load_custom_state(obj: Any, path: str | Path, index: int = 0) -> None:
    """Give an object the state that :func:`save_custom_state` wrote; no code in it is run."""
    obj.load_state_dict(files.read_torch_file(_custom_state_file(path, index)))


def _custom_state_file(folder: str | Path, number: int) -> Path:
    return Path(folder) / f"custom_checkpoint_{number}.pkl"
