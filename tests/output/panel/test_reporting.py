"""What a training loop tells, through real launches: by `log` and `progress`, and nothing else."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from nbaccel import Accelerator, Pool, WorkerFailed, notebook_launcher
from nbaccel.devices.cpu_xpu_mps import CpuDevice
from nbaccel.loops import loop_watch, metrics_reporter
from nbaccel.workers import messaging

Launch = Callable[..., Any]


@pytest.fixture(params=["template", "fork"])
def launch(request: pytest.FixtureRequest) -> Launch:
    def two(function: Callable[..., Any], *args: Any) -> Any:
        return notebook_launcher(function, args, 2, start_method=request.param)

    return two


def test_what_is_logged_is_told_without_a_tracker_and_the_last_is_never_lost(launch, seen):
    def train() -> None:
        accelerator = Accelerator()
        assert accelerator.trackers == []
        for i in range(1, 101):
            accelerator.log({"loss": 1 / i + accelerator.process_index, "lr": 0.5})

    launch(train)
    for rank in (0, 1):
        facts = seen.board.ranks[rank]
        assert facts.told.steps == 100
        assert facts.metrics == {"loss": 0.01 + rank, "lr": 0.5}
        assert facts.loss.last == 0.01 + rank
        messages = seen.messages_of(rank)
        assert 1 < len(messages) < 20, "a hundred calls are not a hundred messages"
        assert messages[0].steps == 1


def test_a_value_is_a_point_at_the_step_of_its_report_and_a_step_is_a_batch(seen):
    def train() -> None:
        accelerator = Accelerator()
        net = accelerator.prepare_model(nn.Linear(2, 1))
        for number, batch in enumerate(accelerator.progress([torch.ones(3, 2)] * 40)):
            accelerator.backward(net(batch).square().mean())
            if number in (0, 20):
                accelerator.log({"rare": float(number)})
            accelerator.log({"often": float(number)})
            accelerator.log({"train_loss": 7.0}, step=1000)
            time.sleep(0.03)

    notebook_launcher(train, (), 2)
    for rank, facts in seen.board.ranks.items():
        assert [y for _, y in facts.histories["rare"].points()] == [0.0, 20.0]
        often = facts.histories["often"].points()
        assert len(often) > 2
        assert all(step == value for step, value in often)
        assert facts.told.steps == 40
        assert (facts.loss_name, facts.loss.last) == ("train_loss", 7.0)
        times = [message.time for message in seen.messages_of(rank)]
        assert 6 <= len(times) <= 12, "forty steps are not forty messages"
        # Those of the beginning, and the last one, may come at once.
        gaps = [b - a for a, b in itertools.pairwise(times[4:-1])]
        assert min(gaps) >= metrics_reporter.REPORT_INTERVAL_S


def test_only_numbers_of_the_rank_itself_are_told_and_no_device_is_waited_for(launch, seen):
    def train() -> None:
        accelerator = Accelerator()
        accelerator.log(
            {
                "loss": torch.tensor(2.5, requires_grad=True),
                "elsewhere": torch.ones((), device="meta"),  # reading it raises
                "many": torch.ones(2),
                "text": "abc",
                "nothing": None,
                "yes": True,
                "nan": math.nan,
                "inf": torch.tensor(math.inf),
            },
            step=5,
        )
        child = os.fork()
        if child == 0:
            accelerator.log({"loss": 99.0}, step=99)
            metrics_reporter.flush()
            os._exit(0)
        os.waitpid(child, 0)
        accelerator.log({f"{i}" * 500: float(i) for i in range(1, 3000)}, step=5)

    launch(train)
    messages = seen.messages_of(0)
    first, last = messages[0], messages[-1]
    told = {name: points[-1][1] for name, points in first.points}
    assert math.isnan(told.pop("nan"))
    assert told == {"loss": 2.5, "yes": 1.0, "inf": math.inf}
    assert {message.steps for _, message in seen.heard} == {5}
    names = list(dict.fromkeys((f"{i}" * 500)[:60] for i in range(1, 3000)))
    kept = dict.fromkeys(name for message in messages for name, _ in message.points)
    assert [*kept][-12:] == names[:12]
    assert (len(kept), last.num_left_out) == (16, len(names) - 12)
    assert list(last.left_out) == names[12:20]


def test_a_rank_that_fails_has_told_its_last_loss(seen):
    def train() -> None:
        accelerator = Accelerator()
        accelerator.log({"loss": 1.0})
        accelerator.log({"loss": math.nan})
        raise ValueError("diverged")

    with pytest.raises(WorkerFailed, match="diverged"):
        notebook_launcher(train, (), 2)
    losses = [facts.loss.last for facts in seen.board.ranks.values() if facts.loss.last is not None]
    assert losses
    assert any(math.isnan(loss) for loss in losses)
    assert seen.board.ending == "failed"


def test_in_live_workers_each_cell_counts_from_its_start(seen):
    with Pool(2, namespace={}) as pool:
        pool.run(
            "from nbaccel import Accelerator\n"
            "accelerator = Accelerator()\n"
            "for i in range(30): accelerator.log({'loss': i})"
        )
        assert [facts.told.steps for facts in seen.board.ranks.values()] == [30, 30]
        pool.run("for i in range(3): accelerator.log({'loss': i})")
        assert [facts.told.steps for facts in seen.board.ranks.values()] == [3, 3]
        assert [facts.loss.last for facts in seen.board.ranks.values()] == [2.0, 2.0]

        def train() -> None:
            Accelerator().log({"loss": 0.5}, step=77)

        pool.call(train)
        assert [facts.told.steps for facts in seen.board.ranks.values()] == [77, 77]


def test_a_notebook_that_does_not_listen_holds_no_worker_up():
    ours, theirs = messaging.Channel.pair()
    reporter = metrics_reporter.Reporter(theirs, CpuDevice(), "cpu")
    while theirs.try_send("filled"):
        pass
    began = time.monotonic()
    for i in range(10):
        reporter._next = 0.0
        reporter.log({"loss": float(i)}, None)
    assert time.monotonic() - began < 1.0
    while True:
        message, _ = ours.receive()
        if not theirs.try_send("end"):
            continue
        break
    while message != "end":
        message, _ = ours.receive()
    reporter.flush()
    message, _ = ours.receive()
    assert message.steps == 10
    assert message.points == (("loss", tuple((i + 1.0, float(i)) for i in range(10))),)
    reporter.flush()  # nothing new: nothing is sent
    theirs.close()
    with pytest.raises(EOFError):
        ours.receive()
    reporter.log({"loss": 1.0}, None)  # the notebook is gone: no failure of the training
    ours.close()


def test_rounds_of_a_loop_over_epochs_are_no_steps_and_say_how_far_the_training_is(launch, seen):
    def train() -> None:
        accelerator = Accelerator()
        for _ in accelerator.progress(range(3), "epochs"):
            for _ in accelerator.progress([torch.ones(5, 2)] * 4):
                pass
            for _ in accelerator.progress([torch.ones(5, 2)] * 2, "evaluation"):
                pass

    launch(train)
    for rank in (0, 1):
        facts = seen.board.ranks[rank]
        assert (facts.told.steps, facts.told.samples) == (18, 90)
        assert facts.told.outer is not None
        assert (facts.told.outer.done, facts.told.outer.total, facts.told.outer.done_steps) == (
            3,
            3,
            18,
        )
        first = next(message for message in seen.messages_of(rank) if message.outer is not None)
        assert (first.outer.done, first.outer.round_steps) == (0, 0)
        marks = [step for step, _ in facts.marks]
        assert marks == sorted(set(marks)), "the two loops that begin at step 0 have one mark"


@pytest.mark.slow
def test_a_trainer_of_transformers_says_that_its_bar_is_that_of_the_whole_training(seen, tmp_path):
    pytest.importorskip("transformers")

    def train() -> None:
        from transformers import Trainer, TrainingArguments

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(2, 1)

            def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
                return {"loss": self.layer(x).square().mean()}

        arguments = TrainingArguments(
            str(tmp_path), num_train_epochs=2, report_to=[], save_strategy="no", use_cpu=True
        )
        Trainer(Model(), arguments, train_dataset=[{"x": torch.ones(2)}] * 32).train()

    notebook_launcher(train, (), 2)
    for rank in (0, 1):
        told = [message.bar_is_whole for message in seen.messages_of(rank)]
        assert told[0] is True
        assert told[-1] is False


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


def test_a_plain_loop_is_seen(seen, monkeypatch):
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
        first, *_, last = (loss for _, loss in facts.loss.points())
        assert last == facts.loss.last < first
    monkeypatch.setenv(loop_watch.SWITCH, "0")
    notebook_launcher(plain_loop, (nn.Linear(2, 1),), 2)
    assert {facts.told.steps for facts in seen.board.ranks.values()} == {None}


def test_the_loop_of_an_accelerator_is_seen_once_and_in_the_user_s_scale(seen):
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


def test_what_is_logged_takes_the_place_of_what_was_seen(seen):
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


def test_one_process_is_seen_and_leaves_no_hook_and_without_a_launch_nobody_is_told(seen, capsys):
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

    accelerator = Accelerator(cpu=True)
    accelerator.log({"loss": 1.0})
    assert list(accelerator.progress([torch.ones(1)])) == [torch.ones(1)]
    assert metrics_reporter._process_reporter is None
