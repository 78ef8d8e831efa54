"""Template processes that are no program of their own: forks of this process, or of another."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

import psutil

__all__ = ["DescendantProcess", "ForkedProcess"]


_ZOMBIE_STEP_S = 0.05


class ForkedProcess:
    """A child that this process has forked; see `template_prestart.TemplateProcess`.

    Args:
        pid: Its process id.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._process = psutil.Process(pid)
        self._status: int | None = None

    def poll(self) -> int | None:
        """How it ended, negative for a signal; None while it runs."""
        if self._status is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.wait(0)
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and collect it.

        Raises:
            subprocess.TimeoutExpired: It has not ended within so many seconds.
        """
        if self._status is None:
            try:
                exit_status: Any = self._process.wait(timeout)
            except psutil.TimeoutExpired as error:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0) from error
            # None: other code of this process has collected it, and its status is lost.
            self._status = -signal.SIGKILL if exit_status is None else int(exit_status)
        return self._status

    def kill(self) -> None:
        """Send it SIGKILL."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._process.kill()


class DescendantProcess:
    """A process that a child of this one has forked, and collects.

    Args:
        pid: Its process id.
        find_status: Asks its parent how it ended; None if that is not known.
    """

    def __init__(self, pid: int, find_status: Callable[[], int | None]) -> None:
        self.pid = pid
        self._find_status = find_status
        self._status: int | None = None
        # It may have ended already.
        self._process = psutil.Process(pid) if psutil.pid_exists(pid) else None

    def poll(self) -> int | None:
        """How it ended, negative for a signal; None while it runs."""
        if self._status is None and not self._is_alive():
            status = self._find_status()
            # Its parent has ended too, and with it whoever knew.
            self._status = -signal.SIGKILL if status is None else status
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: It has not ended within so many seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (exit_status := self.poll()) is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            with contextlib.suppress(psutil.Error):
                psutil.Process(self.pid).wait(_ZOMBIE_STEP_S)
        return exit_status

    def kill(self) -> None:
        """Send it SIGKILL."""
        if self._process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._process.kill()

    def _is_alive(self) -> bool:
        # A zombie has ended, also while its parent is stopped and does not collect it.
        with contextlib.suppress(psutil.NoSuchProcess):
            return (
                self._process is not None
                and self._process.is_running()
                and self._process.status() != psutil.STATUS_ZOMBIE
            )
        return False
