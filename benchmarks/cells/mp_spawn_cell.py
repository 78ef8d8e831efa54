"""torch.multiprocessing, spawn: only importable functions, so they live in a module here.

The harness writes `bench_module.py` (the bodies and `mp_fork_cell.py`) before it runs this cell.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import bench_module
import torch.multiprocessing as mp


def launch(body: Callable[..., Any], args: tuple[Any, ...] = (), num_processes: int = 2) -> Any:
    importable = getattr(bench_module, body.__name__)
    mp.start_processes(
        bench_module.enter,
        (importable, num_processes, bench_module.free_port(), args),
        num_processes,
        start_method="spawn",
    )
