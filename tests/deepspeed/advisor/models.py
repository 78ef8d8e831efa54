"""Models of which the advisor is asked, and machines that they are to fit on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nbaccel.plan.inventory import Gpu, Inventory

WIDTH = 256
GIB = 2**30
LIBAIO = pytest.mark.skipif(
    not Path("/usr/include/libaio.h").exists(),
    reason="libaio is not here, without which nothing is swapped: apt-get install libaio-dev",
)


class Blocks(nn.Module):
    """Blocks with a switch for gradient checkpointing."""

    def __init__(self, blocks: int = 6, width: int = WIDTH) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
            for _ in range(blocks)
        )
        self.is_gradient_checkpointing = False

    def gradient_checkpointing_enable(self) -> None:
        self.is_gradient_checkpointing = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            again = self.is_gradient_checkpointing
            x = checkpoint(block, x, use_reentrant=False) if again else block(x)
        return x


def machine(
    gpus: int = 2, capability: tuple[int, int] = (9, 0), free_bytes: int = 80 * GIB
) -> Inventory:
    """Much of everything; budgets say what may be used of it."""
    cards = tuple(
        Gpu(
            index=index,
            name="a GPU",
            total_bytes=2 * free_bytes,
            free_bytes=free_bytes - index,
            compute_capability=capability,
            uuid=f"GPU-{index}",
        )
        for index in range(gpus)
    )
    return Inventory(
        cpu_cores=8,
        host_total_bytes=512 * GIB,
        host_available_bytes=512 * GIB,
        gpus=cards,
        torch_version="2.13.0",
    )
