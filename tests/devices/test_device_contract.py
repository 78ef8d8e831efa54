"""One suite for every device that has an implementation."""

from __future__ import annotations

import subprocess
import sys

import pytest

from nbaccel import _catalog
from nbaccel.abc.device import Device
from nbaccel.capabilities import DEVICES
from nbaccel.plan import inspect_machine

ROWS = [row for row in DEVICES if row.path]
# Only what wakes the hardware needs it; the rest must hold on any machine.
NEEDING_HARDWARE = [
    pytest.param(row, id=row.name, marks=() if row.name == "cpu" else pytest.mark.gpu)
    for row in ROWS
]


def run(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )


def require_hardware(row):
    found = inspect_machine()
    if _catalog.device(row.name).count(found) == 0:
        pytest.skip(f"no {row.name} here: {found.gpu_note}")


def test_the_contract_stays_narrow():
    methods = [name for name in vars(Device) if not name.startswith("_") and name != "name"]
    assert len(methods) <= 12


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_what_holds_without_the_hardware(row):
    device = _catalog.device(row.name)
    found = inspect_machine()

    assert device.name == row.name
    assert device.count(found) >= 0
    assert device.describe(found)
    assert vars(device) == {}
    one = device.process_group_backend(1, found)
    assert one in {row.group_backend, row.shared_group_backend}
    assert device.process_group_backend(10_000, found) == row.shared_group_backend


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_looking_for_hazards_wakes_nothing(row):
    done = run(
        "import os, sys\n"
        "from nbaccel import _catalog\n"
        f"assert _catalog.device({row.name!r}).hazards() == ()\n"
        "assert 'torch' not in sys.modules\n"
        "import torch\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        f"assert _catalog.device({row.name!r}).hazards() == ()\n"
        "assert len(os.listdir('/proc/self/task')) == before\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("row", NEEDING_HARDWARE)
def test_a_worker_computes_on_its_device(row):
    require_hardware(row)
    done = run(
        "import torch\n"
        "from nbaccel import _catalog\n"
        f"device = _catalog.device({row.name!r})\n"
        "for local_rank in (0, 1):\n"
        "    device.enter_worker(local_rank)\n"
        "    place = device.torch_device(local_rank)\n"
        f"    assert place.type == {row.name!r}\n"
        "    weight = torch.ones(64, 64, device=place, requires_grad=True)\n"
        "    (torch.ones(64, 64, device=place) @ weight).sum().backward()\n"
        "    assert weight.grad.sum().item() == 64.0 ** 3\n"
        "    if place.type == 'cuda':\n"
        "        assert torch.cuda.current_device() == place.index\n"
    )
    assert done.returncode == 0, done.stderr
