"""Pipelines for inference: names of a part that is still to come."""

from __future__ import annotations

from nbaccel.base.unsupported_names import PIPELINE_PARALLELISM, missing_name_of

__all__ = [
    "prepare_pippy",
]

prepare_pippy = missing_name_of("prepare_pippy", PIPELINE_PARALLELISM, __name__)
