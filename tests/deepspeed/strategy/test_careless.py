"""What careless configurations train in real workers: what they say, or nothing at all."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from nbaccel import Accelerator, DeepSpeedPlugin, Pool
from nbaccel.errors import WorkerDied
from tests.deepspeed import needs
from tests.deepspeed.strategy.test_disk import net, swapped_to
from tests.deepspeed.test_swap_space import small_disk  # noqa: F401 - a fixture

pytestmark = pytest.mark.slow


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

    def test_a_pool_leaves_no_file(self, tmp_path):
        kept = tmp_path / "zero_stage_3" / "of the user"
        kept.mkdir(parents=True)
        with Pool(num_processes=2) as pool:
            assert min(pool.launch(train_on, (tmp_path,)).values) > 0
            with pytest.raises(WorkerDied):
                pool.launch(train_on, (tmp_path, "SIGKILL"))
            assert not list(tmp_path.rglob("*.swp"))
        assert [*kept.parent.iterdir()] == [kept]
