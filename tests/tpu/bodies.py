"""What the TPU tests run in their workers: light to import, because every worker imports it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, get_worker_info

from nbaccel import Accelerator

WORDS, WIDTH, LENGTH = 32, 16, 6
RANKS, BATCH, ACCUMULATED = 2, 4, 2
TRAINED_ROWS, JUDGED_ROWS = 32, 26
FOREVER_S = 600.0  # far beyond the time any test may take: to hang, and to be found out


class TiedNet(nn.Module):
    """Guesses a word from others; input and output share their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """[rows, LENGTH] of words to [rows, WORDS] of scores."""
        scores: torch.Tensor = self.head(torch.tanh(self.body(self.embedding(words))))
        return scores.mean(1)


class Rows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Rows that only processes of a DataLoader can read."""

    def __init__(self, words: torch.Tensor, targets: torch.Tensor) -> None:
        self._words, self._targets = words, targets

    def __len__(self) -> int:
        return len(self._words)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert get_worker_info() is not None
        return self._words[index], self._targets[index]


def make_data(num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Words and targets, the same at every call."""
    generator = torch.Generator().manual_seed(num_rows)
    words = torch.randint(WORDS, (num_rows, LENGTH), generator=generator)
    return words, words[:, 0].clone()


def make_net() -> TiedNet:
    """A model with the same weights at every call."""
    torch.manual_seed(0)
    return TiedNet()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def train_whole(model: nn.Module, epochs: int) -> list[float]:
    """One replica on the CPU, on the batches of all ranks together; the losses."""
    optimizer = make_optimizer(model)
    words, targets = make_data(TRAINED_ROWS)
    losses = []
    for epoch in range(epochs):
        for number, rows in enumerate(torch.arange(TRAINED_ROWS).split(RANKS * BATCH), 1):
            loss = nn.functional.cross_entropy(model(words[rows]), targets[rows])
            (loss / ACCUMULATED).backward()
            losses.append(loss.item())
            if number % ACCUMULATED == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
    return losses


def train_epoch(
    accelerator: Accelerator, model: nn.Module, optimizer: Any, loader: Any
) -> list[float]:
    """Train once over a loader; the losses, averaged over ranks."""
    losses = []
    for words, targets in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(words), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            gathered: Any = accelerator.gather(loss.detach())
            losses.append(gathered.mean().item())
    return losses


@dataclass
class Seen:
    """What a rank has seen."""

    losses: list[float]
    again: list[float]
    """Those of the last epoch, after its beginning was loaded again."""
    judged: list[int]
    """Targets, as `gather_for_metrics` gave them."""
    device: str
    is_tied: bool


def train(model: TiedNet, folder: str) -> Seen:
    """Two epochs and one that is kept and done twice; an evaluation whose last batch is padded."""
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATED)
    optimizer = make_optimizer(model)  # of the parameters in host memory
    loader: Any = DataLoader(Rows(*make_data(TRAINED_ROWS)), batch_size=BATCH, num_workers=2)
    judged: Any = DataLoader(TensorDataset(*make_data(JUDGED_ROWS)), batch_size=BATCH)
    net, optimizer, loader, judged = accelerator.prepare(model, optimizer, loader, judged)
    losses = [
        loss for _ in range(2) for loss in train_epoch(accelerator, net, optimizer, loader)
    ]
    accelerator.save_state(folder)
    last = train_epoch(accelerator, net, optimizer, loader)
    accelerator.load_state(folder)
    again = train_epoch(accelerator, net, optimizer, loader)
    targets: list[int] = []
    with torch.no_grad():
        for words, wanted in judged:
            scores, found = accelerator.gather_for_metrics((net(words), wanted))
            assert len(scores) == len(found)
            targets += found.tolist()
    return Seen(
        losses=losses + last,
        again=again,
        judged=targets,
        device=str(model.body.weight.device),
        is_tied=model.head.weight is model.embedding.weight,
    )


def train_in_bf16(model: TiedNet) -> tuple[list[float], str, str]:
    """One epoch; losses, the data type of an output inside of autocast, that of the weights."""
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATED, mixed_precision="bf16")
    loader: Any = DataLoader(TensorDataset(*make_data(TRAINED_ROWS)), batch_size=BATCH)
    net, optimizer, loader = accelerator.prepare(model, make_optimizer(model), loader)
    losses = train_epoch(accelerator, net, optimizer, loader)
    with accelerator.autocast():
        inner = model.body(torch.zeros(BATCH, WIDTH, device=accelerator.device))
    return losses, str(inner.dtype), str(model.body.weight.dtype)


def fail_on_rank_1(model: TiedNet) -> None:
    """Train a step; then one rank is at fault, and the other waits for it."""
    accelerator = Accelerator()
    net, optimizer = accelerator.prepare(model, make_optimizer(model))
    words, targets = (one[:BATCH].to(accelerator.device) for one in make_data(TRAINED_ROWS))
    accelerator.backward(nn.functional.cross_entropy(net(words), targets))
    optimizer.step()
    if accelerator.process_index == 1:
        raise LookupError("no page 7 in this book")
    accelerator.wait_for_everyone()


def wait_to_be_stopped(model: TiedNet, folder: str) -> None:
    """Change the weights on the chip, tell that, and wait."""
    accelerator = Accelerator()
    net = accelerator.prepare(model)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    float(next(net.parameters()).sum())
    (Path(folder) / f"rank-{os.environ['RANK']}").touch()
    time.sleep(FOREVER_S)
