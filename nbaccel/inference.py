"""Pipelines for inference: names of a part that is still to come."""

from __future__ import annotations

from nbaccel._later import PIPELINES, later

__all__ = [
    "prepare_pippy",
]

prepare_pippy = later("prepare_pippy", PIPELINES, __name__)
