"""What careless configurations train in real workers: what they say, or nothing at all."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nbaccel import Accelerator, ConfigError, DeepSpeedPlugin, Pool, notebook_launcher
from nbaccel.config import RunConfig
from nbaccel.errors import WorkerDied
from nbaccel.utils import DummyOptim, DummyScheduler
from tests.deepspeed import needs
from tests.deepspeed.strategy.test_disk import net, swapped_to
from tests.deepspeed.test_swap_space import small_disk  # noqa: F401 - a fixture

pytestmark = pytest.mark.slow

FILE = {"lr": 3e-5, "weight_decay": 0.1}
OWN_RATE = {"type": "WarmupDecayLR", "params": dict.fromkeys(
    ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"
)}  # fmt: skip


def first_step(settings: dict[str, Any], make: Any, schedule: Any) -> tuple[Any, Any, Any]:
    plugin = DeepSpeedPlugin(hf_ds_config=settings)
    accelerator = Accelerator(deepspeed_plugin=plugin, cpu=True)
    model = nn.Linear(8, 8)
    optimizer = make(model)
    engine, optimizer, scheduler = accelerator.prepare(model, optimizer, schedule(optimizer))
    accelerator.backward(engine(torch.randn(2, 8)).sum())
    optimizer.step()
    scheduler.step()
    decay = optimizer.param_groups[0]["weight_decay"]
    rate = plugin.get_value("scheduler.params.warmup_max_lr")
    return next(engine.parameters()).dtype, decay, rate


def train() -> dict[str, Any]:
    accelerator = Accelerator(cpu=True)
    engine = accelerator.prepare(model := nn.Linear(8, 8), torch.optim.AdamW(model.parameters()))[0]
    found: dict[str, Any] = {"run": next(engine.parameters()).dtype}
    accelerator.free_memory()
    warm = {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": 1}}
    by_file = {
        "bfloat16": {"enabled": "true"},
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": FILE},
        "scheduler": warm,
    }
    found["defaults"] = first_step(by_file, lambda m: DummyOptim(m.parameters()), DummyScheduler)
    by_code = {"zero_optimization": {"stage": 1}, "scheduler": OWN_RATE}
    found["own"] = first_step(
        by_code,
        lambda m: torch.optim.AdamW(m.parameters(), lr=0.25),
        lambda optimizer: DummyScheduler(optimizer, total_num_steps=100, warmup_num_steps=1),
    )
    return found


@pytest.mark.filterwarnings("ignore")
class TestInWorkers:
    pytestmark = needs.ENGINE

    def test_a_precision_written_as_text_is_trained_in_and_defaults_contradict_no_file(self):
        config = RunConfig(
            num_processes=2,
            device="cpu",
            deepspeed={"zero_optimization": {"stage": 2}, "bf16": {"enabled": "true"}},
        )
        found = notebook_launcher(train, config=config)[0]
        assert found["run"] == torch.bfloat16
        dtype, decay, rate = found["defaults"]
        assert (dtype, decay) == (torch.bfloat16, 0.1)
        assert rate == 3e-5, "the file's, not a default that nobody said"
        assert found["own"][2] == 0.25, "the code's own optimizer's"


def train_on(folder: Path, end: str = "") -> int:
    plugin = DeepSpeedPlugin(hf_ds_config=swapped_to(str(folder)))
    accelerator = Accelerator(deepspeed_plugin=plugin, mixed_precision="bf16", cpu=True)
    model = net()
    engine, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    accelerator.backward(engine(torch.randn(4, 64)).sum())
    optimizer.step()
    swapped = len(list(folder.rglob("*.swp")))
    accelerator.wait_for_everyone()
    if end and accelerator.process_index == 1:
        os.kill(os.getpid(), getattr(signal, end))
    accelerator.wait_for_everyone()
    return swapped


@pytest.mark.filterwarnings("ignore")
class TestOnASmallDisk:
    pytestmark = needs.DISK

    def test_it_is_refused_with_numbers_and_leaves_no_file(self, small_disk):  # noqa: F811
        with pytest.raises(ConfigError, match=r"too little room: DeepSpeed will write about \d+"):
            notebook_launcher(train_on, (small_disk,), num_processes=2)
        assert not list(small_disk.rglob("*.swp"))

    def test_workers_that_are_killed_leave_no_file(self, tmp_path):
        kept = tmp_path / "swap" / "zero_stage_3" / "of the user"
        kept.mkdir(parents=True)
        with pytest.raises(WorkerDied):
            notebook_launcher(train_on, (tmp_path / "swap", "SIGKILL"), num_processes=2)
        assert not list(tmp_path.rglob("*.swp"))
        assert [*(tmp_path / "swap" / "zero_stage_3").iterdir()] == [kept]

    def test_a_pool_leaves_no_file(self, tmp_path):
        with Pool(num_processes=2) as pool:
            assert min(pool.launch(train_on, (tmp_path,)).values) > 0
            with pytest.raises(WorkerDied):
                pool.launch(train_on, (tmp_path, "SIGKILL"))
            assert not list(tmp_path.rglob("*.swp"))
