"""What the system counts for a process that trains with DeepSpeed on a CPU: ``VmHWM``.

A fresh process trains a tiny model first, so that code and threads are there, then the one that is
counted. ``VmHWM`` is set back in between; see ``proc(5)``, clear_refs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

BATCH = 16


@dataclass(frozen=True)
class Training:
    """A model and a configuration."""

    name: str
    model: str
    stage: int
    bf16: bool = False
    offload: tuple[str, ...] = ()
    own_optimizer: bool = False
    accumulate_in_fp32: bool = False

    def config(self) -> dict[str, Any]:
        zero: dict[str, Any] = {"stage": self.stage}
        zero |= {f"offload_{what}": {"device": "cpu"} for what in self.offload}
        found: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": BATCH,
            "bf16": {"enabled": self.bf16},
            "zero_optimization": zero,
        }
        if not self.own_optimizer:
            found["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-4}}
        if self.accumulate_in_fp32:
            found |= {"gradient_accumulation_steps": 2}
            found |= {"data_types": {"grad_accum_dtype": "fp32"}}
        return found


TRAININGS = (
    Training("low-rank adapters, ZeRO-3, bf16", "adapters", 3, bf16=True),
    Training("convolutions, ZeRO-1, fp32", "convolutions", 1),
    Training("linear layers, ZeRO-3, bf16, all on CPU", "linear", 3, True, ("optimizer", "param")),
    Training("linear layers, ZeRO-2, bf16, optimizer on CPU", "linear", 2, True, ("optimizer",)),
    Training("linear layers, ZeRO-1, gradients in fp32", "linear", 1, True, (), False, True),
    Training("tied GPT, ZeRO-2, fp32", "gpt", 2),
    Training("tied GPT, ZeRO-2, fp32, torch's AdamW", "gpt", 2, own_optimizer=True),
    Training("checkpointed GPT, ZeRO-1, fp32", "checkpointed gpt", 1),
    Training("GPT, ZeRO-3, fp32, torch's AdamW", "gpt", 3, own_optimizer=True),
    Training("experts, ZeRO-2, bf16", "experts", 2, bf16=True),
    Training("linear layers, no ZeRO, bf16", "linear", 0, bf16=True),
    Training("linear layers, no ZeRO, bf16, torch's AdamW", "linear", 0, True, (), True),
)


# ---------------------------------------------------------------- models
class Chain(nn.Module):
    """Layers one after another; adapters leave the layers themselves frozen."""

    def __init__(self, width: int, depth: int, *, rank: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 10)
        self.adapters = nn.ModuleList()
        if rank:
            self.layers.requires_grad_(False)
            self.adapters.extend(
                nn.Sequential(nn.Linear(width, rank), nn.Linear(rank, width)) for _ in range(depth)
            )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            found = layer(rows)
            rows = torch.relu(found + self.adapters[number](rows) if self.adapters else found)
        return self.head(rows)


class Images(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        widths = [3, *[width] * depth]
        self.layers = nn.ModuleList(nn.Conv2d(i, o, 3, padding=1) for i, o in pairwise(widths))
        self.head = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            images = torch.relu(layer(images))
        return self.head(images.mean((2, 3)))


class Experts(nn.Module):
    def __init__(self, width: int, depth: int, number: int = 8) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(width, number) for _ in range(depth))
        self.experts = nn.ModuleList(
            nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(number)) for _ in range(depth)
        )
        self.back = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for gate, experts, back in zip(self.gates, self.experts, self.back, strict=True):
            shares = gate(rows).softmax(-1)
            mixed = sum(shares[:, i : i + 1] * one(rows) for i, one in enumerate(experts))
            rows = rows + back(torch.relu(mixed))
        return self.head(rows)


class Gpt(nn.Module):
    """Blocks between an embedding and a head that share their weight."""

    def __init__(self, width: int, depth: int, words: int, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
            for _ in range(depth)
        )
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight
        self.checkpointed = checkpointed

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rows = self.words(tokens)
        for layer in self.layers:
            if self.checkpointed:
                rows = checkpoint(layer, rows, use_reentrant=False)
            else:
                rows = layer(rows)
        return self.head(rows.mean(1))


def made(model: str, *, tiny: bool = False) -> tuple[nn.Module, torch.Tensor]:
    """A model of some 35 million parameters, and a batch."""
    depth = 1 if tiny else 8
    if model in ("linear", "adapters"):
        width = 32 if tiny else 1024
        rank = 8 if model == "adapters" else 0
        return Chain(width, 4 * depth, rank=rank), torch.randn(BATCH, width)
    if model == "convolutions":
        return Images(8 if tiny else 384, 3 * depth + 1), torch.randn(BATCH, 3, 12, 12)
    if model == "experts":
        width = 16 if tiny else 512
        return Experts(width, depth), torch.randn(BATCH, width)
    width, words = (16, 1000) if tiny else (512, 20_000)
    checkpointed = model == "checkpointed gpt"
    return Gpt(width, depth, words, checkpointed=checkpointed), torch.randint(0, 1000, (BATCH, 64))


# ---------------------------------------------------------------- counting
def counted(training: Training, *, short: bool) -> dict[str, int]:
    """Bytes that the system counts, and the estimate; in a process of its own.

    Args:
        training: What is trained.
        short: Whether memory is returned at once, as nbaccel does where it is short.
    """
    asked = json.dumps({"training": asdict(training), "short": short})
    here = Path(__file__).resolve()
    paths = os.pathsep.join([str(here.parents[2]), str(here.parents[1])])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "harness.host_memory", asked],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{training.name}: {done.stderr[-2000:]}")
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def _count(training: Training, *, short: bool) -> dict[str, int]:
    from nbaccel import deepspeed_environment, estimate_memory
    from nbaccel.deepspeed import engines

    if short:
        engines.return_at_once()
    with deepspeed_environment(device="cpu"):
        _train(training, tiny=True)
    engines.return_all()
    with deepspeed_environment(device="cpu"):
        before = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        took = _train(training) - before
    model, batch = made(training.model)
    needs = estimate_memory(model, training.config(), sample_batch=batch)
    return {"counted": took, "estimated": needs.host_needed}


def _train(training: Training, *, tiny: bool = False) -> int:
    """Train for three steps; returns the most bytes that were counted at any moment of them."""
    from nbaccel import Accelerator, DeepSpeedPlugin
    from nbaccel.utils import DummyOptim

    accelerator = Accelerator(
        cpu=True,
        mixed_precision="bf16" if training.bf16 else "no",
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=training.config()),
    )
    model, batch = made(training.model, tiny=tiny)
    trained = [one for one in model.parameters() if one.requires_grad]
    kind = torch.optim.AdamW if training.own_optimizer else DummyOptim
    model, optimizer = accelerator.prepare(model, kind(trained, lr=1e-4))
    labels = torch.randint(0, 10, (BATCH,))
    for _ in range(6 if training.accumulate_in_fp32 else 3):
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(batch), labels))
            optimizer.step()
            optimizer.zero_grad()
    return _status("VmHWM")


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(key)


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    print(json.dumps(_count(Training(**asked["training"]), short=asked["short"])))
