"""What the launches of these tests run in their workers."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nbaccel.abc.bundle import Bundle
from nbaccel.abc.place import Place
from nbaccel.abc.precision import Precision, PrecisionSettings
from nbaccel.abc.strategy import Strategy
from nbaccel.config.handlers import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradScalerKwargs,
)
from nbaccel.precision.native import Bf16, Fp16, Fp32
from nbaccel.strategies.ddp import DdpStrategy
from nbaccel.strategies.fsdp import FsdpStrategy
from nbaccel.strategies.single import SingleStrategy

PRECISIONS = {"no": Fp32, "bf16": Bf16, "fp16": Fp16}
WORDS, WIDTH = 11, 6


class Block(nn.Module):
    """A residual block with parts of odd sizes, which no two processes can halve."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(torch.relu(self.up(x))))


class Tower(nn.Module):
    """A small language model whose embedding and head are tied."""

    _no_split_modules = ["Block", "NotInThisOne"]  # noqa: RUF012 - as transformers has it

    def __init__(self, blocks: int = 3, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("temperature", torch.ones(()))
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x) / self.temperature


@dataclass
class Recipe:
    """How a training is to go."""

    strategy: str = "ddp"
    optimizer: str = "SGD"
    precision: str = "no"
    settings: dict[str, Any] = field(default_factory=dict)
    steps: int = 3
    accumulate: int = 1
    max_norm: float | None = None
    seed_by_rank: bool = False
    steps_before: int = 0
    """Optimizer steps, each process alone, before anything is wrapped."""
    folder: str = ""


def place() -> Place:
    """Join the gloo group; where this worker is."""
    dist.init_process_group("gloo")
    return Place(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        device=torch.device("cpu"),
        backend="gloo",
    )


def strategy_of(recipe: Recipe, here: Place, precision: Precision) -> Strategy:
    if recipe.strategy == "fsdp":
        settings = FullyShardedDataParallelPlugin(**recipe.settings)
        return FsdpStrategy(here, settings, precision)
    if recipe.strategy == "ddp":
        return DdpStrategy(here, DistributedDataParallelKwargs(**recipe.settings), precision)
    return SingleStrategy(here)


class Training:
    """A model, an optimizer and a strategy; batches depend on step and rank alone."""

    def __init__(self, recipe: Recipe, here: Place) -> None:
        self.recipe, self.place = recipe, here
        torch.manual_seed(here.rank if recipe.seed_by_rank else 0)
        model = Tower()
        make = getattr(torch.optim, recipe.optimizer)
        self.optimizer = make(model.parameters(), lr=0.1)
        for step in range(recipe.steps_before):
            self.loss(model, step, 0).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        kind = PRECISIONS[recipe.precision]
        handlers = {"autocast": AutocastKwargs(), "scaler": GradScalerKwargs(init_scale=1024.0)}
        self.precision = kind(PrecisionSettings(device=here.device, **handlers))
        self.precision.wrap_forward(model)
        self.strategy = strategy_of(recipe, here, self.precision)
        bundle = self.strategy.wrap(Bundle(models=(model,), optimizers=(self.optimizer,)))
        (self.model,) = bundle.models
        self.norms: list[float] = []
        self.losses: list[float] = []

    def loss(self, model: nn.Module, step: int, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        words = torch.randint(0, WORDS, (4, 5), generator=generator)
        logits = model(words)
        assert logits.dtype == torch.float32
        return nn.functional.cross_entropy(logits.flatten(0, 1), words.roll(1).flatten())

    def quiet(self, part: int) -> AbstractContextManager[None]:
        last = part == self.recipe.accumulate - 1
        return nullcontext() if last else self.strategy.no_sync(self.model)

    def run(self, first: int = 0) -> None:
        scaler = self.precision.scaler
        for step in range(first, first + self.recipe.steps):
            for part in range(self.recipe.accumulate):
                with self.quiet(part):
                    loss = self.loss(self.model, 10 * step + part, self.place.rank)
                    (loss if scaler is None else scaler.scale(loss)).backward()
                self.losses.append(loss.item())
            self.step(scaler)

    def step(self, scaler: Any) -> None:
        if scaler is not None:
            scaler.unscale_(self.optimizer)
        if self.recipe.max_norm is not None:
            parameters = self.model.parameters()
            norm = self.strategy.clip_grad_norm(parameters, self.recipe.max_norm)
            assert type(norm) is torch.Tensor
            assert norm.shape == ()
            self.norms.append(norm.item())
        if scaler is None:
            self.optimizer.step()
        else:
            scaler.step(self.optimizer)
            scaler.update()
        self.optimizer.zero_grad()

    def weights(self) -> dict[str, torch.Tensor]:
        state = self.strategy.model_state(self.model)
        return {name: tensor.clone() for name, tensor in state.items()}


def train(recipe: Recipe) -> dict[str, Any]:
    """Train as told; what came of it."""
    training = Training(recipe, place())
    training.run()
    return {
        "losses": training.losses,
        "norms": training.norms,
        "weights": training.weights(),
        "optimizer": training.strategy.optimizer_state(training.model, training.optimizer),
    }
