from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch

from nbaccel.devices.cuda import CudaDevice, driver_in_use
from nbaccel.plan import Gpu, Inventory, inspect_machine

MACHINE = Inventory(cpu_cores=1, host_total_bytes=1, host_available_bytes=1, gpu_note="no driver")
H100 = Gpu(
    index=0,
    name="H100",
    total_bytes=80 * 2**30,
    free_bytes=1,
    compute_capability=(9, 0),
    uuid="GPU-1",
)
LIBRARY = "7f00-7f01 r-xp 00000000 08:01 123 /usr/lib/x86_64-linux-gnu/libcuda.so.550.54.15\n"


@pytest.fixture
def process(tmp_path):
    def build(maps, files):
        (tmp_path / "maps").write_text(maps)
        (tmp_path / "fd").mkdir()
        for number, target in enumerate(files):
            (tmp_path / "fd" / str(number)).symlink_to(target)
        return tmp_path

    return build


@pytest.mark.parametrize(
    ("maps", "files", "in_use"),
    [
        ("", [], False),
        (LIBRARY, ["/dev/null"], False),
        ("", ["/dev/nvidiactl"], False),
        (LIBRARY.replace("libcuda.so", "libcudart.so"), ["/dev/nvidiactl"], False),
        (LIBRARY, ["/dev/null", "/dev/nvidia-uvm"], True),
        (LIBRARY, ["/dev/dxg"], True),
    ],
)
def test_the_drivers_traces(process, maps, files, in_use):
    assert driver_in_use(process(maps, files)) is in_use


def test_a_process_without_proc_is_taken_as_untouched(tmp_path):
    assert driver_in_use(tmp_path / "none") is False


def test_units_and_backend(monkeypatch):
    device = CudaDevice()
    two = dataclasses.replace(MACHINE, gpus=(H100, dataclasses.replace(H100, index=1)))

    assert device.units(MACHINE) == ()
    assert "no driver" in device.refusal(MACHINE)
    assert device.units(two) == two.gpus
    assert device.refusal(two) == ""
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: name == "nccl")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device.process_group_backend(2) == "cpu:gloo,cuda:nccl"
    assert device.process_group_backend(3) == "gloo"
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: False)
    assert device.process_group_backend(2) == "gloo"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("waking", "said"),
    [
        ("import torch; torch.zeros(1, device='cuda')", "torch has a CUDA context"),
        (
            "import ctypes; cuda = ctypes.CDLL('libcuda.so.1'); assert cuda.cuInit(0) == 0",
            "other than torch",
        ),
    ],
)
def test_a_woken_gpu_is_a_hazard(waking, said):
    if not inspect_machine().gpus:
        pytest.skip(f"no GPU here: {inspect_machine().gpu_note}")
    code = (
        "from nbaccel.devices.cuda import CudaDevice\n"
        "assert CudaDevice().hazards() == ()\n"
        f"{waking}\n"
        "print(CudaDevice().hazards())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert said in done.stdout, done.stderr
