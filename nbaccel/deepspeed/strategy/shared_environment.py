"""The distributed environment that engines of a bare notebook share while they live.

In a live worker a cell that prepares is run again, perhaps with another model. The earlier engine
would stay for ever: hooks on its gradients are held by torch's C++ side, where Python's garbage
collector does not see that nothing else refers to them.
"""

from __future__ import annotations

import gc
from collections import Counter

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

_USERS: Counter[DeepSpeedEnvironment] = Counter()
"""How many engines and builders use an environment that was made for them: one at most is open."""


class Lease:
    """One user's claim that engines can be made in this process.

    Where there is no process group, an environment of one process is made; it ends with the last
    claim. In a launched process the variables that DeepSpeed needs are set.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._environment: DeepSpeedEnvironment | None = None

    def take(self) -> None:
        """Claim it; a second time does nothing."""
        if self._environment is not None:
            return
        ignore_old_names()
        gc.collect()  # strategies of an earlier run of the cell, in cycles, still hold their lease
        # Others, such as `deepspeed_environment()`, may have closed one while it had users.
        shared = next((known for known in _USERS if not known.closed), None)
        if shared is None and dist.is_initialized():
            self._put_right()
            return
        self._environment = shared or deepspeed_environment(device=self._device)
        _USERS[self._environment] += 1

    def give_up(self) -> None:
        """End the claim; without one this does nothing."""
        environment = self._environment
        self._environment = None
        if environment is None:
            return
        _USERS[environment] -= 1
        if not _USERS[environment]:
            del _USERS[environment]
            environment.close()

    def _put_right(self) -> None:
        env.update({"PATH": cpp_operations.path_with_ninja()})
        if self._device.type == "cpu":
            cpp_operations.check_compiler()
            # DeepSpeed reads it once, when it is imported, and would compute on a GPU if it finds
            # one.
            env.update({"DS_ACCELERATOR": env.read("DS_ACCELERATOR") or "cpu"})
        cpp_operations.remove_forgotten_locks()


ORPHANED_DRIVES: list[Drive] = []
"""Engines whose Accelerator is gone, without which they cannot be trained.

They are not ended at once: a cell may still look at what they have.
"""


def end() -> None:
    """Destroy the noted engines; no collective."""
    # Removed before it ends: one that cannot be destroyed must not be tried again by each
    # `prepare`.
    while ORPHANED_DRIVES:
        ORPHANED_DRIVES.pop().end(is_alone=False)
    forget_modules()
