"""Checkpoints: written whole or not at all, in the layout that Accelerate reads and writes."""

from __future__ import annotations

from nbaccel.train.checkpoint.checkpoints import Checkpoints
from nbaccel.train.checkpoint.files import save, save_model
from nbaccel.train.checkpoint.loading import load_state
from nbaccel.train.checkpoint.parts import Parts, check_checkpointable
from nbaccel.train.checkpoint.saving import save_state

__all__ = [
    "Checkpoints",
    "Parts",
    "check_checkpointable",
    "load_state",
    "save",
    "save_model",
    "save_state",
]
