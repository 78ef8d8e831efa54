"""What a parameter takes in memory, and how far a mean of gradients is from the exact one."""

from __future__ import annotations

import gc
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

WIDTH, LAYERS = 2048, 6
LEVELS = {"AdamW": None, "O1": "O1", "O2": "O2"}
BYTES = {"AdamW": 16.0, "O1": 11.0, "O2": 6.0}
"""By the formats."""

RANKS = (2, 8, 64)
DATA = ("independent", "common signal", "heavy tail")
VALUES = 1 << 16


# ------------------------------------------------------------------------- memory


def stored(tensor: Any) -> int:
    return int(getattr(tensor, "stored_bytes", tensor.nbytes))


def held(model: nn.Module, optimizer: Any) -> int:
    """Bytes of parameters, gradients and the optimizer's state."""
    total = 0
    for parameter in model.parameters():
        state = optimizer.state.get(parameter, {})
        tensors = [parameter, parameter.grad, *state.values()]
        total += sum(stored(item) for item in tensors if isinstance(item, torch.Tensor))
    return total


def train_stack(level: str | None, width: int) -> tuple[float, float]:
    """Two steps of a stack of linear layers.

    Returns:
        Bytes per parameter in the tensors, and by how much the process has grown.
    """
    import psutil

    from nbaccel import Accelerator
    from nbaccel.utils import MSAMPRecipeKwargs

    torch.set_num_threads(1)
    settings: dict[str, Any] = {"cpu": True}
    if level is not None:
        settings |= {
            "mixed_precision": "fp8",
            "kwargs_handlers": [MSAMPRecipeKwargs(opt_level=level)],
        }
    accelerator = Accelerator(**settings)
    inputs = torch.randn(16, width)
    (inputs @ torch.randn(width, width)).sum()  # what a first product loads
    gc.collect()
    before = psutil.Process().memory_info().rss
    model: Any = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        accelerator.backward(model(inputs).square().mean())
        optimizer.step()
    gc.collect()
    grown = psutil.Process().memory_info().rss - before
    count = LAYERS * width * width
    own = accelerator.unwrap_model(model)
    return held(own, optimizer) / count, grown / count


def bytes_per_parameter(name: str, width: int) -> tuple[float, float]:
    """In a fresh process."""
    code = f"from harness import fp8_memory as m; m.report({name!r}, {width})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).resolve().parents[1],
        # Freed memory goes back at once, so that the process's size is what it holds.
        env={**_environment(), "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    tensors, grown = json.loads(done.stdout.strip().splitlines()[-1])
    return tensors, grown


def _environment() -> dict[str, str]:
    import os

    return dict(os.environ)


def report(name: str, width: int) -> None:
    """Print both figures, as JSON."""
    print(json.dumps(train_stack(LEVELS[name], width)))


# ------------------------------------------------------------------------- exchange, simulated


def gradients(kind: str, ranks: int) -> torch.Tensor:
    """Gradients of simulated ranks: ``[ranks, values]``."""
    generator = torch.Generator().manual_seed(0)
    own = torch.randn(ranks, VALUES, generator=generator)
    if kind == "heavy tail":
        return own * torch.exp(2 * torch.randn(ranks, VALUES, generator=generator))
    if kind == "common signal":
        return own + 3 * torch.randn(VALUES, generator=generator)
    return own


def errors(kind: str, ranks: int) -> dict[str, float]:
    """Relative error of the mean by each way of averaging."""
    parts = gradients(kind, ranks)
    exact = parts.double().mean(dim=0)

    def error(mean: torch.Tensor) -> float:
        return float((mean.double() - exact).norm() / exact.norm())

    return {
        "two shots": error(two_shots(parts)),
        "a sum in E4M3": error(paper_sum(parts)),
        "a ring in bf16": error(bf16_ring(parts)),
    }


def two_shots(parts: torch.Tensor) -> torch.Tensor:
    """What `two_shot_mean` computes: each rank's message, their mean, its message."""
    from nbaccel.precision.fp8.gradient_exchange import packed_blocks, unpacked_blocks

    mean = unpacked_blocks(packed_blocks(parts)).mean(dim=0, keepdim=True)
    return unpacked_blocks(packed_blocks(mean))[0]


def paper_sum(parts: torch.Tensor) -> torch.Tensor:
    """FP8-LM's sum (arXiv 2310.18313, section 2.1): one scale, and what its factor comes to."""
    from nbaccel.precision.fp8.scaled_tensor import E4M3, largest_magnitude, power_of_two_scale

    factor = 1.0
    amax = largest_magnitude(parts)
    mean = parts[0]
    for _ in range(40):  # the factor halves at most ten times, and then stays about there
        scale = power_of_two_scale(amax, E4M3) * factor
        payloads = E4M3.cast(parts * scale)
        total = payloads[0]
        for payload in payloads[1:]:  # each sum rounded, as a ring does
            total = E4M3.cast(total.float() + payload.float())
        mean = total.float() / scale / len(parts)
        saturated = float((total.float().abs() >= E4M3.maximum).float().mean())
        factor = factor / 2 if saturated > 1e-5 else min(factor * 2 ** (1 / 1000), 1.0)
    return mean


def bf16_ring(parts: torch.Tensor) -> torch.Tensor:
    total = parts[0].bfloat16()
    for part in parts[1:]:
        total = total + part.bfloat16()
    return total.float() / len(parts)


# ------------------------------------------------------------------------- exchange, real


def replicas(steps: int) -> dict[str, Any]:
    """In a worker: 200 steps at O2, and whether all replicas are equal after each of them."""
    from nbaccel import Accelerator
    from nbaccel.utils import MSAMPRecipeKwargs

    torch.set_num_threads(1)
    accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[MSAMPRecipeKwargs()])
    torch.manual_seed(0)
    model: Any = nn.Sequential(
        nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 64)
    )
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    torch.manual_seed(1 + accelerator.process_index)
    equal = 0
    for _ in range(steps):
        values = torch.randn(16, 64)
        accelerator.backward((model(values) - values.sin()).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        equal += all(_same_everywhere(parameter) for parameter in model.parameters())
    size = accelerator.num_processes
    ring = 2 * (size - 1) / size * 2  # bytes of bf16 per value that a ring sends
    return {"equal": equal, "sent to bf16": message_bytes(VALUES, size) / VALUES / ring}


def message_bytes(num_values: int, num_ranks: int) -> int:
    """Bytes that a process sends for the mean of so many values by `two_shot_mean`."""
    from nbaccel.precision.fp8.gradient_exchange import BLOCK

    chunk_size = -(-num_values // (num_ranks * BLOCK)) * BLOCK
    # A byte a value and four a block: to each of the others, and then the own mean to each of them.
    return 2 * (num_ranks - 1) * (chunk_size + chunk_size // BLOCK * 4)


def _same_everywhere(parameter: Any) -> bool:
    values = (parameter.detach() + 0).double()  # stored ones as values
    sums = torch.stack([values.sum(), values.square().sum()])
    every = [torch.empty_like(sums) for _ in range(dist.get_world_size())]
    dist.all_gather(every, sums)
    return all(torch.equal(other, sums) for other in every)


def rows() -> Iterator[tuple[str, int]]:
    return ((kind, ranks) for kind in DATA for ranks in RANKS)


def is_close(found: float, wanted: float, share: float = 0.02) -> bool:
    return math.isclose(found, wanted, rel_tol=share)
