"""What the user said: the description of a run."""

from __future__ import annotations

from nbaccel.config.run import RunConfig

__all__ = ["RunConfig"]
