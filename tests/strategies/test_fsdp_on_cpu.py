"""torch 2.6 shards on GPUs only, and says so in the middle of a step; nbaccel says it before."""

from __future__ import annotations

import pytest
import torch

from nbaccel.errors import PlatformUnsupported
from tests.strategies.test_fsdp import fsdp


def test_a_torch_that_cannot_shard_on_cpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cpu.Stream, "record_event", raising=False)
    with pytest.raises(PlatformUnsupported, match=r"needs torch 2.7 .* on a CPU: this is .*Update"):
        fsdp()
