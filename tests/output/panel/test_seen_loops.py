"""Loops of code that reports nothing are seen: steps, loss, rate, batches, and each once."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from nbaccel import Accelerator, notebook_launcher
from nbaccel.loops import loop_watch
from tests.output.panel.conftest import Seen

SAMPLES, EPOCHS, BATCH = 64, 3, 8


def loader() -> DataLoader[tuple[torch.Tensor, ...]]:
    return DataLoader(TensorDataset(torch.ones(SAMPLES, 2), torch.zeros(SAMPLES, 1)), BATCH)


def plain_loop(net: nn.Module) -> None:
    dist.init_process_group("gloo")
    net = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(EPOCHS):
        for inputs, targets in loader():
            loss = nn.functional.mse_loss(net(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
    dist.destroy_process_group()


def test_a_plain_loop_is_seen(seen: Seen) -> None:
    notebook_launcher(plain_loop, (nn.Linear(2, 1),), 2)
    for facts in seen.board.ranks.values():
        steps = EPOCHS * SAMPLES // BATCH
        assert (facts.told.steps, facts.told.samples) == (steps, EPOCHS * SAMPLES)
        assert (facts.told.epoch, facts.told.batches, facts.told.total_batches) == (3, 8, 8)
        assert facts.told.loop_is_seen
        assert facts.told.had_group
        assert [step for step, _ in facts.loss.points()] == [*range(1, steps + 1)], "each step's"
        rates = facts.histories["learning rate"].points()
        assert [value for _, value in rates] == [0.05, 0.025]
        assert facts.loss.first is not None
        assert facts.loss.last is not None
        assert facts.loss.last < facts.loss.first


def test_the_loop_of_an_accelerator_is_seen_once_and_in_the_user_s_scale(seen: Seen) -> None:
    def train(net: nn.Module) -> None:
        accelerator = Accelerator(gradient_accumulation_steps=2)
        optimizer = torch.optim.SGD(net.parameters(), 0.0)
        net, optimizer, batches = accelerator.prepare(net, optimizer, loader())
        for _ in range(EPOCHS):
            for inputs, _ in batches:
                with accelerator.accumulate(net):
                    accelerator.backward(7.0 + 0.0 * net(inputs).mean())
                    optimizer.step()
                    optimizer.zero_grad()

    notebook_launcher(train, (nn.Linear(2, 1),), 2)
    for facts in seen.board.ranks.values():
        per_rank = SAMPLES // 2
        assert facts.told.samples == EPOCHS * per_rank
        assert facts.told.steps == EPOCHS * per_rank // BATCH // 2, "of the optimizer"
        assert (facts.told.epoch, facts.told.batches) == (EPOCHS, per_rank // BATCH)
        assert {value for _, value in facts.loss.points()} == {7.0}


def test_what_is_logged_takes_the_place_of_what_was_seen(seen: Seen) -> None:
    def train() -> None:
        weight = nn.Parameter(torch.ones(()))
        optimizer = torch.optim.SGD([weight], 0.0)
        accelerator = Accelerator()
        for step in range(1, 21):
            (weight * 5.0).backward()
            optimizer.step()
            if step % 10 == 0:
                accelerator.log({"train_loss": 2.0, "epoch": 1, "lr": 0.1}, step=step)

    notebook_launcher(train, (), 2)
    for facts in seen.board.ranks.values():
        assert facts.loss_name == "train_loss"
        assert facts.loss.points() == [(10.0, 2.0), (20.0, 2.0)]
        assert set(facts.histories) == {"train_loss", "lr"}, "epochs are what it is drawn over"
        assert facts.told.steps == 20


def test_a_loop_of_progress_counts_its_own_batches(seen: Seen) -> None:
    def train(net: nn.Module) -> None:
        accelerator = Accelerator()
        net, batches = accelerator.prepare(net, loader())
        for inputs, _ in accelerator.progress(batches):
            accelerator.backward(net(inputs).mean())

    notebook_launcher(train, (nn.Linear(2, 1),), 2)
    for facts in seen.board.ranks.values():
        assert facts.told.steps == facts.told.batches == SAMPLES // 2 // BATCH
        assert (facts.told.epoch, facts.told.loop_is_seen) == (1, False)
        assert facts.told.samples == SAMPLES // 2


def test_within_a_loop_over_epochs_steps_are_those_of_the_optimizer(seen: Seen) -> None:
    def train(net: nn.Module) -> None:
        accelerator = Accelerator()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        net, optimizer, batches = accelerator.prepare(net, optimizer, loader())
        for _ in accelerator.progress(range(EPOCHS)):
            for inputs, _ in batches:
                accelerator.backward(net(inputs).mean())
                optimizer.step()

    notebook_launcher(train, (nn.Linear(2, 1),), 2)
    for facts in seen.board.ranks.values():
        assert facts.told.steps == EPOCHS * SAMPLES // 2 // BATCH


def test_a_spike_of_one_step_is_seen(seen: Seen) -> None:
    def train() -> None:
        weight = nn.Parameter(torch.ones(()))
        optimizer = torch.optim.SGD([weight], 0.0)
        for step in range(300):
            (weight * (100.0 if step == 150 else 1.0)).backward()
            optimizer.step()

    notebook_launcher(train, (), 2)
    for facts in seen.board.ranks.values():
        assert len(facts.loss.points()) == 300
        assert facts.loss.points()[150] == (151.0, 100.0)
        assert not facts.told.had_group, "each has trained alone"


def test_one_process_is_seen_and_leaves_no_hook(seen: Seen, capsys: object) -> None:
    plain = torch.autograd.backward

    def train(net: nn.Module) -> int:
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for inputs, _ in loader():
            net(inputs).mean().backward()
            optimizer.step()
        return loop_watch.__dict__["_watch"].is_on

    results = notebook_launcher(train, (nn.Linear(2, 1),), 1)
    assert results == [True]
    assert torch.autograd.backward is plain
    assert results.report().facts.ranks[0].steps == SAMPLES // BATCH
    assert results.report().facts.metric_names == ["loss"]


def test_one_switch_turns_it_off(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(loop_watch.SWITCH, "0")
    notebook_launcher(plain_loop, (nn.Linear(2, 1),), 2)
    assert {facts.told.steps for facts in seen.board.ranks.values()} == {None}
