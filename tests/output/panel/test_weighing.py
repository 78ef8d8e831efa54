"""What workers hold, looked at from outside."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from nbaccel import Accelerator, notebook_launcher
from nbaccel.base.processes import process_use
from nbaccel.devices.nvml import Meter
from tests.output.panel.conftest import Seen

MIB = 2**20


def test_a_process_weighs_what_it_holds_and_nothing_once_it_has_gone() -> None:
    code = "held = bytearray(200 << 20); print('ready', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        use = process_use(child.pid)
        assert use is not None
        assert 200 * MIB < use.rss_bytes < 300 * MIB
        assert 0 < use.cpu_s < 30
        child.kill()
    assert process_use(child.pid) is None


@pytest.mark.gpu
def test_the_memory_of_a_gpu_is_on_the_board_and_no_context_in_the_notebook(seen: Seen) -> None:
    def train() -> None:
        accelerator = Accelerator()
        held = torch.ones(64 * MIB, dtype=torch.uint8, device=accelerator.device)
        accelerator.log({"loss": 1.0, "on device": held})

    notebook_launcher(train, (), 1, start_method="template")
    (facts,) = seen.board.ranks.values()
    assert facts.memory.peak_device is not None
    assert facts.memory.peak_device >= 64 * MIB
    assert not torch.cuda.is_initialized()


@pytest.mark.gpu
def test_a_meter_reads_and_lets_go() -> None:
    meter = Meter.open()
    assert meter is not None
    assert all(held > 0 for held in meter.read().values())
    meter.close()
