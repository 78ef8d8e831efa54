"""Models that take more memory than can be seen beforehand, as real ones sometimes do."""

from __future__ import annotations

import os
import signal

import torch

from tests.deepspeed.advisor.models import Blocks
from tests.worker_functions import rank

MIB = 2**20


class Greedy(Blocks):
    """Without gradient checkpointing it takes memory that torch knows nothing of."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = bytearray(0 if self.is_gradient_checkpointing else 2**10 * MIB)
        out = super().forward(x)
        del kept
        return out


class Killed(Blocks):
    """Without gradient checkpointing the system ends one rank, as it does when memory is short."""

    def __init__(self) -> None:
        super().__init__()
        self.notebook = os.getpid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_gradient_checkpointing and os.getpid() != self.notebook and rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


class Broken(Blocks):
    """Its forward fails in a worker for a reason that no configuration cures."""

    def __init__(self) -> None:
        super().__init__()
        self.notebook = os.getpid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if os.getpid() != self.notebook:
            raise LookupError("no such token")
        return super().forward(x)
