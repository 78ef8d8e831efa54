"""A launch that goes on after a Stop ends with the bits of one that was not stopped."""

from __future__ import annotations

import itertools
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from nbaccel import Accelerator, ProjectConfiguration, RunConfig, notebook_launcher, resolve
from nbaccel.calls import launched_functions
from nbaccel.errors import ConfigError, LaunchInterrupted
from nbaccel.workers import time_limits
from tests.calls.test_stop_at_step import pressing_stop
from tests.strategies.needs import SHARDING

EPOCHS = 4
BATCHES = 16


class Noisy(Dataset[Any]):
    """Rows that are other ones each time they are read."""

    def __init__(self, size: int) -> None:
        self._rows = torch.randn(size, 6, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = self._rows[index]
        return row + 0.1 * torch.rand(6), row.sum(0, keepdim=True)


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 1))


def train(model: nn.Module, seen: Path | None, wait_at: int, form: str = "progress") -> Any:
    """Train for some epochs; from a step on the notebook is told, and each takes a while."""
    project = ProjectConfiguration(str(seen), automatic_checkpoint_naming=form == "numbered")
    accelerator = Accelerator(project_config=project)
    torch.manual_seed(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    loader = DataLoader(Noisy(4 * BATCHES), batch_size=4, shuffle=True)
    evaluation = DataLoader(Noisy(16), batch_size=8)
    model, optimizer, loader, evaluation, schedule = accelerator.prepare(
        model, optimizer, loader, evaluation, schedule
    )
    parameter = next(iter(model.parameters()))
    steps = 0
    epochs = range(EPOCHS)

    def train_epoch() -> None:
        nonlocal steps
        for rows, targets in loader:
            optimizer.zero_grad()
            accelerator.backward((model(rows) - targets).pow(2).mean())
            optimizer.step()
            steps += 1
            if seen is not None and steps >= wait_at:
                (seen / str(os.getpid())).touch()
                time.sleep(0.05)  # or it would be through before Stop is heard
            # Not by a number of the loop's own, which begins anew.
            if form == "break" and int(optimizer.state[parameter]["step"]) % 5 == 0:
                break
        schedule.step()
        for rows, _targets in evaluation:
            with torch.no_grad():
                model(rows)

    if form == "phases":  # an epoch by itself, and two loops over epochs
        train_epoch()
        for _ in accelerator.progress(range(1)):
            train_epoch()
        epochs = range(EPOCHS - 2)
    for _ in accelerator.progress(epochs) if form in ("progress", "phases") else epochs:
        train_epoch()
    return steps, optimizer.param_groups[0]["lr"]


def weights(model: nn.Module) -> list[Any]:
    return [parameter.tolist() for parameter in model.parameters()]


def stopped(folder: Path, function: Any, args: tuple[Any, ...], config: RunConfig) -> str:
    """What is said of a launch whose function puts files into the folder when it may be stopped."""
    folder.mkdir()
    with pressing_stop(folder, after_s=0.1), pytest.raises(LaunchInterrupted) as caught:
        notebook_launcher(function, args, config=config)
    return str(caught.value)


def assert_goes_on(tmp_path: Path, form: str, *moments: int, **settings: Any) -> None:
    config = RunConfig(device="cpu", **{"num_processes": 2} | settings)
    unbroken = new_model()
    results = notebook_launcher(train, (unbroken, None, 0, form), config=config)
    model = new_model()
    going_on = config.changed(resume=True)
    for number, wait_at in enumerate(moments):
        seen = tmp_path / str(number)
        words = stopped(seen, train, (model, seen, wait_at, form), going_on)
        assert "its weights are in `args[0]`; run it again to go on from there" in words
    left = notebook_launcher(train, (model, None, 0, form), config=going_on)
    assert weights(model) == weights(unbroken)
    assert left[0][1] == results[0][1], "the learning rate"
    assert left[0][0] < results[0][0] - sum(moments) + 1, "steps that were done are not done again"
    # It has come to its end: the next one begins anew.
    again = new_model()
    anew = notebook_launcher(train, (again, None, 0, form), config=going_on)
    assert anew[0][0] == results[0][0]
    assert weights(again) == weights(unbroken)


@pytest.mark.parametrize("form", ["progress", "range", "phases"])
def test_it_goes_on_to_the_bit(form: str, tmp_path: Path) -> None:
    assert_goes_on(tmp_path, form, 13, 7)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "moment"),
    [
        # An epoch has eight steps of each rank, or five.
        *itertools.product(["progress", "range"], [1, 7, 8]),
        *itertools.product(["break"], [3, 5]),
        *itertools.product(["phases"], [3, 11, 19]),  # in each of its phases
        ("numbered", 11),  # checkpoints of the function's own are none of these
    ],
)
def test_the_first_and_last_step_of_an_epoch(form: str, moment: int, tmp_path: Path) -> None:
    assert_goes_on(tmp_path, form, moment)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"strategy": "fsdp"}, marks=SHARDING),
        {"zero_stage": 2, "deepspeed": {"train_micro_batch_size_per_gpu": 4}},
        {"mixed_precision": "bf16"},
        {"gradient_accumulation_steps": 3},
    ],
    ids=["fsdp", "zero 2", "bf16", "accumulation"],
)
def test_every_way_to_train_goes_on(settings: dict[str, Any], tmp_path: Path) -> None:
    assert_goes_on(tmp_path, "progress", 13, **settings)


