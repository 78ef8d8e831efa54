"""What DeepSpeed's engines really hold: all tensors alive when the optimizer steps, and the peak.

The engines, and the count of what lives, are those that the tests hold the estimates against.
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from nbaccel import RunConfig, estimate_memory, notebook_launcher
from tests.deepspeed import engines


@dataclass(frozen=True)
class Case:
    """One configuration and a number of processes."""

    stage: int
    bf16: bool
    offload: str
    num_processes: int

    @property
    def name(self) -> str:
        parts = [f"ZeRO-{self.stage}", "bf16" if self.bf16 else "fp32"]
        if self.offload != "none":
            parts.append(f"offloaded to {self.offload}")
        return f"{', '.join(parts)}, {self.num_processes} process{'es' * (self.num_processes > 1)}"

    def config(self) -> dict[str, Any]:
        return engines.config(self.stage, offload=self.offload, bf16=self.bf16)


def measured(case: Case) -> list[dict[str, int]]:
    """Bytes of each process, counted in workers that end with it."""
    config = RunConfig(
        num_processes=case.num_processes, device="cpu", start_method="template", share_back=False
    )
    return list(notebook_launcher(_train, (case.config(),), config=config))


def estimated(case: Case) -> dict[str, int]:
    """Bytes of one process, by `estimate_memory`; on a CPU device and host are one memory."""
    found = estimate_memory(
        engines.model(),
        case.config(),
        num_processes=case.num_processes,
        sample_batch=torch.randn(4, engines.WIDTH),
    )
    at_step = found.device.model_states + found.device.buckets
    host = found.host.total // case.num_processes
    return {"at the step": at_step + host, "peak": found.host_needed // case.num_processes}


def _train(config: dict[str, Any]) -> dict[str, int]:
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    import deepspeed  # noqa: F401 - what it makes when it is imported is not the engine's

    from nbaccel.base import env
    from nbaccel.deepspeed import library
    from nbaccel.memory.activations import LiveBytes

    env.update({"PATH": library.path_with_ninja()})
    network = engines.model()
    _, at_step = engines.train(config, network)
    network = engines.model()
    with LiveBytes(device="cpu") as live:
        live.adopt(network.parameters())
        engines.train(config, network)
    return {"at the step": at_step, "peak": live.peak}
