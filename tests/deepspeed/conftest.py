"""DeepSpeed's tests compute on the CPU, also where there is a GPU."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed chooses its device once, when it is imported, and reads this then."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
