"""Checkpoints: written whole or not at all, in the layout that Accelerate reads and writes."""

from nbaccel.train.checkpoint.files import save, save_model
from nbaccel.train.checkpoint.loading import load_state
from nbaccel.train.checkpoint.saving import CheckpointParts, check_checkpointable, save_state

__all__ = [
    "CheckpointParts",
    "check_checkpointable",
    "load_state",
    "save",
    "save_model",
    "save_state",
]
