"""Pipelines for inference: names of a part that is still to come."""

from __future__ import annotations

from typing import Any

from nbaccel.base.public_names import missing_names_of

__all__ = ["prepare_pippy"]

prepare_pippy: Any = missing_names_of(__name__)["prepare_pippy"]
