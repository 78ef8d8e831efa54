"""What tests of data loaders share."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from torch.utils.data._utils import signal_handling


@pytest.fixture
def sigchld(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch sets a handler of its own when a loader first has workers; it goes with the test."""
    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", False)
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, before)
