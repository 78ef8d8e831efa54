from __future__ import annotations

import dataclasses
import json
import stat
import sys

import pytest
import torch

from nbaccel.base import env
from nbaccel.devices.cuda import (
    Card,
    CudaDevice,
    driver_in_use,
    find_cards,
    is_worth_it,
    probe_gpus,
    visible_gpus,
)
from nbaccel.plan import Gpu, Inventory, inspect_machine
from tests.programs import run_program

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
def test_the_drivers_traces(tmp_path, maps, files, in_use):
    (tmp_path / "maps").write_text(maps)
    (tmp_path / "fd").mkdir()
    for number, target in enumerate(files):
        (tmp_path / "fd" / str(number)).symlink_to(target)
    assert driver_in_use(tmp_path) is in_use
    assert driver_in_use(tmp_path / "none") is False, "a process without /proc"


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
    done = run_program([sys.executable, "-c", code], check=False)
    assert said in done.stdout, done.stderr


def gpu(uuid, index=0):
    return dataclasses.replace(H100, uuid=uuid, index=index)


CARDS = tuple(Card(gpu=gpu(f"GPU-{tail}", index)) for index, tail in enumerate(["aa1", "aa2", "b"]))
SPLIT = (
    Card(gpu=gpu("GPU-s"), partitioned=True, parts=(gpu("MIG-1"), gpu("MIG-2", 1))),
    Card(gpu=gpu("GPU-w", 1)),
)


def uuids(cards, setting):
    found = visible_gpus(cards, setting)
    assert [one.index for one in found] == list(range(len(found)))
    return [one.uuid.partition("-")[2] for one in found]


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (None, ["aa1", "aa2", "b"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0", ["aa1"]),
        ("2,0", ["b", "aa1"]),
        (" 2 , 0 ", ["b", "aa1"]),
        ("0,-1,2", ["aa1"]),
        ("0,3,2", ["aa1"]),
        ("3", []),
        ("0,,2", ["aa1"]),
        ("0,x,2", ["aa1"]),
        ("1gpu,2nd", ["aa2", "b"]),
        ("1,1", []),
        ("0,1,0", []),
        ("+1", ["aa2"]),
        ("GPU-b", ["b"]),
        ("GPU-b,GPU-aa1", ["b", "aa1"]),
        ("GPU-aa", []),
        ("GPU-b,GPU-aa,GPU-aa1", ["b"]),
        ("GPU-b,GPU-b", []),
        ("GPU-zz", []),
        ("GPU-b,0", ["b"]),
        ("0,GPU-b", ["aa1"]),
        ("MIG-1", []),
    ],
)
def test_cuda_visible_devices(setting, expected):
    assert uuids(CARDS, setting) == expected


ALL_IN_PARTS = (Card(gpu=gpu("GPU-s"), partitioned=True),)


@pytest.mark.parametrize(
    ("cards", "setting", "expected"),
    [
        (SPLIT, None, ["w"]),
        (SPLIT, "MIG-2", ["2"]),
        (SPLIT, "MIG-2,MIG-1", ["2"]),
        (SPLIT, "0", ["1"]),
        (SPLIT, "0,1", ["1"]),
        (SPLIT, "1,0", ["w"]),
        (SPLIT, "GPU-s", []),
        (SPLIT, "GPU-w", ["w"]),
        (SPLIT[:1], None, ["1"]),  # only partitioned cards give their first part
        (ALL_IN_PARTS, None, []),
        (ALL_IN_PARTS, "0", []),
    ],
)
def test_partitioned_cards(cards, setting, expected):
    assert uuids(cards, setting) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("setting", [None, "", "0", "-1", "0,0", "99", "UUID", "PREFIX"])
def test_torch_counts_the_same(setting):
    cards, note = find_cards()
    if not cards:
        pytest.skip(f"no GPU here: {note}")
    first = cards[0].gpu.uuid
    setting = {"UUID": first, "PREFIX": first[:12]}.get(setting, setting)
    environ = {k: v for k, v in env.snapshot().items() if k != "CUDA_VISIBLE_DEVICES"}
    if setting is not None:
        environ["CUDA_VISIBLE_DEVICES"] = setting
    code = (
        "import json, torch\n"
        "from nbaccel.plan import inspect_machine\n"
        "ours = [(g.name, list(g.compute_capability)) for g in inspect_machine().gpus]\n"
        "assert not torch.cuda.is_initialized()\n"
        "cuda = torch.cuda\n"
        "theirs = [(cuda.get_device_name(i), list(cuda.get_device_capability(i)))\n"
        "          for i in range(cuda.device_count())]\n"
        "print(json.dumps([ours, theirs]))\n"
    )
    done = run_program([sys.executable, "-c", code], env=environ, check=False)
    assert done.returncode == 0, done.stderr
    ours, theirs = json.loads(done.stdout)
    assert ours == theirs


@pytest.mark.slow
def test_torch_answers_in_another_process_where_a_driver_has_made_nodes(tmp_path):
    cards, note = find_cards()
    assert bool(cards) != bool(note)
    gpus, note = probe_gpus()
    assert len(gpus) == torch.cuda.device_count()
    assert bool(note) == (not gpus)
    assert not is_worth_it(tmp_path, "2.13.0")
    (tmp_path / "nvidia0").touch()
    assert is_worth_it(tmp_path, "2.13.0")
    assert not is_worth_it(tmp_path, "2.13.0+cpu")


def test_its_answer_becomes_gpus_and_its_failure_a_note(tmp_path):
    def interpreter(body: str) -> tuple[str]:
        script = tmp_path / f"python{abs(hash(body))}"
        script.write_text(f"#!{sys.executable}\n{body}\n")
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        return (str(script),)

    gpus, note = probe_gpus(interpreter("print('[[\"H200\", 100, 90, 9, 0]]')"))
    assert gpus == (
        Gpu(index=0, name="H200", total_bytes=100, free_bytes=90, compute_capability=(9, 0)),
    )
    assert note == ""
    for broken in ("raise SystemExit(3)", "print('no JSON')", ""):
        gpus, note = probe_gpus(interpreter(broken))
        assert gpus == ()
        assert "asked torch for GPUs failed" in note
    assert "failed" in probe_gpus((str(tmp_path / "nothing"),))[1]


@pytest.mark.parametrize(
    ("capabilities", "order", "known"),
    [
        ([(9, 0), (9, 0)], None, True),
        ([(7, 5), (9, 0)], None, False),
        ([(7, 5), (9, 0)], "PCI_BUS_ID", True),
        ([(7, 5), (9, 0)], "FASTEST_FIRST", False),
    ],
)
def test_mixed_gpus_may_be_counted_in_another_order(monkeypatch, capabilities, order, known):
    cards = tuple(
        Card(gpu=Gpu(index=index, name="GPU", compute_capability=capability))
        for index, capability in enumerate(capabilities)
    )
    monkeypatch.setattr("nbaccel.devices.cuda.find_cards", lambda: (cards, ""))
    environ = {} if order is None else {"CUDA_DEVICE_ORDER": order}
    assert CudaDevice().detect(environ)["gpu_order_known"] is known
