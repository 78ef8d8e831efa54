"""Helpers of launchers. Processes are started by `notebook_launcher`, or by torchrun."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nbaccel.base import env
from nbaccel.base.public_names import name_own
from nbaccel.config.enumerations import DistributedType
from nbaccel.utils.environment import get_int_from_env


class PrepareForLaunch:
    """A function for ``torch.multiprocessing``; the caller has set ``WORLD_SIZE`` and the rest."""

    def __init__(
        self,
        launcher: Callable[..., Any],
        distributed_type: DistributedType | str = "NO",
        debug: bool = False,
    ) -> None:
        self.launcher = launcher
        self.distributed_type = DistributedType(distributed_type)
        self.debug = debug

    def __call__(self, index: int, *args: Any) -> None:
        """Tell this process its number, and call the function."""
        changes: dict[str, str | None] = {"FORK_LAUNCHED": "1"}
        if self.distributed_type is not DistributedType.NO:
            before = get_int_from_env(["NPROC"], 1) * get_int_from_env(["NODE_RANK"], 0)
            changes |= {"LOCAL_RANK": str(index), "RANK": str(before + index)}
        env.update(changes)
        self.launcher(*args)


name_own(globals())
