"""Tokens per second and memory on a GPU: each way of FP8 beside bf16, and the libraries' own loops.

Eager and compiled, each with a model of a size for it: eager, casts cost less beside wide layers'
products; compiled, few layers make the compiler quick.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from harness.fp8_training import LanguageModel, loss_of

WARM_STEPS, STEPS = 5, 20


@dataclass(frozen=True)
class Mode:
    """A column: a size of the model, and whether `torch.compile` translates it."""

    name: str
    is_compiled: bool
    width: int
    heads: int
    layers: int
    length: int = 1024
    batch: int = 8

    @property
    def title(self) -> str:
        return (
            f"{self.name}, width {self.width}, {self.layers} layers, {self.batch} x {self.length}"
        )


MODES = {
    False: (Mode("eager", False, 2048, 16, 8), Mode("compiled", True, 3072, 24, 2)),
    True: (Mode("eager", False, 64, 4, 2, 32, 2), Mode("compiled", True, 64, 4, 1, 32, 2)),
}
"""Of a quick run: True."""

TORCHAO_ALONE = "torchao, its own loop"
ENGINE_ALONE = "TransformerEngine, its own loop"
WAYS: dict[str, dict[str, Any] | None] = {
    "bf16": None,
    TORCHAO_ALONE: None,
    "nbaccel, torchao": {"backend": "ao"},
    "nbaccel, native, current": {"backend": "native"},
    "nbaccel, native, delayed": {"backend": "native", "recipe": "delayed", "amax_history_len": 16},
    ENGINE_ALONE: None,
    "nbaccel, TransformerEngine": {"backend": "te"},
    "nbaccel, MS-AMP's O1": {"backend": "msamp", "opt_level": "O1"},
    "nbaccel, MS-AMP's O2": {"backend": "msamp", "opt_level": "O2"},
}


def measure_in_worker(way: str, mode: Mode, device: str) -> dict[str, float]:
    """In a process of its own, which gives all memory back."""
    from nbaccel import notebook_launcher

    (found,) = notebook_launcher(measure, (way, mode, device), 1, start_method="template")
    return dict(found)


def measure(way: str, mode: Mode, device: str) -> dict[str, float]:
    torch.manual_seed(0)
    model = LanguageModel(mode.width, mode.heads, mode.layers, mode.length)
    if way == TORCHAO_ALONE:
        step = _torchaos_step(model.to(device), device, is_compiled=mode.is_compiled)
    elif way == ENGINE_ALONE:
        step = _engines_step(model.to(device))
    else:
        step = _our_step(model, WAYS[way], is_compiled=mode.is_compiled)
    rows = torch.randint(256, (mode.batch, mode.length + 1), device=device)
    for _ in range(WARM_STEPS):
        step(rows)
    _finish(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    for _ in range(STEPS):
        step(rows)
    _finish(device)
    seconds = time.perf_counter() - began
    return {
        "tokens_per_s": STEPS * mode.batch * mode.length / seconds,
        "peak_bytes": float(torch.cuda.max_memory_allocated() if device == "cuda" else 0),
    }


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _our_step(
    model: nn.Module, fp8: dict[str, Any] | None, *, is_compiled: bool
) -> Callable[[torch.Tensor], None]:
    from nbaccel import Accelerator
    from nbaccel.utils import FP8RecipeKwargs

    accelerator = Accelerator(
        mixed_precision="fp8" if fp8 else "bf16",
        # The peers convert all layers.
        kwargs_handlers=[FP8RecipeKwargs(skip_first_and_last=False, **fp8)] if fp8 else [],
        dynamo_backend="inductor" if is_compiled else "no",
    )
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
    prepared, optimizer = accelerator.prepare(model, optimizer)

    def step(rows: torch.Tensor) -> None:
        accelerator.backward(loss_of(prepared, rows))
        optimizer.step()
        optimizer.zero_grad()

    return step


def _torchaos_step(
    model: nn.Module, device: str, *, is_compiled: bool
) -> Callable[[torch.Tensor], None]:
    """The peer: torchao's layers under torch's autocast, without nbaccel."""
    from torchao.float8 import convert_to_float8_training

    model = convert_to_float8_training(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if is_compiled:
        model.compile()

    def step(rows: torch.Tensor) -> None:
        with torch.autocast(device, torch.bfloat16):
            loss = loss_of(model, rows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _engines_step(model: nn.Module) -> Callable[[torch.Tensor], None]:
    """The other peer: TransformerEngine's layers and autocast; its kernels need no compiler."""
    import transformer_engine.pytorch as engine
    from transformer_engine.common.recipe import DelayedScaling

    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, nn.Linear):
                other = engine.Linear(layer.in_features, layer.out_features, bias=False)
                other.weight.data.copy_(layer.weight)
                setattr(parent, name, other)
            elif isinstance(layer, nn.LayerNorm):
                setattr(parent, name, engine.LayerNorm(layer.normalized_shape[0]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    recipe = DelayedScaling()

    def step(rows: torch.Tensor) -> None:
        with (
            torch.autocast("cuda", torch.bfloat16),
            engine.fp8_autocast(enabled=True, fp8_recipe=recipe),
        ):
            loss = loss_of(model, rows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
