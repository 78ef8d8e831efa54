"""nbaccel: the function makes the process group from the worker's environment.

The harness puts the start method that is measured in the place of "auto".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from nbaccel import notebook_launcher

START_METHOD = "auto"


def worker(body: Callable[..., Any]) -> Callable[..., Any]:
    def train(*args: Any) -> Any:
        dist.init_process_group("gloo")
        return body(dist.get_rank(), *args)

    return train


def launch(
    body: Callable[..., Any],
    args: tuple[Any, ...] = (),
    num_processes: int = 2,
    share_back: bool = True,
) -> Any:
    return notebook_launcher(
        worker(body), args, num_processes, start_method=START_METHOD, share_back=share_back
    )
