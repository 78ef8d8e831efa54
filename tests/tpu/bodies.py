"""What the TPU tests run in their workers: light to import, because every worker imports it."""

from __future__ import annotations

import os
import sys
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, get_worker_info

from nbaccel import Accelerator
from nbaccel.plan import registry

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
    for _ in range(epochs):
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
    again: list[float]  # those of the last epoch, after its beginning was loaded again
    judged: list[int]  # targets, as `gather_for_metrics` gave them
    device: str
    is_tied: bool


def train(model: TiedNet, folder: str) -> Seen:
    """Two epochs and one that is kept and done twice; an evaluation whose last batch is padded."""
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATED)
    optimizer = make_optimizer(model)  # of the parameters in host memory
    loader: Any = DataLoader(Rows(*make_data(TRAINED_ROWS)), batch_size=BATCH, num_workers=2)
    judged: Any = DataLoader(TensorDataset(*make_data(JUDGED_ROWS)), batch_size=BATCH)
    net, optimizer, loader, judged = accelerator.prepare(model, optimizer, loader, judged)
    losses = [loss for _ in range(2) for loss in train_epoch(accelerator, net, optimizer, loader)]
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


def step_on_chip(model: nn.Module) -> tuple[str, float]:
    """One training step; the device, and the loss."""
    accelerator = Accelerator()
    net, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss = net(torch.ones(BATCH, WIDTH, device=accelerator.device)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    return str(loss.device), loss.item()


@dataclass
class Programs:
    """What was compiled in one worker: programs before each step, and what each step was called."""

    before_steps: list[int]
    phases: list[str]


def compile_often(model: TiedNet) -> Programs:
    """A short last batch, twice; then another batch size in evaluation; then changing numbers."""
    accelerator = Accelerator()
    sizes = {"short": (18, BATCH), "larger": (12, 6), "even": (24, BATCH)}
    loaders: list[Any] = [
        DataLoader(TensorDataset(*make_data(rows)), batch_size=size)
        for rows, size in sizes.values()
    ]
    net, optimizer, *prepared = accelerator.prepare(model, make_optimizer(model), *loaders)
    short, larger, even = prepared
    seen = Programs([], [])

    def step(words: torch.Tensor, targets: torch.Tensor, shift: int = 0) -> None:
        counts = registry.device("tpu").compile_counts()
        assert counts is not None
        seen.before_steps.append(counts.programs)
        seen.phases.append(accelerator.gradient_state.compile_phase)
        scores = net(words)
        if shift:
            # A number of Python that is part of the program, and changes nothing in the loss.
            scores, targets = scores.roll(shift, 0), targets.roll(shift, 0)
        loss = nn.functional.cross_entropy(scores, targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": loss.item()})

    for _ in range(2):
        for words, targets in accelerator.progress(short):
            step(words, targets)
    sys.stderr.write("now larger\n")
    with torch.no_grad():
        for words, _ in larger:
            net(words)
    sys.stderr.write("now numbers\n")
    for shift, (words, targets) in enumerate(even, 1):
        step(words, targets, shift)
    return seen


def move_with_all_that_hangs_on_it() -> dict[str, bool]:
    """Move a model that is tied, hooked, referred to and has gradients."""
    from nbaccel.devices.tpu.drivers import move_parameters

    device = Accelerator().device
    net = make_net()
    net.register_buffer("table", torch.arange(4.0))
    net.body.register_buffer("same_table", net.table)
    words, targets = make_data(BATCH)
    nn.functional.cross_entropy(net(words), targets).backward()
    optimizer = make_optimizer(net)
    weight, gradient = net.body.weight, net.body.weight.grad
    expected, expected_gradient = weight.detach().clone(), gradient.clone()
    reference, identities = weakref.ref(weight), [id(one) for one in net.parameters()]
    calls: list[str] = []
    weight.register_post_accumulate_grad_hook(lambda one: calls.append(one.device.type))
    move_parameters(net, device)
    moved = {
        "objects": [id(one) for one in net.parameters()] == identities,
        "reference": reference() is net.body.weight,
        "ties": net.head.weight is net.embedding.weight,
        "buffers": net.table is net.body.same_table and net.table.device == device,
        "values": torch.equal(net.body.weight.detach().cpu(), expected),
        "gradients": torch.equal(net.body.weight.grad.cpu(), expected_gradient),
        "optimizer": optimizer.param_groups[0]["params"][0] is next(net.parameters()),
        "device": all(one.device == device for one in net.parameters()),
    }
    nn.functional.cross_entropy(net(words.to(device)), targets.to(device)).backward()
    before = net.body.weight.detach().cpu()
    optimizer.step()
    moved["hooks"] = calls == [device.type]
    moved["trains"] = not torch.equal(net.body.weight.detach().cpu(), before)
    return moved


def where_it_is(model: nn.Module) -> str:
    """The device of a model that was prepared."""
    return str(next(Accelerator().prepare(model).parameters()).device)


def place_in_turn(folder: str) -> tuple[float, float]:
    """Place a model where host memory is short; when the copying began and ended."""
    from nbaccel.devices.tpu import device as device_module

    accelerator = Accelerator()
    times: list[float] = []
    move = device_module.move_parameters

    def move_slowly(module: nn.Module, device: torch.device) -> None:
        times.append(time.monotonic())
        move(module, device)
        time.sleep(0.5)
        times.append(time.monotonic())

    device_module.free_host_bytes = lambda: 0
    device_module._TURN_FILE = Path(folder) / "turn"
    device_module.move_parameters = move_slowly
    accelerator.wait_for_everyone()
    accelerator.prepare(make_net())
    began, ended = times
    return began, ended


def try_collectives_of_torch(imported_by_notebook: Any) -> dict[str, str]:
    """What torch says to collectives of tensors on the chip, over gloo; its `all_reduce` is given.

    Each one would have to change what it is given, or fail on every rank.
    """
    from torch.distributed import distributed_c10d as torchs

    accelerator = Accelerator()
    twice = torch.zeros(RANKS * 2, device=accelerator.device)
    collectives = {
        "from the notebook": imported_by_notebook,
        "all_reduce": torch.distributed.all_reduce,
        "broadcast": lambda own: torchs.broadcast(own, 0),
        "reduce": lambda own: torchs.reduce(own, 0),
        "all_gather": lambda own: torchs.all_gather(list(twice.chunk(RANKS)), own),
        "all_gather_into_tensor": lambda own: torchs.all_gather_into_tensor(twice, own),
        "reduce_scatter_tensor": lambda own: torchs.reduce_scatter_tensor(own, twice),
        "all_to_all_single": lambda own: torchs.all_to_all_single(torch.empty_like(own), own),
    }
    answers = {}
    for name, collective in collectives.items():
        own = torch.full((2,), accelerator.process_index + 1.0, device=accelerator.device)
        try:
            collective(own)
        except Exception as error:
            answers[name] = f"{type(error).__name__}: {error}"
        else:
            answers[name] = f"returned, with {own.tolist()}"
    return answers
