"""Stop of a launch that trains: every rank ends with the same step, and the weights are kept.

Each step of these functions takes exactly 1 from every weight: weights of two steps, or of half a
one, would be seen.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from nbaccel import Accelerator, Pool, RunConfig, notebook_launcher
from nbaccel.errors import LaunchInterrupted
from nbaccel.loops.loop_watch import StepBoundaries
from tests.process import stop_pressed_when
from tests.strategies.needs import SHARDING

ENDLESS = 100_000
ZERO_2: dict[str, Any] = {
    "zero_stage": 2,
    "deepspeed": {
        "zero_allow_untested_optimizer": True,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
    },
}


class Sum(nn.Module):
    """The sum of its weights, so that each gradient is 1."""

    def __init__(self, num_rows: int = 6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_rows, 4))
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.weight.sum() + self.bias.sum() + 0 * batch.sum()


def batches(size: int = 400) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(size, 2)), batch_size=2)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0)


def train_ddp(model: nn.Module, seen: Path, has_loader: bool = True, pause_s: float = 0) -> None:
    dist.init_process_group("gloo")
    parallel = DistributedDataParallel(model)
    optimizer = sgd(parallel)
    loader = batches() if has_loader else [(torch.ones(2),)]
    for step, (batch,) in enumerate(pair for _ in range(ENDLESS) for pair in loader):
        optimizer.zero_grad()
        parallel(batch).backward()
        optimizer.step()
        note(seen, step)
        if step == 5:
            time.sleep(pause_s)


def train_prepared(model: nn.Module, seen: Path) -> None:
    accelerator = Accelerator()
    parallel, optimizer, loader = accelerator.prepare(model, sgd(model), batches())
    for step, (batch,) in enumerate(pair for _ in range(ENDLESS) for pair in loader):
        optimizer.zero_grad()
        accelerator.backward(parallel(batch))
        optimizer.step()
        note(seen, step)


def note(seen: Path, step: int) -> None:
    """Let the notebook see that steps are taken."""
    time.sleep(0.001)
    if step == 5:
        (seen / str(os.getpid())).touch()


def pressing_stop(seen: Path, *, after_s: float = 0.3, times: int = 1) -> Any:
    """A block in which Stop is pressed once ranks have taken steps."""
    return stop_pressed_when(lambda: any(seen.iterdir()), after_s=after_s, times=times)


def stopped(
    function: Callable[..., Any], model: nn.Module, seen: Path, *more: Any, **settings: Any
) -> LaunchInterrupted:
    """Launch what trains for ever, and press Stop."""
    settings = {"num_processes": 2, "device": "cpu"} | settings
    with pressing_stop(seen), pytest.raises(LaunchInterrupted) as caught:
        notebook_launcher(function, (model, seen, *more), config=RunConfig(**settings))
    return caught.value


def steps_of(model: nn.Module) -> int:
    """How many whole steps the weights are of."""
    taken = {-float(value) for tensor in model.state_dict().values() for value in tensor.flatten()}
    assert len(taken) == 1, taken
    (steps,) = taken
    assert steps == int(steps)
    return int(steps)


def assert_kept(error: LaunchInterrupted, model: nn.Module) -> None:
    steps = steps_of(model)
    assert steps > 5
    assert str(error).startswith(f"stopped at step {steps}; its weights are in `args[0]`")


@pytest.mark.parametrize(
    ("function", "num_processes"), [(train_ddp, 2), (train_prepared, 2), (train_prepared, 1)]
)
def test_weights_of_one_whole_step_come_home(function, num_processes, tmp_path):
    model = Sum()
    error = stopped(function, model, tmp_path, num_processes=num_processes)
    assert_kept(error, model)
    if num_processes == 1:
        assert "loss" in str(error.report())
    else:
        assert error.results == [None, None]
    # The next launch goes on with them; with torch's DDP, without a loader.
    again = tmp_path / "again"
    again.mkdir()
    before = steps_of(model)
    more = [False] if function is train_ddp else []
    stopped(function, model, again, *more, num_processes=num_processes)
    assert steps_of(model) > before


def test_stop_can_be_set_to_discard(tmp_path):
    model = Sum()
    error = stopped(train_ddp, model, tmp_path, on_stop="discard")
    assert "the model is as it was" in str(error)
    assert error.results is None
    assert steps_of(model) == 0


def test_a_second_press_discards(tmp_path):
    model = Sum()
    began = time.monotonic()
    with pressing_stop(tmp_path, times=2), pytest.raises(LaunchInterrupted) as caught:
        notebook_launcher(train_ddp, (model, tmp_path, True, 60), 2)
    assert "the model is as it was" in str(caught.value)
    assert steps_of(model) == 0
    assert time.monotonic() - began < 30, "it has waited for the step that takes a minute"


def save_when_stopped(model: nn.Module, seen: Path, fails: bool) -> str:
    try:
        train_ddp(model, seen)
    except KeyboardInterrupt:
        dist.barrier()  # ranks are in step, so they can go on together
        if fails:
            raise OSError("no space left to save") from None
        return f"saved {dist.get_rank()}"
    return "never"


@pytest.mark.parametrize("fails", [False, True])
def test_a_function_may_tidy_up_together_and_return(fails, tmp_path):
    model = Sum()
    error = stopped(save_when_stopped, model, tmp_path, fails)
    if not fails:
        assert_kept(error, model)
        assert error.results == ["saved 0", "saved 1"]
    else:
        assert "no space left to save" in str(error)
        assert "the model is as it was" in str(error)
        assert steps_of(model) == 0


def test_a_call_in_live_workers_keeps_them_and_the_weights(tmp_path):
    model = Sum()
    with Pool(2, namespace={}) as pool:
        with pressing_stop(tmp_path), pytest.raises(LaunchInterrupted) as caught:
            pool.call(train_prepared, model, tmp_path)
        assert_kept(caught.value, model)
        assert pool.call(dist.is_initialized) == [True, True]
        before = steps_of(model)
        again = tmp_path / "again"
        again.mkdir()
        with pressing_stop(again), pytest.raises(LaunchInterrupted):
            pool.call(train_prepared, model, again)
        assert steps_of(model) > before


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=SHARDING), "zero", "alone"])
def test_fifty_random_moments(strategy, tmp_path):
    settings: dict[str, Any] = {"num_processes": 1 if strategy == "alone" else 2, "device": "cpu"}
    if strategy == "fsdp":
        settings["strategy"] = "fsdp"
    if strategy == "zero":
        settings |= ZERO_2
    draw = random.Random(37)
    model = Sum(7)
    before = 0
    for number in range(50 if strategy == "ddp" else 10):
        seen = tmp_path / str(number)
        seen.mkdir()
        with (
            pressing_stop(seen, after_s=draw.uniform(0, 0.3)),
            pytest.raises(LaunchInterrupted, match="stopped at step"),
        ):
            notebook_launcher(train_prepared, (model, seen), config=RunConfig(**settings))
        assert steps_of(model) > before
        before = steps_of(model)


def boundaries_of(*events: str) -> list[int]:
    """Before which events boundaries lie: `read`, or an optimizer by its letter."""
    found: list[int] = []
    past: list[str] = []
    boundaries = StepBoundaries(lambda: found.append(len(past)))
    for event in events:
        if event == "read":
            boundaries.reads_batch()
        else:
            boundaries.about_to_step(ord(event))
            boundaries.stepped(ord(event))
        past.append(event)
    return found


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (["read", "a", "read", "a", "read"], [2, 4]),
        (["read", "read", "a", "read"], [3]),  # two batches make a step
        (["read", "d", "g", "read", "d", "g", "read"], [3, 6]),  # two optimizers
        (["read", "a", "read", "read", "read", "a"], [2]),  # an evaluation between steps
        (["a", "a", "a"], [1, 2]),  # no loader
        (["d", "g", "d", "g"], [2]),
        (["d", "d", "g", "d", "d", "g"], [1, 3, 4]),
        (["read", "a", "a", "a", "a"], [3, 4]),  # what was read are not the steps' batches
    ],
)
def test_boundaries_lie_between_steps(events, expected):
    assert boundaries_of(*events) == expected


def test_an_optimizer_of_an_earlier_phase_does_not_count():
    assert boundaries_of(*"aa", *"b" * 30)[-1] == 31
