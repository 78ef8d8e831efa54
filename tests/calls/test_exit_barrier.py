from __future__ import annotations

import os
import signal

import pytest

from nbaccel import notebook_launcher
from nbaccel.workers import worker

pytestmark = pytest.mark.slow


def test_a_worker_that_does_not_leave_after_its_return_is_ended() -> None:
    """Its value is there; what keeps it (here: somebody has stopped it) keeps nobody else."""

    def stop_at_the_end() -> int:
        told: list[int] = []
        worker.flush_streams = lambda: (
            os.kill(os.getpid(), signal.SIGSTOP) if told else told.append(1)
        )
        return 7

    assert list(notebook_launcher(stop_at_the_end, num_processes=2)) == [7, 7]
