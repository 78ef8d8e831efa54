"""Stands for the package msamp, which cannot be installed beside a current torch."""

from __future__ import annotations

from typing import Any

CALLS: list[str] = []


def initialize(model: Any, optimizer: Any, opt_level: str) -> tuple[Any, Any]:
    CALLS.append(opt_level)
    return model, optimizer
