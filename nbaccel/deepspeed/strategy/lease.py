"""The distributed environment that engines of a bare notebook share while they live."""

from __future__ import annotations

import gc

import torch
import torch.distributed as dist

from nbaccel import env
from nbaccel.deepspeed import toolchain
from nbaccel.deepspeed.environment import (
    DeepSpeedEnvironment,
    deepspeed_environment,
    ignore_old_names,
)

__all__ = ["Lease"]


class _Shared:
    """One environment of one process, and how many use it."""

    def __init__(self) -> None:
        self.environment: DeepSpeedEnvironment | None = None
        self.users = 0

    @property
    def is_open(self) -> bool:
        """Whether it is in force."""
        return self.environment is not None and not self.environment.closed

    def enter(self, device: torch.device) -> None:
        if not self.is_open:
            self.environment, self.users = deepspeed_environment(device=device), 0
        self.users += 1

    def leave(self) -> None:
        self.users -= 1
        if self.users <= 0 and self.environment is not None:
            self.environment.close()
            self.environment = None


_SHARED = _Shared()


class Lease:
    """One user's claim that engines can be made in this process.

    Where there is no process group, an environment of one process is made; it ends with the last
    claim. In a launched process what DeepSpeed needs of it is put right.

    Args:
        device: What is computed on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._taken = False

    def take(self) -> None:
        """Claim it; a second time does nothing."""
        if self._taken:
            return
        ignore_old_names()
        gc.collect()  # what a cell left behind when it was run again still has its claim
        if dist.is_initialized() and not _SHARED.is_open:
            self._put_right()
            return
        _SHARED.enter(self._device)
        self._taken = True

    def give_up(self) -> None:
        """Claim it no more."""
        if self._taken:
            self._taken = False
            _SHARED.leave()

    def _put_right(self) -> None:
        env.update({"PATH": toolchain.path_with_ninja()})
        if self._device.type == "cpu":
            toolchain.check_compiler()
            # Read once, when DeepSpeed is imported; it would compute on a GPU that it finds.
            env.update({"DS_ACCELERATOR": env.read("DS_ACCELERATOR") or "cpu"})
        toolchain.remove_forgotten_locks()
