"""Lightning Fabric: `launch` makes the process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.fabric import Fabric


def worker(body: Callable[..., Any]) -> Callable[..., Any]:
    def train(fabric: Fabric, *args: Any) -> Any:
        return body(fabric.global_rank, *args)

    return train


def launch(body: Callable[..., Any], args: tuple[Any, ...] = (), num_processes: int = 2) -> Any:
    fabric = Fabric(accelerator="cpu", devices=num_processes, strategy="ddp_notebook")
    return fabric.launch(worker(body), *args)
