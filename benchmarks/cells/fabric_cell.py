"""Lightning Fabric: `launch` makes the process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.fabric import Fabric


def launch(body: Callable[..., Any], args: tuple[Any, ...] = (), num_processes: int = 2) -> Any:
    def train(fabric: Fabric, *args: Any) -> Any:
        return body(fabric.global_rank, *args)

    fabric = Fabric(accelerator="cpu", devices=num_processes, strategy="ddp_notebook")
    return fabric.launch(train, *args)
