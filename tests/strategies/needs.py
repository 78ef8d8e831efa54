"""What tests of strategies need of torch; where it lacks it they are skipped, and say why."""

from __future__ import annotations

import pytest
import torch

SHARDING = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"),
    reason="torch 2.6 shards on GPUs only; tests/strategies/test_fsdp_on_cpu.py: it is refused",
)
