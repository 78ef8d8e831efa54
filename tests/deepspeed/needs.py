"""What tests of DeepSpeed need to be there; where it is missing they are skipped, and say why."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import pytest
from packaging.version import Version

from tests.deepspeed import operations
from tests.needs import DEEPSPEED

__all__ = ["ABORTS_ON_DISK", "DEEPSPEED", "DISK", "ENGINE", "STATE_ON_DISK", "marked", "on_disk"]


def _built(names: tuple[str, ...]) -> pytest.MarkDecorator:
    missing = operations.not_built(names)
    remedy = "make deepspeed-ops builds them, or says which package it lacks"
    return pytest.mark.skipif(
        bool(missing), reason=f"DeepSpeed's operations {missing} are not built: {remedy}"
    )


ENGINE = [DEEPSPEED, _built(operations.ENGINE)]
DISK = [*ENGINE, _built(operations.DISK)]
try:
    ABORTS_ON_DISK = Version(metadata.version("deepspeed")) < Version("0.19.6")
except metadata.PackageNotFoundError:
    ABORTS_ON_DISK = False
STATE_ON_DISK = [
    *DISK,
    pytest.mark.skipif(
        ABORTS_ON_DISK,
        reason="DeepSpeed before 0.19.6 aborts when it swaps an optimizer without a GPU",
    ),
]


def marked(test: Any, marks: Any = ENGINE) -> Any:
    """A test of the real DeepSpeed; the warnings of its imports are not ours."""
    for mark in (*marks, pytest.mark.filterwarnings("ignore")):
        test = mark(test)
    return test


def on_disk(test: Any) -> Any:
    """The same, with state in files."""
    return marked(test, STATE_ON_DISK)
