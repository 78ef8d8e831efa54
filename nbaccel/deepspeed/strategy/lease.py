"""The distributed environment that engines of a bare notebook share while they live."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any

import torch
import torch.distributed as dist

from nbaccel import env
from nbaccel.deepspeed import toolchain
from nbaccel.deepspeed.environment import DeepSpeedEnvironment, deepspeed_environment

__all__ = ["take"]


class _Shared:
    """One environment of one process, and how many use it."""

    def __init__(self) -> None:
        self.environment: DeepSpeedEnvironment | None = None
        self.users = 0

    def enter(self, device: torch.device) -> None:
        if self.environment is None or self.environment.closed:
            self.environment, self.users = deepspeed_environment(device=device), 0
        self.users += 1

    def leave(self) -> None:
        self.users -= 1
        if self.users <= 0 and self.environment is not None:
            self.environment.close()
            self.environment = None


_SHARED = _Shared()


def take(user: object, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make sure that engines can be made in this process.

    Where there is no process group, an environment of one process is made; it ends with the last
    of its users. In a launched process what DeepSpeed needs of it is put right.

    Args:
        user: For whom; when it is gone, so is its claim.
        device: What is computed on.

    Returns:
        A context whose end gives the claim up.
    """
    # What a cell left behind when it was run again still has its claim.
    gc.collect()
    stack = contextlib.ExitStack()
    if dist.is_initialized() and not _is_shared():
        env.update({"PATH": toolchain.path_with_ninja()})
        if device.type == "cpu":
            toolchain.check_compiler()
            # Read once, when DeepSpeed is imported; it would compute on a GPU that it finds.
            env.update({"DS_ACCELERATOR": env.read("DS_ACCELERATOR") or "cpu"})
        toolchain.remove_forgotten_locks()
        return stack
    _SHARED.enter(device)
    stack.callback(weakref.finalize(user, _SHARED.leave))
    return stack


def _is_shared() -> bool:
    return _SHARED.environment is not None and not _SHARED.environment.closed
