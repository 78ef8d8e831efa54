"""What tests of DeepSpeed need to be there; where it is missing they are skipped, and say why."""

from __future__ import annotations

from typing import Any

import pytest

from nbaccel.deepspeed import library
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
ABORTS_ON_DISK = library.older_than("0.19.6")
STATE_ON_DISK = [
    *DISK,
    pytest.mark.skipif(
        bool(ABORTS_ON_DISK),
        reason=f"DeepSpeed {ABORTS_ON_DISK} aborts when it swaps an optimizer without a GPU",
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
