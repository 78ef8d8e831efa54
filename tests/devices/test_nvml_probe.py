from __future__ import annotations

import stat
import sys

import pytest
import torch

from nbaccel.devices.cuda import CudaDevice
from nbaccel.devices.nvml import Card, is_worth_it, probe_gpus
from nbaccel.plan.inventory import Gpu


def test_it_is_asked_only_where_a_driver_has_made_nodes(tmp_path):
    assert not is_worth_it(tmp_path, "2.13.0")
    (tmp_path / "nvidia0").touch()
    assert is_worth_it(tmp_path, "2.13.0")
    assert not is_worth_it(tmp_path, "2.13.0+cpu")


@pytest.mark.slow
def test_torch_itself_answers_in_another_process():
    gpus, note = probe_gpus()
    assert len(gpus) == torch.cuda.device_count()
    assert bool(note) == (not gpus)


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
    monkeypatch.setattr("nbaccel.devices.nvml.find_cards", lambda: (cards, ""))
    environ = {} if order is None else {"CUDA_DEVICE_ORDER": order}
    assert CudaDevice().detect(environ)["gpu_order_known"] is known
