"""Killed with SIGKILL at any step, or in the middle of a save, training goes on as if unbroken."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nbaccel import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    ProjectConfiguration,
    WorkerDied,
    notebook_launcher,
    set_seed,
)

pytestmark = pytest.mark.slow

EPOCHS, ROWS, BATCH = 2, 37, 4


class Reached:
    """How far the training is: saved and loaded with the rest."""

    def __init__(self) -> None:
        self.epoch = 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(ROWS, 6, generator=generator), torch.randint(3, (ROWS,), generator=generator)
    )


def network() -> nn.Module:
    set_seed(5)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))


def train(
    folder: Path, die: tuple[int, int] | float | None = None, options: Any = None
) -> dict[str, torch.Tensor]:
    """Train with a checkpoint after every batch; go on from the last one if there is any.

    Args:
        folder: Of the project.
        die: Rank and number of the step after which it is killed, or seconds until rank 0 is.
        options: Of the accelerator.
    """
    torch.set_num_threads(1)
    accelerator = Accelerator(
        project_config=ProjectConfiguration(
            project_dir=folder, automatic_checkpoint_naming=True, total_limit=2
        ),
        **(options or {}),
    )
    model: Any = network()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule: Any = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=200)
    loader: Any = DataLoader(data(), batch_size=BATCH, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    reached = Reached()
    accelerator.register_for_checkpointing(reached)
    resumed = any(folder.glob("checkpoints/checkpoint_*"))
    if resumed:
        accelerator.load_state()
    if isinstance(die, float) and accelerator.is_main_process:
        threading.Timer(die, os.kill, (os.getpid(), signal.SIGKILL)).start()
    steps = 0
    for epoch in range(reached.epoch, EPOCHS):
        first = resumed and epoch == reached.epoch
        batches = accelerator.skip_first_batches(loader) if first else loader
        reached.epoch = epoch
        for x, y in batches:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            accelerator.save_state()
            steps += 1
            if die == (accelerator.process_index, steps):
                os.kill(os.getpid(), signal.SIGKILL)
    return {k: v.cpu() for k, v in accelerator.get_state_dict(model).items()}


def until_done(folder: Path, deaths: list[Any], **launch: Any) -> dict[str, torch.Tensor]:
    """Launch again and again: first with each death, at last without one."""
    options = launch.pop("options", None)
    for death in deaths:
        try:
            notebook_launcher(train, (folder, death, options), num_processes=2, **launch)
        except WorkerDied:
            continue
    found: dict[str, torch.Tensor] = notebook_launcher(
        train, (folder, None, options), num_processes=2, **launch
    )[0]
    return found


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 3},
        {"fsdp_plugin": FullyShardedDataParallelPlugin()},
        {"fsdp_plugin": FullyShardedDataParallelPlugin(state_dict_type="FULL_STATE_DICT")},
    ],
    ids=["ddp", "accumulating", "fsdp in shards", "fsdp in one file"],
)
def test_a_training_killed_at_any_step_ends_with_the_same_weights(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    expected = until_done(tmp_path / "unbroken", [], options=options)
    # 37 rows make 5 rounds of 2 batches: the fifth death is at the very end of an epoch.
    deaths: list[Any] = [(0, 1), (1, 2), (0, 2), (1, 1)]
    assert_equal(until_done(tmp_path / "killed", deaths, options=options), expected)


def test_a_training_killed_at_any_moment_ends_with_the_same_weights(tmp_path: Path) -> None:
    expected = until_done(tmp_path / "unbroken", [])
    seed = random.randrange(10**6)
    moments = random.Random(seed)
    deaths: list[Any] = [moments.uniform(0.0, 0.25) for _ in range(8)]
    try:
        assert_equal(until_done(tmp_path / "killed", deaths), expected)
    except BaseException:
        print(f"seed {seed}")
        raise
    # A training that was killed after its last save has nothing left to save; the next one sweeps.
    folder = tmp_path / "killed" / "checkpoints"
    (folder / ".checkpoint_1.partial-0123abcd").mkdir()
    Accelerator(
        cpu=True,
        project_config=ProjectConfiguration(
            project_dir=tmp_path / "killed", automatic_checkpoint_naming=True, total_limit=2
        ),
    ).save_state()
    left = sorted(path.name for path in folder.iterdir())
    assert len(left) == 2, left
    assert all(name.startswith("checkpoint_") for name in left), "what a kill left is swept up"
