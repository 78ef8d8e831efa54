"""The distributed environment that engines of a bare notebook share while they live.

In a live worker a cell that prepares is run again, perhaps with another model. The earlier engine
would stay for ever: hooks on its gradients are held by torch's C++ side, where Python's garbage
collector does not see that nothing else refers to them.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping

import torch
import torch.distributed as dist

from nbaccel.base import env
from nbaccel.deepspeed import cpp_operations
from nbaccel.deepspeed.environment import (
    DeepSpeedEnvironment,
    deepspeed_environment,
    ignore_old_names,
)
from nbaccel.deepspeed.strategy.engine_driver import Drive
from nbaccel.deepspeed.teardown import forget_modules

__all__ = ["Lease", "add", "end"]


class _SharedEnvironment:
    """One environment of one process, and how many use it."""

    def __init__(self) -> None:
        self.environment: DeepSpeedEnvironment | None = None
        self.users = 0

    @property
    def is_open(self) -> bool:
        """Whether it is in force."""
        return self.environment is not None and not self.environment.closed

    def enter(self, device: torch.device) -> DeepSpeedEnvironment:
        # It may have been closed by others, such as `deepspeed_environment()`, while users were
        # left.
        if self.environment is None or self.environment.closed:
            self.environment = deepspeed_environment(device=device)
            self.users = 0
        self.users += 1
        return self.environment

    def release(self, environment: DeepSpeedEnvironment) -> None:
        # A user of one that others closed must not be counted as a user of its successor.
        if environment is not self.environment:
            return
        self.users -= 1
        if self.users <= 0:
            self.environment.close()
            self.environment = None


_SHARED_ENVIRONMENT = _SharedEnvironment()


class Lease:
    """One user's claim that engines can be made in this process.

    Where there is no process group, an environment of one process is made; it ends with the last
    claim. In a launched process the variables that DeepSpeed needs are set.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._entered_environment: DeepSpeedEnvironment | None = None

    def take(self) -> None:
        """Claim it; a second time does nothing."""
        if self._entered_environment is not None:
            return
        ignore_old_names()
        gc.collect()  # strategies of an earlier run of the cell, in cycles, still hold their lease
        if dist.is_initialized() and not _SHARED_ENVIRONMENT.is_open:
            self._put_right()
            return
        self._entered_environment = _SHARED_ENVIRONMENT.enter(self._device)

    def give_up(self) -> None:
        """End the claim; without one this does nothing."""
        environment = self._entered_environment
        self._entered_environment = None
        if environment is not None:
            _SHARED_ENVIRONMENT.release(environment)

    def _put_right(self) -> None:
        env.update({"PATH": cpp_operations.path_with_ninja()})
        if self._device.type == "cpu":
            cpp_operations.check_compiler()
            # DeepSpeed reads it once, when it is imported, and would compute on a GPU if it finds
            # one.
            env.update({"DS_ACCELERATOR": env.read("DS_ACCELERATOR") or "cpu"})
        cpp_operations.remove_forgotten_locks()


_ORPHANED_DRIVES: list[Drive] = []


def add(drives: Mapping[int, Drive]) -> None:
    """Note engines whose Accelerator is gone, without which they cannot be trained.

    They are not ended at once: a cell may still look at what they have.
    """
    _ORPHANED_DRIVES.extend(drives.values())


def end() -> None:
    """Destroy the noted engines; no collective."""
    # Removed before it ends: one that cannot be destroyed must not be tried again by each
    # `prepare`.
    while _ORPHANED_DRIVES:
        _ORPHANED_DRIVES.pop().end(None)
    forget_modules()
