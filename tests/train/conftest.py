"""What tests of training share."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from torch.utils.data._utils import signal_handling

from nbaccel.train import rng


@pytest.fixture(autouse=True)
def _global_generators_stay() -> Iterator[None]:
    with rng.preserve_rng_states():
        yield


@pytest.fixture
def sigchld(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch sets a handler of its own when a loader first has workers; it goes with the test."""
    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", False)
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, before)