def test_one_process_goes_on_in_a_folder(tmp_path: Path) -> None:
    assert_goes_on(tmp_path, "range", 21, 9, num_processes=1)
    config = RunConfig(num_processes=1, resume=tmp_path / "kept")
    model = new_model()
    seen = tmp_path / "seen"
    stopped(seen, train, (model, seen, 3, "range"), config)
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["0"]
    steps, _ = notebook_launcher(train, (model, None, 0, "range"), config=config)[0]
    assert steps < EPOCHS * BATCHES
    assert not [*(tmp_path / "kept").iterdir()]


class FullAtLast:
    """An object of the function's for which there is room once: not after it was restored."""

    def __init__(self, folder: Path) -> None:
        self._mark = folder / "restored"

    def state_dict(self) -> dict[str, Any]:
        if self._mark.exists():
            raise OSError(28, "No space left on device")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._mark.touch()


class SlowToSave(FullAtLast):
    """An object of the function's that takes longer to save than a step may take."""

    def state_dict(self) -> dict[str, Any]:
        time.sleep(3 * time_limits.STEP_S)
        return {}


def train_with_it(
    model: nn.Module, folder: Path, seen: Path | None, kind: type[FullAtLast] = FullAtLast
) -> int:
    accelerator = Accelerator()
    loader = DataLoader(Noisy(400), batch_size=4)
    prepared = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), loader)
    model, optimizer, loader = prepared
    accelerator.register_for_checkpointing(kind(folder))
    steps = 0
    for rows, _targets in loader:
        optimizer.zero_grad()
        accelerator.backward(model(rows).mean())
        optimizer.step()
        steps += 1
        if seen is not None and steps >= 3:
            (seen / str(os.getpid())).touch()
            time.sleep(0.05)
    return steps


def test_without_room_for_the_state_the_next_launch_begins_anew(tmp_path: Path) -> None:
    config = RunConfig(num_processes=1, resume=tmp_path / "kept")
    model = new_model()
    for name in ("first", "second"):
        seen = tmp_path / name
        told = stopped(seen, train_with_it, (model, tmp_path, seen), config)
        assert ("run it again to go on from there" in told) == (name == "first")
    # Not from the first Stop: the model has learned more since.
    assert notebook_launcher(train_with_it, (model, tmp_path, None), config=config) == [100]


def test_a_state_that_takes_longer_than_a_step_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_limits, "STEP_S", 0.3)
    config = RunConfig(num_processes=1, resume=tmp_path / "kept")
    seen = tmp_path / "seen"
    told = stopped(seen, train_with_it, (new_model(), tmp_path, seen, SlowToSave), config)
    assert "run it again to go on from there" in told


def test_another_number_of_processes_is_refused(tmp_path: Path) -> None:
    config = RunConfig(num_processes=2, device="cpu", resume=tmp_path / "kept")
    model = new_model()
    seen = tmp_path / "seen"
    stopped(seen, train, (model, seen, 3, "range"), config)
    before = weights(model)
    with pytest.raises(ConfigError, match=r"had 2 processes, and this one has 1.*num_processes=2"):
        notebook_launcher(train, (model, None, 0, "range"), config=config.changed(num_processes=1))
    assert weights(model) == before
    assert notebook_launcher(train, (model, None, 0, "range"), config=config)[0][0] > 0


def test_where_it_cannot_be_kept_is_refused() -> None:
    plan = resolve(RunConfig(num_processes=2, device="cpu", resume=True))
    two_nodes = plan.config.changed(num_nodes=2, master_addr="10.0.0.1", use_port=29611)
    with pytest.raises(ConfigError, match="num_nodes=2: notebooks that meet stop in no common"):
        launched_functions.resume_folder(replace(plan, config=two_nodes), train)
    with pytest.raises(ConfigError, match="a folder that all hosts see"):
        launched_functions.resume_folder(replace(plan, engine="ray"), train)


def train_endlessly(model: nn.Module, seen: Path) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in itertools.count():
        optimizer.zero_grad()
        model(torch.ones(6)).sum().backward()
        optimizer.step()
        if step == 5:
            (seen / str(os.getpid())).touch()
        time.sleep(0.01)


def test_what_would_help_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pressing_stop(tmp_path), pytest.raises(LaunchInterrupted) as caught:
        notebook_launcher(train_endlessly, (new_model(), tmp_path), 1)
    assert "with resume=True the next launch would go on from there" in str(caught.value)
    for path in tmp_path.iterdir():
        path.unlink()
    with pressing_stop(tmp_path), pytest.raises(LaunchInterrupted) as caught:
        notebook_launcher(train_endlessly, (new_model(), tmp_path), 1, resume=True)
    assert str(caught.value).endswith("its weights are in `args[0]`")
