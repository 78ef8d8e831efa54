"""A language model of bytes, trained in each of the ways of FP8 on sources of the standard library.

The output layer shares the embedding's weight and computes in bfloat16; all other linear layers
have sizes that 16 divides and compute in 8 bits.
"""

from __future__ import annotations

import io
import sysconfig
import time
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import nn

WIDTH, HEADS, LAYERS = 128, 4, 2
BATCH, LENGTH = 16, 64
LEARNING_RATE = 1e-3
CORPUS_BYTES = 4_000_000
VALIDATION_SHARE = 0.1
VALIDATION_BATCHES = 40


@dataclass(frozen=True)
class Way:
    """A row: a precision with its settings."""

    name: str
    precision: str = "fp8"
    settings: dict[str, Any] = field(default_factory=dict)


WAYS = (
    Way("fp32", "no"),
    Way("bf16", "bf16"),
    Way("torchao, current", settings={"backend": "ao"}),
    Way("native, current", settings={"backend": "native", "recipe": "current"}),
    Way("native, delayed", settings={"backend": "native", "recipe": "delayed"}),
    Way("MS-AMP's O1", settings={"backend": "msamp", "opt_level": "O1"}),
    Way("MS-AMP's O2", settings={"backend": "msamp", "opt_level": "O2"}),
)


def corpus() -> torch.Tensor:
    """The first bytes of the standard library's modules, by name: ``[n]``, uint8."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(text[:CORPUS_BYTES]), dtype=torch.uint8)


class Block(nn.Module):
    """Attention and a feed-forward part, each behind a LayerNorm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """``[batch, length, width]`` to the same."""
        batch, length, width = values.shape
        parts = self.attention_in(self.before_attention(values)).chunk(3, dim=-1)
        query, key, value = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        values = values + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        return values + self.mlp_out(F.gelu(self.mlp_in(self.before_mlp(values))))


class LanguageModel(nn.Module):
    """Predicts the next byte."""

    def __init__(
        self, width: int = WIDTH, heads: int = HEADS, layers: int = LAYERS, length: int = LENGTH
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[batch, length]`` to ``[batch, length, 256]``."""
        values = self.embedding(tokens) + self.position
        return F.linear(self.norm(self.blocks(values)), self.embedding.weight)


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the next byte; rows are one byte longer than what the model reads."""
    logits = model(rows[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


class Batches:
    """Rows of the text: the same for every way, with the same seed."""

    def __init__(self, seed: int) -> None:
        self._text = corpus().long()
        self._end = int(len(self._text) * (1 - VALIDATION_SHARE))
        self._generator = torch.Generator().manual_seed(seed)

    def training(self) -> torch.Tensor:
        """A batch: ``[16, 65]``."""
        starts = torch.randint(self._end - LENGTH - 1, (BATCH,), generator=self._generator)
        return self._rows(starts)

    def validation(self) -> list[torch.Tensor]:
        """Batches that training has not seen, the same for all seeds."""
        generator = torch.Generator().manual_seed(0)
        size = (VALIDATION_BATCHES, BATCH)
        starts = torch.randint(self._end, len(self._text) - LENGTH - 1, size, generator=generator)
        return [self._rows(row) for row in starts]

    def _rows(self, starts: torch.Tensor) -> torch.Tensor:
        return torch.stack([self._text[start : start + LENGTH + 1] for start in starts.tolist()])


def train(way: Way, seed: int, steps: int) -> dict[str, float]:
    """Train by one way, in one process or as one of several that share each batch.

    Returns:
        ``loss`` on the validation rows, and ``cpu_ms`` of this process per step.
    """
    from nbaccel import Accelerator
    from nbaccel.utils import FP8RecipeKwargs

    torch.set_num_threads(1)
    # One line per training says which layers compute in 8 bits.
    with redirect_stderr(io.StringIO()):
        handlers = [FP8RecipeKwargs(skip_first_and_last=False, **way.settings)]
        accelerator = Accelerator(
            cpu=True,
            mixed_precision=way.precision,
            kwargs_handlers=handlers if way.precision == "fp8" else [],
        )
        torch.manual_seed(seed)
        model: Any = LanguageModel()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        model, optimizer = accelerator.prepare(model, optimizer)
    batches = Batches(seed)
    began = time.process_time()
    for _ in range(steps):
        accelerator.backward(loss_of(model, batches.training()))
        optimizer.step()
        optimizer.zero_grad()
    cpu_ms = (time.process_time() - began) / steps * 1e3
    return {"loss": evaluate(model, batches), "cpu_ms": cpu_ms}


def evaluate(model: nn.Module, batches: Batches) -> float:
    """The mean loss on the validation rows."""
    model.eval()
    with torch.no_grad():
        losses = [float(loss_of(model, rows)) for rows in batches.validation()]
    return sum(losses) / len(losses)
