"""Tokens per second and memory on a GPU: each way of FP8 beside bf16, and torchao's own loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from harness.fp8_training import LanguageModel, loss_of

WIDTH, HEADS, LAYERS, LENGTH, BATCH = 2048, 16, 8, 1024, 8
QUICK = (256, 4, 2, 128, 2)
WARM_STEPS, STEPS = 5, 20

WAYS: dict[str, dict[str, Any] | None] = {
    "bf16": None,
    "torchao, its own loop": None,
    "torchao": {"backend": "ao"},
    "native, current": {"backend": "native"},
    "native, delayed": {"backend": "native", "recipe": "delayed", "amax_history_len": 16},
    "MS-AMP's O1": {"backend": "msamp", "opt_level": "O1"},
    "MS-AMP's O2": {"backend": "msamp", "opt_level": "O2"},
}


def measure_in_worker(way: str, *, quick: bool) -> dict[str, float]:
    """In a process of its own, which gives all memory back."""
    from nbaccel import notebook_launcher

    (found,) = notebook_launcher(measure, (way, quick), 1, start_method="template")
    return dict(found)


def measure(way: str, quick: bool) -> dict[str, float]:
    width, heads, layers, length, batch = QUICK if quick else (WIDTH, HEADS, LAYERS, LENGTH, BATCH)
    torch.manual_seed(0)
    model = LanguageModel(width, heads, layers, length)
    step = _torchaos_step(model) if way == "torchao, its own loop" else _our_step(model, WAYS[way])
    rows = torch.randint(256, (batch, length + 1), device="cuda")
    for _ in range(WARM_STEPS):
        step(rows)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    for _ in range(STEPS):
        step(rows)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    return {
        "tokens_per_s": STEPS * batch * length / seconds,
        "peak_bytes": float(torch.cuda.max_memory_allocated()),
    }


def _our_step(model: torch.nn.Module, fp8: dict[str, Any] | None) -> Callable[[torch.Tensor], None]:
    from nbaccel import Accelerator
    from nbaccel.utils import FP8RecipeKwargs

    if fp8 is None:
        accelerator = Accelerator(mixed_precision="bf16")
    else:
        handlers = [FP8RecipeKwargs(**fp8)]
        accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=handlers)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
    prepared, optimizer = accelerator.prepare(model, optimizer)

    def step(rows: torch.Tensor) -> None:
        accelerator.backward(loss_of(prepared, rows))
        optimizer.step()
        optimizer.zero_grad()

    return step


def _torchaos_step(model: torch.nn.Module) -> Callable[[torch.Tensor], None]:
    """The peer: torchao's layers under torch's autocast, without nbaccel."""
    from torchao.float8 import convert_to_float8_training

    model = convert_to_float8_training(model.cuda())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(rows: torch.Tensor) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_of(model, rows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
